"""Colours of classes, the same on every page and in every picture."""

from __future__ import annotations

import colorsys

# Tableau's ten: told apart by most colour-blind readers, and legible on light and dark.
TEN = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),
    *("#edc948", "#76b7b2", "#ff9da7", "#9c755f", "#a3a9b3"),
)


def class_colors(classes: int) -> list[str]:
    """One colour a class: ten well-known ones, and beyond that a walk around the colour wheel.

    Neighbours on the walk differ in lightness, so that classes next to each other in a bar can be told apart.

    >>> class_colors(3)
    ['#4e79a7', '#f28e2b', '#59a14f']
    """
    if classes <= len(TEN):
        return list(TEN[:classes])
    lightness = (0.42, 0.62, 0.52, 0.72)
    parts = [colorsys.hls_to_rgb(k / classes, lightness[k % 4], 0.5) for k in range(classes)]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in parts]


def shade(number: int, of: int) -> str:
    """Colour `number` of `of` in an order, from a light to a dark blue.

    >>> shade(0, 2), shade(1, 2)
    ('#99bfe6', '#143352')
    """
    lightness = 0.75 - 0.55 * number / max(of - 1, 1)
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(0.583, lightness, 0.6))
