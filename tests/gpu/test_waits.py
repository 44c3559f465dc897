"""How often a client's work makes the host wait for a GPU: budgets of each step and each visit, in a later round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedlens.core.driver import Driver
from fedlens.core.input_checks import Inputs
from fedlens.core.protocol import Answer, ClientStates, Reply, RoundContext
from fedlens.core.random import Rng
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.data.partition.partition import Partition
from fedlens.engines.executor import Executor
from fedlens.run.build import build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.tasks.classification import Classification
from tests.contract import contract_kit
from tests.unit.tasks.detection_kit import squares
from tools.task_table import per_pixel


def two_sizes(labels: np.ndarray, seed: int) -> Partition:
    """Client 1 has two batches, client 2 has four, and each holds out a fifth of what it has; client 0 comes first."""
    owners = np.repeat([0, 1, 2], [10, 10, 20])
    return Partition.of_owners(owners, 3, spec={"name": "two_sizes", "seed": seed})


def _examples(kind: str, side: int = 8, channels: int = 1) -> Dataset:
    draw = np.random.default_rng(0)
    inputs, labels = draw.integers(0, 256, (48, channels, side, side), np.uint8), np.arange(48) % 4
    targets: Any = labels
    if kind == "multi-label":
        targets = (draw.random((48, 4)) < 0.4).astype(np.uint8)
    elif kind == "segmentation":
        targets = draw.integers(0, 4, (48, side, side), np.uint8)
    elif kind == "language":
        inputs = draw.integers(0, 9, (48, 6))
    made: Dataset = dataset(inputs[:40], targets[:40], inputs[40:], targets[40:])
    return made


def images() -> Dataset:
    return _examples("classification")


def photographs() -> Dataset:
    return _examples("classification", 16, 3)


def tagged() -> Dataset:
    return _examples("multi-label")


def scenes() -> Dataset:
    return _examples("segmentation", 32, 3)


def texts() -> Dataset:
    return _examples("language")


def objects() -> Dataset:
    return squares(n=40, test=8)


class Visits:
    """What the clients of the last round cost by operation: `small` and `large`, of two batches and of four.

    `server` is what the server's own data cost, in eight batches, and `pooled` training on the data of all clients.
    """

    def __init__(self) -> None:
        self.small: dict[str, Any] = {}
        self.large: dict[str, Any] = {}
        self.server: dict[str, Any] = {}
        self.pooled: dict[str, Any] = {}

    def of(self, client: int | str) -> dict[str, Any]:
        """The counts of this holder of data; of another client they are not looked at."""
        return {1: self.small, 2: self.large, "@test": self.server, "@train": self.pooled}.get(client, {})

    def step(self, op: str, kind: str) -> float:
        """The events of a batch."""
        return (self.large[op][kind] - self.small[op][kind]) / 2

    def visit(self, op: str, kind: str) -> float:
        """The events of a visit besides those of its batches."""
        return self.small[op][kind] - 2 * self.step(op, kind)


def visits(
    simgpu: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, evaluate: bool = False, **changes: Any
) -> Visits:
    """Trains four rounds, and counts in the last: inputs are compared with their checksums in the first three."""
    made: dict[str, Any] = {
        "seed": 0,
        "rounds": 4,
        "model": "mlp",
        "algorithm": "fedavg",
        "data": {"dataset": images, "partition": two_sizes, "validation": 0.2, "validation_from": "client"},
        "local": {"lr": 0.05, "batch_size": 4},
        "engine": {"name": "inline", "device": "cuda", "channels_last": False},
        "evaluation": {"clients": "all" if evaluate else "none", "batch_size": 1},
    }
    for name, value in changes.items():
        table = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = made[name] | value if table else value
    built = build(plan(read_config(made), Source({})), folder, download=False)
    algorithm, info = built.algorithm, built.federation
    found, answer = Visits(), Executor.answer

    def counted(self: Executor, op: str, shared: Any, item: Any, expect: Any) -> Answer:
        with simgpu.counted() as counts:
            reply = answer(self, op, shared, item, expect)
        assert isinstance(reply, Reply), reply
        found.of(item.client)[op] = counts
        return reply

    monkeypatch.setattr(Executor, "answer", counted)
    state, states = algorithm.init(built.model, info), ClientStates()
    built.engine.open(built.program, states)
    driver = Driver(built.engine, states)
    try:
        for at in range(1, 5):
            context = RoundContext(at, 4, info, Rng((0, "round", at)))
            state = driver.drive(algorithm.round(state, context), at)
            if evaluate:
                driver.drive(algorithm.evaluate(state, context), at)
    finally:
        built.engine.close()
    return found


class Budget(NamedTuple):
    """The most waits of an operation: of each batch, and of a visit besides."""

    batch: int
    visit: int


Budgets = dict[str, Budget]
# A visit reads twice: the losses of its steps, and the norms of all that it sends and keeps.
TRAINING: Budgets = {"train": Budget(0, 2)}
# What is measured stays on the GPU: whoever computes metrics from it reads it, once an evaluation.
EVALUATION: Budgets = {"evaluate": Budget(0, 0), "evaluate-own": Budget(0, 0)}
GRADIENT: Budgets = {"gradient": Budget(0, 1)}
# torch's L-BFGS branches on values in each of its iterations and line searches: how often depends on the data.
LINE_SEARCHES = ("admm", "ceadmm")
ALGORITHMS: dict[str, Budgets] = {
    name: TRAINING for name in contract_kit.ALGORITHMS if name not in {"centralized", *LINE_SEARCHES}
}
# A visit is one step: read are the norms of what is sent and kept, and the loss by the layers that have it.
SPLIT: Budgets = {"lower": Budget(0, 1), "finish-client": Budget(0, 1)}
RELAY: Budgets = {"lower": Budget(0, 1), "hand": Budget(0, 1), "forget": Budget(0, 0)}
ALGORITHMS |= {
    "splitfed": SPLIT,
    "splitfed-v2": SPLIT,
    "splitfed-two-cuts": SPLIT | {"upper": Budget(0, 3)},
    "split-relay": RELAY,
    "split-relay-fresh": RELAY | {"upper": Budget(0, 3)},
    # The first client, the small one, has the module of a layer built: six leaves go to the GPU.
    "fedma": {"train-layers": Budget(0, 14)},
    "fedgkt": {"train": Budget(0, 5), "store": Budget(0, 1)},  # the letter is checked, too
    "fedir-population": TRAINING | {"class-counts": Budget(0, 1)},
    "dsgd": {"send": Budget(0, 3), "mix": Budget(0, 1), "show": Budget(0, 1)},
    "push-sum": {
        "send": Budget(0, 4),
        "mix": Budget(0, 1),
        "show": Budget(0, 1),
    },  # one of two has a neighbour
    "gradient-tracking": {"send": Budget(0, 3), "mix": Budget(0, 1), "show": Budget(0, 1)},
    "mime": TRAINING | GRADIENT,
    "mime-adam": TRAINING | GRADIENT,
    "feddane": TRAINING | GRADIENT,
    "fedbn": TRAINING | {"evaluate-own": Budget(0, 0)},
    "local-only": TRAINING | {"evaluate-own": Budget(0, 0)},
    "finetune": TRAINING | {"evaluate": Budget(0, 0), "evaluate-own": Budget(0, 2)},  # trains, too
}


def within(found: Visits, budgets: Budgets) -> None:
    """Fails with the lines that wait where an operation is beyond its budget."""
    assert found.large.keys() | found.server.keys() == budgets.keys()
    for op, budget in budgets.items():
        if op in found.server:
            waits, most, counts = found.server[op]["waits"], budget.visit + 8 * budget.batch, found.server[op]
            assert waits <= most, f"{op}: {waits} waits for eight batches\n{counts.at('waits')}"
            continue
        each = found.step(op, "waits"), found.visit(op, "waits")
        message = f"{op}: {each[0]} waits a batch, {each[1]} a visit\n{found.large[op].at('waits')}"
        assert (each[0] <= budget.batch, each[1] <= budget.visit) == (True, True), message


CHOSEN = ("scaffold", "fedir-population", "feddane", "liadmm", "fedbn")


# The clients of these visits are of two sizes; parties train on the same examples.
VISITED = [name for name in ALGORITHMS if name not in contract_kit.ON_PARTIES]


@pytest.mark.parametrize("name", contract_kit.nightly_but(CHOSEN, VISITED))
def test_a_step_never_waits_and_a_visit_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    algorithm = dict(contract_kit.ALGORITHMS[name])
    if "examples" in algorithm:
        algorithm["examples"] = 8
    model: dict[str, Any] = {"name": "small-cnn", "width": 4, "norm": "batch" if name == "fedbn" else "none"}
    if name == "fedgkt":
        algorithm |= {"client": model, "cut": "0"}
    if name == "fednas":
        model = {"name": "darts-search", "channels": 2, "cells": 3, "nodes": 1}
    evaluate = name in contract_kit.PERSONAL
    within(
        visits(simgpu, tmp_path, monkeypatch, evaluate, algorithm=algorithm, model=model), ALGORITHMS[name]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", LINE_SEARCHES)
def test_a_line_search_waits_where_it_decides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    found = visits(simgpu, tmp_path, monkeypatch, algorithm=contract_kit.ALGORITHMS[name], model="mlp")
    where = {function for kind, _, function in found.large["train"].sites if kind == "waits"}
    assert where == {"minimize", "read", "leaf_norms"}


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"local": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}},
    "adam": {"local": {"optimizer": "adam", "weight_decay": 0.1}},
    "adamw": {"local": {"optimizer": "adamw", "weight_decay": 0.1}},
    "lars": {"local": {"optimizer": "lars", "momentum": 0.9}},
    "clip": {"local": {"clip_norm": 1.0, "lr_scale": {"head": 10.0}}},
    "schedule": {"local": {"lr_schedule": "cosine", "lr_change": "step"}},
    "class-weights": {"task": {"name": "classification", "class_weights": "balanced"}},
    "dp-sgd": {
        "data": {"validation": 0.0, "validation_from": "global", "normalize": "unit"},
        "privacy": {"unit": "example", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
    },
    "bf16": {"engine": {"precision": "bf16"}},
    "shifts": {
        "data": {"partition": {"name": "feature", "clients": 3, "noise": 0.3, "blur": 0.8, "rotation": 20.0}}
    },
    **{
        str(augment): {"data": {"dataset": photographs, "augment": augment}}
        for augment in (
            ["pad-crop-flip"],
            ["crop", {"name": "flip", "vertical": 0.5}],
            [{"name": "colour-jitter", "hue": 0.2}, "grey"],
            ["random-resized-crop"],
        )
    },
    **{
        f"masks {augment}": {"model": per_pixel, "data": {"dataset": scenes, "augment": augment}}
        for augment in (["mosaic", "scale-crop"], ["flip", "random-resized-crop"])
    },
    **{
        f"boxes {augment}": {"model": "yolov5n", "data": {"dataset": objects, "augment": augment}}
        for augment in (["mosaic", "scale-crop"], ["flip", "random-resized-crop"])
    },
}
QUICK = ("adam", "clip", "dp-sgd", "['pad-crop-flip']", "masks ['mosaic', 'scale-crop']")


@pytest.mark.parametrize("name", contract_kit.nightly_but(QUICK, OPTIONS))
def test_no_option_makes_a_step_wait(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    within(visits(simgpu, tmp_path, monkeypatch, **OPTIONS[name]), TRAINING)


def test_a_pooled_run_reads_the_number_of_its_steps_of_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    # The optimizer's state lies on the GPU from round to round, and the bias correction needs this number on the host.
    found = visits(simgpu, tmp_path, monkeypatch, algorithm="centralized", local={"optimizer": "adam"})
    (counts,) = found.pooled.values()
    assert counts["waits"] <= 3, counts.at("waits")


def test_the_first_visits_read_their_checksums_at_once(simgpu: Any) -> None:
    value = {"model": {str(at): torch.rand(3, device="cuda") for at in range(9)}}
    with simgpu.counted() as counts:
        before = Inputs(value, contents=True)
        assert before.changed() is None
    assert counts["waits"] == 2, counts.at("waits")


def test_half_precision_waits_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    # Whether the gradients left the range of float16, and are taken again at another scale.
    found = visits(simgpu, tmp_path, monkeypatch, engine={"precision": "fp16"})
    within(found, {"train": Budget(1, 2)})


# Classes beyond the dataset's are an error in masks, and are looked for in each batch.
MASKS: Budgets = {"evaluate": Budget(1, 0), "evaluate-own": Budget(1, 0)}
# Detections are as many as there are: which cells and which classes of a stride, which boxes are inside of the image,
# how many each image has, which of them suppression keeps, and a copy to where they are matched with the true boxes.
BOXES: Budgets = {"evaluate": Budget(10, 0), "evaluate-own": Budget(10, 0)}
TASKS: dict[str, tuple[dict[str, Any], Budgets]] = {
    "classification": ({}, TRAINING | EVALUATION),
    "multi-label": ({"data": {"dataset": tagged}}, TRAINING | EVALUATION),
    "language": ({"model": "lstm", "data": {"dataset": texts}}, TRAINING | EVALUATION),
    "segmentation": ({"model": per_pixel, "data": {"dataset": scenes}}, TRAINING | MASKS),
    "u-net": ({"model": {"name": "unet", "weights": "none"}, "data": {"dataset": scenes}}, TRAINING | MASKS),
    "yolov5n": ({"model": "yolov5n", "data": {"dataset": objects}}, TRAINING | BOXES),
    # torchvision's detectors look at values in their losses and in their suppression.
    "ssdlite": (
        {"model": "ssdlite", "data": {"dataset": objects}},
        {"train": Budget(18, 2), "evaluate": Budget(12, 0), "evaluate-own": Budget(12, 0)},
    ),
    "simsiam": (
        {"task": "simsiam", "data": {"dataset": photographs, "augment": ["flip"]}},
        TRAINING
        | EVALUATION
        | {"evaluate": Budget(0, 1)},  # a large sum is read, to be sent without its zeros
    ),
}


@pytest.mark.parametrize("name", contract_kit.nightly_but(("classification", "segmentation"), TASKS))
def test_an_evaluation_waits_for_no_batch_that_its_metrics_do_not_need(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    changes, budgets = TASKS[name]
    within(visits(simgpu, tmp_path, monkeypatch, evaluate=True, **changes), budgets)


def test_wrong_and_confident_answers_are_read_once_a_batch(simgpu: Any) -> None:
    outputs, targets = torch.rand(6, 4, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    for find in (Classification().mistakes, Classification().confidences):
        with simgpu.counted() as counts:
            find(outputs, targets, 2)
        assert counts["waits"] == 1, counts.at("waits")


@pytest.mark.parametrize(
    ("model", "launches"),
    [
        ("mcmahan-cnn", 31),
        pytest.param({"name": "resnet20", "norm": "group"}, 170, marks=pytest.mark.nightly),
    ],
)
def test_a_step_of_sgd_is_one_launch_for_all_leaves(
    model: Any, launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simgpu: Any
) -> None:
    found = visits(simgpu, tmp_path, monkeypatch, model=model, data={"dataset": photographs})
    assert found.step("train", "kernels") <= launches
