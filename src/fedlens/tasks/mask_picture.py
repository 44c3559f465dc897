"""Pictures of masks: an image below the colours of its classes, and a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.core.dataset_info import VOID
from fedlens.tasks.picture import BLACK, Line, captioned, enlarged
from fedlens.vision.mask_colors import mask_colors

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
