"""The page of models: its example in Python does what the page says, and its counts are those of the code."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedlens.base.registry import load_file
from tools.segmentation_table import PAGE, ROWS, rendered

DOCS = Path(__file__).parents[3] / "docs"


def test_the_example_has_group_normalization_and_a_bottleneck(tmp_path: Path) -> None:
    assert '--8<-- "examples/model_keys.py"' in (DOCS / "models.md").read_text(encoding="utf-8")
    example = load_file(DOCS / "examples" / "model_keys.py")
    result = example.experiment(rounds=1).run(tmp_path / "run")
    module = result.model
    assert isinstance(module.bn, nn.GroupNorm)
    assert module.bn.num_groups == 2
    assert module.out.bottleneck.out_features == 8
    assert result.config["model"]["norm"] == "group"


def test_the_table_of_networks_for_segmentation_has_their_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run: python -m tools.segmentation_table"
    assert page.count("| `unet`, `") + page.count("| `deeplabv3plus`, `") == len(ROWS)
