"""The pictures of docs/pre-train-without-data.md: `python -m tools.fractal_figures` draws them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedlens.data.datasets.fractals import fractals
from fedlens.pages.contact_sheet import contact_sheet

FOLDER = Path(__file__).parents[1] / "docs" / "figures"


def pairs() -> Image.Image:
    """Six pairs of 128x128 pixels, the two views of each one above the other."""
    data = _drawn(size=128, iterations=100_000)
    views = data.views(np.arange(6))
    return contact_sheet(views.transpose(1, 0, 2, 3, 4).reshape(12, 3, 128, 128), columns=6, scale=1)


def looks() -> Image.Image:
    """32x32 pixels as ResNet-20 sees them, one row for each colouring, and one with a smooth background."""
    rows: list[dict[str, Any]] = [
        {"look": "binary", "fractals": (1, 1), "scale": (1.0, 1.0)},
        {"look": "density", "fractals": (1, 1), "scale": (1.0, 1.0)},
        {"look": "hue-by-density"},
        {"look": "hue-by-position"},
        {"look": "hue-by-density", "background": "smooth"},
    ]
    return contact_sheet(
        np.concatenate([_drawn(**row).take(np.arange(12)) for row in rows]), columns=12, scale=2
    )


def _drawn(**settings: Any) -> Any:
    data = fractals(Path(), False, 0, train=12, test=1, codes=1000, **settings)
    return data.train.inputs


FIGURES = {"fractal-pairs.png": pairs, "fractal-looks.png": looks}


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        draw().quantize(128).save(FOLDER / name, optimize=True)
