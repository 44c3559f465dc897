"""The names that tasks list: of metrics, which studies check before their runs, and of totals, which sites may send."""

from __future__ import annotations

import pytest
import torch

from fedlens.core.measured import Measured
from fedlens.tasks.classification import Classification
from fedlens.tasks.detection import Detection
from fedlens.tasks.language import Language
from fedlens.tasks.moco import MoCo
from fedlens.tasks.multi_label import MultiLabel
from fedlens.tasks.registry import TASKS
from fedlens.tasks.segmentation import Segmentation
from fedlens.tasks.self_supervised import SelfSupervised
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
        totals = frozenset({"correct"})

    class Renamed(Classification):
        score = "loss"

    assert Kappa().known_metrics() is None
    assert Listed().known_metrics() == ("kappa",)
    assert Renamed().known_metrics() == Classification().known_metrics()
    assert Kappa().known_totals() == frozenset()
    assert Listed().known_totals() == {"correct"}
    assert Renamed().known_totals() == Classification().known_totals() != frozenset()


def test_totals_have_no_part_by_class_or_image_and_give_the_metrics_that_they_define() -> None:
    for name, (task, measured) in MEASURED.items():
        sent = task.condensed(measured)
        totals = task.in_totals(sent)
        embedded = {"sum", "squares"} if isinstance(task, SelfSupervised) else set()  # values of an embedding
        assert {each for each, value in totals.sums.items() if value.dim()} == embedded, name
        assert not totals.rows
        assert task.has_only_totals(totals)
        assert task.has_only_totals(sent) == (not sent.rows and sent.sums.keys() == totals.sums.keys())
        found = task.metrics(totals)
        assert found
        assert found.items() <= task.metrics(sent).items()
        for part in {"loss", "examples", "pixels", "tokens", "correct"} & totals.sums.keys():
            with pytest.raises(KeyError, match=part):  # neither of the two forms of an answer
                task.metrics(Measured({each: value for each, value in totals.sums.items() if each != part}))
    part = {each: value for each, value in MEASURED["classification"][1].sums.items() if each != "bin_count"}
    part.pop("bin_correct")
    with pytest.raises(KeyError, match="bin_correct"):
        Classification().metrics(Measured(part))
    assert Detection().known_totals() == frozenset()
