"""Every task on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.tasks.registry import TASKS
from tests.gpu.device_kit import agree, both, small, tiers
from tests.unit.tasks.detection_kit import grid_detector, squares
from tools.task_table import (
    a_class_a_text,
    one_class_a_pixel,
    one_class_an_image,
    per_pixel,
    several_labels_an_image,
)

CNN = {"name": "small-cnn", "width": 4, "norm": "batch"}
FLIP = {"augment": ["flip"]}
ROWS: dict[str, dict[str, Any]] = {
    "classification": {"data": {"dataset": one_class_an_image}, "model": CNN},
    "multi-label": {"data": {"dataset": several_labels_an_image}, "model": CNN},
    "segmentation": {
        "data": {"dataset": one_class_a_pixel, **FLIP},
        "model": {"name": per_pixel, "norm": "batch"},
    },
    "detection": {"data": {"dataset": squares, **FLIP}, "model": {"name": grid_detector, "norm": "batch"}},
    "language": {"data": {"dataset": a_class_a_text}, "model": {"name": "mean-embedding", "embedding": 4}},
    "simsiam": {
        "data": {"dataset": one_class_an_image, **FLIP},
        "model": CNN,
        "task": {"name": "simsiam", "width": 8, "bottleneck": 4},
    },
    "moco-v2": {
        "data": {"dataset": one_class_an_image, **FLIP},
        "model": CNN,
        "task": {"name": "moco-v2", "width": 4, "queue": 20},
    },
}


def test_the_table_has_every_task() -> None:
    assert set(ROWS) == set(TASKS)


# The loss of a batch of masks is a sum over pixels, which a GPU takes in an order of its own.
LOSS = {"segmentation": 1e-6}
# Batch normalization divides by the deviation of a few nearly equal values, which magnifies a real GPU's last bits.
REAL = {"detection": 0.2, "simsiam": 5e-2}


@pytest.mark.parametrize(("task", "rounds"), tiers(ROWS, ROWS))
def test_a_run_has_the_processors_bits(task: str, rounds: int, tmp_path: Path) -> None:
    changes = ROWS[task] | {"data": ROWS[task]["data"] | {"partition": "natural"}}
    here, there = both(tmp_path, small(**changes, rounds=rounds))
    agree(there, here, LOSS.get(task, 0.0), REAL.get(task, 1e-2))
