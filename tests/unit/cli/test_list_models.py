"""`fedlens list KIND --json`: models with what they cost, and every kind with names and summaries."""

from __future__ import annotations

import json
import sys
from typing import get_args

import pytest
from typer.testing import CliRunner

from fedlens.base.registry import Entry
from fedlens.cli.list import Kind, model_rows
from fedlens.cli.main import app
from fedlens.core.dataset_info import Kind as DataKind
from fedlens.models.registry import MODELS, ModelEntry
from tools.model_table import PAGE, rendered

# Multiply-adds of one image of 224x224 as papers and tools give them, in units of 10^9.
PUBLISHED = {
    "resnet18": 1.82, "resnet34": 3.67, "resnet50": 4.09, "mobilenet-v2": 0.300, "mobilenet-v3-large": 0.217,
    "efficientnet-b0": 0.39, "vit-b-16": 17.58, "vit-tiny": 1.26,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    result = CliRunner().invoke(app, ["list", "models", "--json"])
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)["models"]}


def test_every_model_has_its_task_source_and_licence(rows) -> None:
    assert list(rows) == list(MODELS)
    for name, row in rows.items():
        assert row["task"] in get_args(DataKind)
        assert row["source"]
        assert row["licence"] in {"Apache-2.0", "BSD-3-Clause", "MIT"}
        assert row["reason"] is None
        assert row["parameters"] > 0
        # The second stage of a Faster R-CNN works on as many boxes as the first proposes.
        assert (row["multiply_adds"] is None) == (name == "fasterrcnn-mobilenet")
        assert row["multiply_adds"] is None or row["multiply_adds"] > 0


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_multiply_adds_are_within_a_percent_of_the_published_ones(rows, name: str) -> None:
    assert rows[name]["input_shape"] == [3, 224, 224]
    close = 0.015 if name == "efficientnet-b0" else 0.01  # 0.39 is given with two digits
    assert abs(rows[name]["multiply_adds"] / (PUBLISHED[name] * 1e9) - 1) < close


def test_counts_by_hand(rows) -> None:
    # mcmahan-cnn at 28x28: two 5x5 convolutions at 28x28 and 14x14, then 3136 x 512 and 512 x 10.
    by_hand = 28 * 28 * 25 * 32 + 14 * 14 * 25 * 32 * 64 + 3136 * 512 + 512 * 10
    assert rows["mcmahan-cnn"]["multiply_adds"] == by_hand
    # resnet20: 3x3 convolutions of 16 channels at 32x32, 32 at 16x16 and 64 at 8x8, each stage with the same work.
    same = 32 * 32 * 9 * 16 * 16
    by_hand = 32 * 32 * 9 * 3 * 16 + 6 * same + 2 * (5 * same + same // 2) + 64 * 10
    assert rows["resnet20"]["multiply_adds"] == by_hand
    assert rows["resnet20"]["parameters"] == 269_722


def test_normalization_layers_by_kind(rows) -> None:
    assert rows["mobilenet-v3-large"]["norm_layers"] == {"batch": 46}
    assert rows["efficientnet-b0"]["norm_layers"] == {"batch": 49}
    assert rows["vit-b-16"]["norm_layers"] == {"layer": 25}
    assert rows["hsu-cnn"]["norm_layers"] == {}


def test_without_timm_its_models_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    entries = {name: MODELS.entries[name] for name in ("linear", "resnet50")}
    monkeypatch.setattr("fedlens.models.registry.MODELS", type(MODELS)("model", entries))
    own, of_timm = model_rows()
    assert own["parameters"] == 7850
    assert of_timm["source"] == MODELS.entries["resnet50"].source
    assert of_timm["parameters"] is of_timm["multiply_adds"] is of_timm["norm_layers"] is None
    assert "pip install 'fedlens[vision]'" in of_timm["reason"]


def test_a_model_of_another_package_is_listed_without_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"theirs": Entry("their.module:make", "a model of theirs")}
    monkeypatch.setattr("fedlens.models.registry.MODELS", type(MODELS)("model", entries))
    (row,) = model_rows()
    assert (row["summary"], row["parameters"], row["source"]) == ("a model of theirs", None, None)
    assert row["reason"]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.MODELS])
def test_every_other_kind_has_names_and_summaries(kind: Kind) -> None:
    result = CliRunner().invoke(app, ["list", str(kind), "--json"])
    plain = CliRunner().invoke(app, ["list", str(kind)])
    told = json.loads(result.stdout)[str(kind)]
    assert [row["name"] for row in told] == [line.split()[0] for line in plain.stdout.splitlines()]
    assert all(row["summary"] for row in told)


def test_the_page_of_models_has_these_numbers(rows) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page, rows.values()), "run: python -m tools.model_table"


def test_every_entry_says_what_it_is_for() -> None:
    assert all(isinstance(entry, ModelEntry) for entry in MODELS.entries.values())
