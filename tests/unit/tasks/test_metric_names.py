"""The names of metrics that tasks list, which studies check a metric against before their runs."""

from __future__ import annotations

import torch

from fedlens.core.measured import Measured
from fedlens.tasks.classification import Classification
from fedlens.tasks.detection import Detection
from fedlens.tasks.language import Language
from fedlens.tasks.moco import MoCo
from fedlens.tasks.multi_label import MultiLabel
from fedlens.tasks.registry import TASKS
from fedlens.tasks.segmentation import Segmentation
from fedlens.tasks.simsiam import SimSiam
from fedlens.tasks.task import Task

LOGITS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 6])
VIEWS = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
MASKS = (CLASSES % 3).to(torch.uint8).reshape(1, 2, 2)
MEASURED: dict[str, tuple[Task, Measured]] = {
    "classification": (Classification(), Classification().measure(LOGITS, CLASSES)),
    "multi-label": (MultiLabel(), MultiLabel().measure(LOGITS, torch.eye(7, dtype=torch.uint8)[:4])),
    "language": (Language(), Language().measure(LOGITS, CLASSES)),
    "moco-v2": (MoCo(), MoCo().measure({"z": VIEWS}, None)),
    "simsiam": (SimSiam(), SimSiam().measure({"z": VIEWS, "p": VIEWS}, None)),
    "segmentation": (Segmentation(), Segmentation().measure(LOGITS[:, :3].T.reshape(1, 3, 2, 2), MASKS)),
}


def test_every_task_lists_the_names_of_its_metrics() -> None:
    for name, (task, measured) in MEASURED.items():
        assert set(task.metrics(measured)) == set(task.known_metrics() or ()), name
    assert set(TASKS.entries) == {*MEASURED, "detection"}
    assert Detection().known_metrics() == ("map", "map50")


def test_a_task_that_defines_its_metrics_anew_lists_none_unless_it_says_so() -> None:
    class Kappa(Classification):
        def metrics(self, measured: Measured) -> dict[str, float]:
            return {"kappa": 0.0}

    class Listed(Kappa):
        metric_names = ("kappa",)

    class Renamed(Classification):
        score = "loss"

    assert Kappa().known_metrics() is None
    assert Listed().known_metrics() == ("kappa",)
    assert Renamed().known_metrics() == Classification().known_metrics()
