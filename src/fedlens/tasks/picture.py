"""Pictures of predictions: an image, enlarged, with lines of text, boxes or masks, and true boxes dashed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedlens.base.errors import one_line
from fedlens.core.dataset_info import VOID
from fedlens.vision.mask_colors import ink_on, mask_colors

WIDTH = 224  # pixels that a picture has at least
_TEXT, _MARGIN = 14, 6  # pixels
_SWATCH = 10  # pixels of a side
_END = 9  # characters at the end of a line that are always shown, such as a probability
BLACK, GREEN, RED = (20, 20, 20), (0, 110, 40), (180, 20, 20)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour = tuple[int, int, int]
Line = tuple[str, Colour]  # a text, and its colour


def enlarged(image: NDArray[np.uint8], width: int = WIDTH) -> Image.Image:
    """The image uint8 [C, H, W], of one or three channels, enlarged by a whole number to at least `width` pixels."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).convert("RGB")
    factor = -(-width // picture.width)
    return picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)


def captioned(
    picture: Image.Image, lines: Sequence[Line], swatches: Mapping[int, Colour] | None = None
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the picture with the lines below it; one that is too wide has dots before its last characters.

    Args:
        swatches: the colours of squares before lines, by the position of the line.

    >>> captioned(enlarged(np.zeros((1, 8, 8), np.uint8)), [("cat  97.0 %", BLACK)]).shape
    (250, 224, 3)
    """
    step = _TEXT + _MARGIN
    canvas = Image.new("RGB", (picture.width, picture.height + step * len(lines) + _MARGIN), "white")
    canvas.paste(picture)
    draw = ImageDraw.Draw(canvas)
    for row, (text, colour) in enumerate(lines):
        shown, font = _written(one_line(text))
        left, top = _MARGIN, picture.height + _MARGIN // 2 + row * step
        if swatches and row in swatches:
            draw.rectangle((left, top + 2, left + _SWATCH, top + 2 + _SWATCH), swatches[row], outline=BLACK)
            left += _SWATCH + _MARGIN
        draw.text((left, top), _fitting(shown, font, picture.width - left - _MARGIN), colour, font)
    return np.asarray(canvas)


def _written(text: str) -> tuple[str, Font]:
    """The text, and a font that has its letters; "?" for letters that no font at hand has.

    Pillow's own font has ASCII only. DejaVu Sans, which most systems have, covers Latin, Cyrillic and Greek.
    """
    if not text.isascii():
        try:
            return text, _dejavu()
        except OSError:
            text = unicodedata.normalize("NFKD", text.replace("\u00df", "ss"))
            text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return text.encode("ascii", "replace").decode(), _default()


@lru_cache(maxsize=1)
def _default() -> Font:
    return ImageFont.load_default(_TEXT)


@lru_cache(maxsize=1)
def _dejavu() -> Font:
    return ImageFont.truetype("DejaVuSans.ttf", _TEXT - 2)  # its letters are wider


def _fitting(text: str, font: Font, width: int) -> str:
    """The text, with dots in place of its middle where it is wider than `width` pixels."""
    start, end = text[:-_END], text[-_END:]
    shown = text
    while start and font.getlength(shown) > width:
        start = start[:-1]
        shown = f"{start.rstrip()}...{end}"
    return shown


_OPACITY = 0.55  # of the colours over the image
_GAP = 4  # pixels between two panels
_NAMED = 10  # classes in the legend


def mask_picture(
    image: NDArray[np.uint8], masks: Mapping[str, NDArray[np.integer]], classes: Sequence[str] = ()
) -> NDArray[np.uint8]:
    """uint8 [h, w, 3]: a panel for each mask, side by side, above the legend of the classes in them.

    Args:
        image: uint8 [C, H, W]. Each panel is at least 224 pixels wide.
        masks: by title, the class of each pixel [H, W]; pixels with another id, such as 255, have no colour.
        classes: the name of each class; numbers by default.

    >>> mask_picture(np.zeros((1, 8, 8), np.uint8), {"predicted": np.zeros((8, 8), np.uint8)}, ["road"]).shape
    (270, 224, 3)
    """
    largest = max((int(mask[mask < VOID].max(initial=0)) for mask in masks.values()), default=0)
    names = list(classes) or [str(label) for label in range(largest + 1)]
    colours = mask_colors(len(names))
    panels = [_panel(enlarged(image), mask, colours) for mask in masks.values()]
    width = sum(panel.width for panel in panels) + _GAP * (len(panels) - 1)
    picture = Image.new("RGB", (width, panels[0].height), "white")
    for k, panel in enumerate(panels):
        picture.paste(panel, (k * (panel.width + _GAP), 0))
    counts = [np.bincount(mask.ravel(), minlength=VOID + 1)[: len(names)] for mask in masks.values()]
    shares = np.array([count / mask.size for count, mask in zip(counts, masks.values(), strict=True)])
    order = np.argsort(-shares.max(axis=0), kind="stable")
    shown = [label for label in order.tolist() if shares[:, label].any()]
    lines: list[Line] = [(f"{' | '.join(masks)}: share of pixels", BLACK)]
    for label in shown[:_NAMED]:
        each = " | ".join(f"{100 * share:.1f} %" for share in shares[:, label])
        lines.append((f"{names[label]}  {each}", BLACK))
    if len(shown) > _NAMED:
        lines.append((f"and {len(shown) - _NAMED} more classes", BLACK))
    swatches = {row: tuple(colours[label].tolist()) for row, label in enumerate(shown[:_NAMED], 1)}
    return captioned(picture, lines, swatches)


def _panel(picture: Image.Image, mask: NDArray[np.integer], colours: NDArray[np.uint8]) -> Image.Image:
    """The picture with the colours of the mask over it."""
    table, opacity = np.zeros((VOID + 1, 3), np.float32), np.zeros((VOID + 1, 1), np.float32)
    table[: len(colours)], opacity[: len(colours)] = colours, _OPACITY
    stored = Image.fromarray(mask.astype(np.uint8))
    ids = np.asarray(stored.resize(picture.size, Image.Resampling.NEAREST))
    mixed = opacity[ids] * table[ids] + (1 - opacity[ids]) * np.asarray(picture, np.float32)
    return Image.fromarray(mixed.round().astype(np.uint8))


_WIDE = 448  # pixels that a picture has at least, so that labels fit
_LABELLED = 60  # boxes up to which each has its class and score written on it
_LISTED = 8  # classes below a picture
_DASH = 4  # pixels

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
