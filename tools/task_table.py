"""The table of docs/tasks.md: which algorithm works with which task, found out by building an experiment for each pair.

`python -m tools.task_table` writes it anew; test_task_table.py says when that is needed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.models.registry import MODELS
from fedlens.run.build import build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.tasks.registry import TASKS
from tests.contract import contract_kit
from tests.unit.tasks.detection_kit import grid_detector, squares

PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"
TABLE = re.compile(r"(<!-- table: tasks -->\n)(?:\n\|(?:.*\n\|)*.*\n)?")
HELD_OUT = {"validation": 0.3, "validation_from": "client"}


def rendered(page: str) -> str:
    """The page with its table written anew."""
    return TABLE.sub(lambda match: match[1] + "\n" + "".join(f"{row}\n" for row in rows()), page)


def rows() -> list[str]:
    """The lines of the table: algorithms that work with the same tasks, alone or stacked, in one."""
    by_cells: dict[str, list[str]] = {}
    for algorithm in ALGORITHMS:
        cells = (
            _cell(works(algorithm, kind, "inline"), works(algorithm, kind, "vectorized")) for kind in TASKS
        )
        by_cells.setdefault(" | ".join(cells), []).append(f"[`{algorithm}`](algorithms/{algorithm}.md)")
    lines = [f"| {', '.join(names)} | {cells} |" for cells, names in by_cells.items()]
    return [f"| algorithms | {' | '.join(TASKS)} |", "|---|" + "---|" * len(list(TASKS)), *lines]


def _cell(alone: bool, stacked: bool) -> str:
    return "v" if stacked else "+" if alone else ""


def works(algorithm: str, kind: str, engine: str) -> bool:
    """Whether an experiment with this algorithm, task and engine can be built."""
    variant = next(name for name, table in contract_kit.ALGORITHMS.items() if table["name"] == algorithm)
    made = contract_kit.settings(variant)
    # `vectorized` stacks no batch normalization, which FedBN is about.
    model: Any = {"name": "small-cnn", "width": 4, "norm": "batch"} if algorithm == "fedbn" else "mlp"
    if kind == "segmentation":
        model = {"name": per_pixel, "norm": "batch" if algorithm == "fedbn" else "none"}
    if kind == "detection":
        model = {"name": grid_detector, "norm": "batch" if algorithm == "fedbn" else "none"}
    if kind == "language":
        if algorithm == "fedbn":
            return False  # no model of text has batch normalization
        model = {"name": "mean-embedding", "embedding": 4}
    if algorithm == "fednas":  # which searches the architecture of one network alone
        if not MODELS.entries["darts-search"].fits(TASKS.find(kind)().kind):
            return False
        model = {"name": "darts-search", "channels": 2, "cells": 3, "nodes": 1}
    if algorithm == "fedgkt":  # whose clients have a network that begins like the server's
        made["algorithm"] = {**made["algorithm"], "client": model}
    augment = ["flip"] if TASKS.find(kind)().views > 1 else []
    data = {"partition": "natural", "augment": augment, **HELD_OUT}
    if algorithm in contract_kit.ON_PARTIES:
        data = {"parties": {"split": "halves"}}
    config = read_config(
        {
            **made,
            "data": {"dataset": EXAMPLES[kind], **data},
            "task": {"name": kind},
            "model": model,
            "engine": engine,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = build(plan(config, Source({})), Path(folder), download=False)
        except ConfigError as error:
            if error.where in REASONS:
                return False
            raise
        built.engine.close()
    return True


def _example(kind: str) -> Dataset:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (48, 1, 8, 8), np.uint8), np.arange(48) % 4
    targets: Any = labels
    if kind == "multi-label":
        targets = (draw.random((48, 4)) < 0.4).astype(np.uint8)
    elif kind == "segmentation":
        targets = draw.integers(0, 4, (48, 8, 8), np.uint8)
    made: Dataset = dataset(
        images[:40], targets[:40], images[40:], targets[40:], clients=[f"client {k // 10}" for k in range(40)]
    )
    return made


def one_class_an_image() -> Dataset:
    """A small dataset of four clients."""
    return _example("classification")


def several_labels_an_image() -> Dataset:
    """The same with several labels an image."""
    return _example("multi-label")


def one_class_a_pixel() -> Dataset:
    """The same with masks."""
    return _example("segmentation")


def per_pixel(input_shape: Sequence[int], classes: int, norm: str = "none") -> nn.Module:
    """A network of two convolutions with logits for each pixel."""
    layers: list[nn.Module] = [nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.ReLU()]
    layers += [nn.BatchNorm2d(4)] if norm == "batch" else []
    return nn.Sequential(*layers, nn.Conv2d(4, classes, 1))


def a_class_a_text() -> Dataset:
    """Texts of four clients."""
    draw = np.random.default_rng(0)
    tokens, targets = draw.integers(0, 9, (48, 6)), np.arange(48) % 4
    made: Dataset = dataset(
        tokens[:40], targets[:40], tokens[40:], targets[40:], clients=[f"client {k // 10}" for k in range(40)]
    )
    return made


EXAMPLES = {
    "detection": squares,
    "classification": one_class_an_image,
    "multi-label": several_labels_an_image,
    "segmentation": one_class_a_pixel,
    "language": a_class_a_text,
    "moco-v2": one_class_an_image,
    "simsiam": one_class_an_image,
}
# The settings that a refusal of the task or the engine names; any other refusal is a fault of this table.
# Parties have images of one class each, and no augmentation.
OF_PARTIES = {"data.augment", "data.parties"}
REASONS = {"algorithm.name", "client", "engine.name", "model", "task.name", "task.class_weights", *OF_PARTIES}


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
