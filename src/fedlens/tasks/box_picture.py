"""Pictures of detections: boxes with class and score on an image, and true boxes dashed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from fedlens.tasks.picture import BLACK, Line, captioned, enlarged
from fedlens.vision.mask_colors import ink_on, mask_colors

_WIDE = 448  # pixels that a picture has at least, so that labels fit
_LABELLED = 60  # boxes up to which each has its class and score written on it
_LISTED = 8  # classes below a picture
_DASH = 4  # pixels

Colour = tuple[int, int, int]
Boxes = NDArray[Any]


def class_colour(label: int) -> Colour:
    """The colour of a class, RGB from 0 to 255, as on pages; see `fedlens.vision.mask_colors`.

    >>> class_colour(0), class_colour(80) == tuple(mask_colors(81)[80].tolist())
    ((0, 114, 178), True)
    """
    red, green, blue = mask_colors(label + 1)[label].tolist()
    return red, green, blue


def boxes_drawn(
    image: NDArray[np.uint8],
    boxes: Boxes,
    labels: Boxes,
    scores: Boxes | None = None,
    truth: tuple[Boxes, Boxes] | None = None,
    classes: Sequence[str] = (),
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the image, at least 448 pixels wide, with the boxes, above their number in each class.

    Args:
        image: uint8 [C, H, W].
        boxes: [k, 4], left, top, right, bottom in pixels of the image.
        labels: [k], from 0 on; the colour of a box is that of its class.
        scores: [k], in descending order; None for true boxes alone. Each box is labelled with its class, and with its
            score, if at most 60 are drawn.
        truth: true boxes [m, 4] and their labels [m], drawn dashed.
        classes: the name of each class; numbers by default.
    """
    picture = enlarged(image, _WIDE)
    scale = picture.width / image.shape[2]
    draw = ImageDraw.Draw(picture)
    if truth is not None:
        for box, label in zip(truth[0], truth[1].tolist(), strict=True):
            _dashed(draw, [scale * edge for edge in box.tolist()], class_colour(label))
    ends = [""] * len(boxes) if scores is None else [f" {score:.2f}" for score in scores.tolist()]
    placed = [
        ([scale * edge for edge in box.tolist()], int(label), end)
        for box, label, end in zip(boxes, labels.tolist(), ends, strict=True)
    ]
    width = 2 if len(placed) <= _LABELLED else 1
    for box, label, _ in reversed(placed):  # the most confident one on top
        left, top, right, bottom = box
        if right >= left and bottom >= top:
            draw.rectangle(box, outline=class_colour(label), width=width)
    if len(placed) <= _LABELLED:
        for box, label, end in reversed(placed):
            _labelled(draw, box, f"{_name(classes, label)}{end}", class_colour(label), picture.size)
    named = _by_number(labels)[:_LISTED]
    lines = [*_counted(labels, classes), *_true(truth, classes)]
    return captioned(picture, lines, {row: class_colour(label) for row, (label, _) in enumerate(named)})


def _by_number(labels: Boxes) -> list[tuple[int, int]]:
    """Each class that occurs with its number of boxes, the class with the most first."""
    shown, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [(int(label), int(count)) for label, count in zip(shown[order], counts[order], strict=True)]


def _counted(labels: Boxes, classes: Sequence[str]) -> Iterator[Line]:
    """The lines below the picture: the boxes of each class, the class with the most first."""
    numbers = _by_number(labels)
    for label, count in numbers[:_LISTED]:
        yield f"{_name(classes, label)}: {count}", BLACK
    more = [count for _, count in numbers[_LISTED:]]
    if more:
        yield f"and {sum(more)} boxes of {len(more)} more classes", BLACK
    if not numbers:
        yield "no object", BLACK


def _true(truth: tuple[Boxes, Boxes] | None, classes: Sequence[str]) -> Iterator[Line]:
    """The line on the true boxes, if they are known."""
    if truth is None:
        return
    numbers = _by_number(truth[1])
    parts = [f"{_name(classes, label)} {count}" for label, count in numbers[:_LISTED]]
    parts += ["..."] if len(numbers) > _LISTED else []
    yield f"truth (dashed): {', '.join(parts) or 'no object'}", BLACK


def _name(classes: Sequence[str], label: int) -> str:
    return classes[label] if classes else str(label)


def _labelled(
    draw: ImageDraw.ImageDraw, box: Sequence[float], text: str, colour: Colour, size: tuple[int, int]
) -> None:
    """Writes the text on the colour, above the box, or inside it at the upper edge of the picture."""
    left, top, right, bottom = draw.textbbox((0, 0), text)
    width, height = right - left + 4, bottom - top + 4
    x = min(max(box[0], 0), max(0, size[0] - width))
    y = box[1] - height if box[1] >= height else box[1]
    y = min(max(y, 0), max(0, size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    draw.text((x + 2 - left, y + 2 - top), text, fill=ink_on(colour))


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
