"""The table of docs/models.md that holds networks for segmentation to fedcv's table 7.

`python -m tools.segmentation_table` counts them and writes it anew; test_models_page.py says when that is
needed.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fedlens.models.counts import multiply_adds
from fedlens.models.freeze import freeze
from fedlens.models.registry import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- table: segmentation -->\n)(?:\|.*\n)*")
_CLASSES, _SHAPE = 21, (3, 512, 512)
# Each network with fedcv's parameters, those with a frozen backbone, and multiply-adds, in units of 10^6 and 10^9.
ROWS = (
    ("deeplabv3plus", "resnet101", "plain", "59.34", "16.84", "88.85"),
    ("deeplabv3plus", "mobilenet-v2", "plain", "5.81", None, "26.56"),
    ("unet", "resnet101", None, "51.51", "9.01", "62.22"),
    ("unet", "mobilenet-v2", None, "7.91", None, "14.24"),
    ("deeplabv3plus", "resnet101", "separable", None, None, None),
    ("deeplabv3plus", "mobilenet-v2", "separable", None, None, None),
    ("deeplabv3plus", "resnet50", "separable", None, None, None),
    ("unet", "resnet50", None, None, None, None),
)
HEAD = (
    "| `name`, `backbone`, `atrous` | parameters | fedcv, M | trained if frozen | fedcv, M "
    "| multiply-adds, G | fedcv |\n"
    "|---|---|---|---|---|---|---|\n"
)


def rendered(page: str) -> str:
    """The page with the table written anew."""
    return TABLE.sub(lambda match: match[1] + HEAD + "".join(_line(*row) for row in ROWS), page)


def _line(
    name: str, backbone: str, atrous: str | None, count: str | None, frozen: str | None, products: str | None
) -> str:
    settings = {"backbone": backbone, **({} if atrous is None else {"atrous": atrous})}
    with torch.device("meta"):
        module = MODELS.find(name)(_SHAPE, _CLASSES, **settings)
        counted = multiply_adds(module, torch.zeros(1, *_SHAPE)) or 0
    parameters = sum(p.numel() for p in module.parameters())
    freeze(module, "backbone", _CLASSES)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    cells = (
        ", ".join(f"`{word}`" for word in (name, *settings.values())),
        f"{parameters:,}",
        count or "",
        f"{trained:,}",
        frozen or "",
        f"{counted / 1e9:.1f}",
        products or "",
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
