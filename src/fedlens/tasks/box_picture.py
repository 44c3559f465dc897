"""Pictures of detections: boxes with class and score on an image, and true boxes dashed."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from fedlens.tasks.picture import BLACK, Line, captioned, enlarged

_WIDE = 448  # pixels that a picture has at least, so that labels fit
_LABELLED = 60  # boxes up to which each has its class and score written on it
_LISTED = 8  # classes below a picture
_DASH = 4  # pixels
_GOLDEN = 0.618034  # steps of the hue, so that neighbouring classes differ
# The first classes, told apart with every kind of colour vision (Okabe and Ito 2008).
_FIRST = ((213, 94, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233))

Colour = tuple[int, int, int]
Boxes = NDArray[Any]


def class_colour(label: int) -> Colour:
    """The colour of a class, RGB from 0 to 255.

    >>> class_colour(0), class_colour(80)
    ((213, 94, 0), (40, 191, 139))
    """
    if label < len(_FIRST):
        return _FIRST[label]
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1, 0.79, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)


def boxes_drawn(
    image: NDArray[np.uint8],
    boxes: Boxes,
    labels: Boxes,
    scores: Boxes,
    truth: tuple[Boxes, Boxes] | None = None,
    classes: Sequence[str] = (),
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the image, at least 448 pixels wide, with the boxes, above their number in each class.

    Args:
        image: uint8 [C, H, W].
        boxes: [k, 4], left, top, right, bottom in pixels of the image.
        labels: [k], from 0 on; the colour of a box is that of its class.
        scores: [k], in descending order. Each box is labelled with class and score if at most 60 are drawn.
        truth: true boxes [m, 4] and their labels [m], drawn dashed.
        classes: the name of each class; numbers by default.
    """
    picture = enlarged(image, _WIDE)
    scale = picture.width / image.shape[2]
    draw = ImageDraw.Draw(picture)
    if truth is not None:
        for box, label in zip(truth[0], truth[1].tolist(), strict=True):
            _dashed(draw, [scale * edge for edge in box.tolist()], class_colour(label))
    placed = [
        ([scale * edge for edge in box.tolist()], int(label), float(score))
        for box, label, score in zip(boxes, labels.tolist(), scores.tolist(), strict=True)
    ]
    width = 2 if len(placed) <= _LABELLED else 1
    for box, label, _ in reversed(placed):  # the most confident one on top
        left, top, right, bottom = box
        if right >= left and bottom >= top:
            draw.rectangle(box, outline=class_colour(label), width=width)
    if len(placed) <= _LABELLED:
        for box, label, score in reversed(placed):
            _labelled(draw, box, f"{_name(classes, label)} {score:.2f}", class_colour(label), picture.size)
    return captioned(picture, list(_counted(labels, truth, classes)))


def _counted(labels: Boxes, truth: tuple[Boxes, Boxes] | None, classes: Sequence[str]) -> Iterator[Line]:
    """The lines below the picture: the boxes of each class, the class with the most first."""
    if len(labels):
        shown, counts = np.unique(labels, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        for at in order[:_LISTED].tolist():
            label = int(shown[at])
            yield f"{_name(classes, label)}: {counts[at]}", class_colour(label)
        if len(order) > _LISTED:
            rest = order[_LISTED:]
            yield f"and {counts[rest].sum()} boxes of {len(rest)} more classes", BLACK
    else:
        yield "no object", BLACK
    if truth is not None:
        shown, counts = np.unique(truth[1], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:_LISTED].tolist()
        parts = [f"{_name(classes, int(shown[at]))} {counts[at]}" for at in order]
        parts += ["..."] if len(shown) > _LISTED else []
        yield f"truth (dashed): {', '.join(parts) or 'no object'}", BLACK


def _name(classes: Sequence[str], label: int) -> str:
    return classes[label] if classes else str(label)


def _labelled(
    draw: ImageDraw.ImageDraw, box: Sequence[float], text: str, colour: Colour, size: tuple[int, int]
) -> None:
    """Writes the text in white on the colour, above the box, or inside it at the upper edge of the picture."""
    left, top, right, bottom = draw.textbbox((0, 0), text)
    width, height = right - left + 4, bottom - top + 4
    x = min(max(box[0], 0), max(0, size[0] - width))
    y = box[1] - height if box[1] >= height else box[1]
    y = min(max(y, 0), max(0, size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    draw.text((x + 2 - left, y + 2 - top), text, fill="white")


def _dashed(draw: ImageDraw.ImageDraw, box: Sequence[float], colour: Colour) -> None:
    """Draws the box in dashes of the colour and white, seen on any image."""
    left, top, right, bottom = box
    sides = [((left, top), (right, top)), ((right, top), (right, bottom))]
    sides += [((right, bottom), (left, bottom)), ((left, bottom), (left, top))]
    for (x, y), (to_x, to_y) in sides:
        length = max(abs(to_x - x), abs(to_y - y))
        dashes = max(1, round(length / _DASH))
        for at in range(dashes):
            one, other = at / dashes, (at + 1) / dashes
            ends = (
                x + one * (to_x - x),
                y + one * (to_y - y),
                x + other * (to_x - x),
                y + other * (to_y - y),
            )
            draw.line(ends, fill="white" if at % 2 else colour, width=1)
