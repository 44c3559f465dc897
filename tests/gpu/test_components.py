"""The components that touch tensors, on a GPU: several at once in the ci tier, each alone in the nightly one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.api import Result
from fedlens.data.dataset import Examples
from fedlens.run.build import build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from tests.contract.contract_kit import HELD_OUT, LOCAL, NORM_NET
from tests.gpu.device_kit import DATA, GPU, GROUP_NORM, agree, both, model, near, run, small, tiers
from tools.task_table import one_class_a_pixel, per_pixel

FROZEN = {
    "name": f"{Path(__file__).parents[1] / 'contract' / 'test_partial_training.py'}:net",
    "freeze": "backbone",
}
COLOUR = {"name": "synthetic", "shape": [3, 8, 8], "classes": 4, "train": 26, "test": 8}
EVEN = {"name": "iid", "clients": 4}
MASKS = {"dataset": one_class_a_pixel, "partition": "natural"}
SIMSIAM = {"name": "simsiam", "width": 8, "bottleneck": 4}

# What replaces or joins the settings of `small`, table by table.
ROWS: dict[str, dict[str, Any]] = {
    # local training
    "adam": {"local": {"optimizer": "adam", "momentum": 0.0, "lr_schedule": "cosine", "lr_change": "step"}},
    "adamw": {
        "rounds": 2,
        "local": {"optimizer": "adamw", "momentum": 0.0, "weight_decay": 0.1, "lr_warmup": 1},
    },
    "lars": {"local": {"optimizer": "lars", "weight_decay": 0.1, "lr_decay": 0.5}},
    "clipped gradients": {"local": {"clip_norm": 0.1, "nesterov": True, "weight_decay": 0.1}},
    "layer rates": {"local": {"lr_scale": {"6": 0.1}, "stragglers": 0.5, "epochs": 2, "momentum": 0.0}},
    "class weights": {
        "task": {"name": "classification", "class_weights": "balanced", "label_smoothing": 0.1}
    },
    # client rules, aggregates and server steps that no algorithm of the table has by itself
    "proximal": {"client": {"name": "proximal", "mu": 0.3}},
    "projection": {
        "client": {"name": "contrastive"},
        "model": {"name": "projection", "hidden": 8, "width": 8},
    },
    "uniform mean": {"aggregate": {"name": "mean", "weighting": "uniform"}},
    "server momentum": {"server": {"name": "momentum", "nesterov": True}},
    "normalized": {"aggregate": {"name": "normalized"}, "server": {"name": "yogi"}},
    "optimal convex": {"aggregate": {"name": "optimal-convex", "on": "test", "epochs": 2, "starts": 2}},
    "quantized": {
        "aggregate": {"name": "quantized", "bits": 30, "range": 64.0},
        "record": {"clients": False},
    },
    "client privacy": {
        "privacy": {"clip": "adaptive", "noise_multiplier": 0.1, "delta": 1e-3, "noise": "seeded"},
        "data": {"normalize": "unit"},
        "aggregate": {"name": "mean", "weighting": "uniform"},
        "model": GROUP_NORM,
        "record": {"clients": False},
    },
    "tree privacy": {
        "privacy": {
            "clip": 1.0,
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "mechanism": "tree",
            "noise": "seeded",
        },
        "select": {"name": "once-each", "clients_per_round": 1},
        "data": {"normalize": "unit"},
        "aggregate": {"name": "mean", "weighting": "uniform"},
        "model": GROUP_NORM,
        "record": {"clients": False},
    },
    "example privacy": {
        "privacy": {
            "unit": "example",
            "clip": 1.0,
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "noise": "seeded",
        },
        "data": {"normalize": "unit"},
        "aggregate": {"name": "mean", "weighting": "uniform"},
        "model": GROUP_NORM,
        "record": {"clients": False},
    },
    "secagg": {
        "aggregate": {"name": "secagg", "bits": 30, "range": 64.0},
        "select": {"clients_per_round": 4},
        "record": {"clients": False},
    },
    "lightsecagg": {
        "aggregate": {"name": "lightsecagg", "bits": 27, "range": 64.0},
        "select": {"clients_per_round": 4},
        "record": {"clients": False},
    },
    "turbo-aggregate": {
        "aggregate": {"name": "turbo-aggregate", "bits": 25, "range": 64.0},
        "data": {"partition": {"name": "iid", "clients": 15}},
        "select": {"clients_per_round": 15},
        "record": {"clients": False},
    },
    # data
    "shifts and flips": {"data": {"augment": ["crop", {"name": "flip", "vertical": 0.5}]}},
    "colours": {"data": {"dataset": COLOUR, "augment": ["colour-jitter", "grey"]}},
    "resized crops": {"data": {"augment": ["random-resized-crop"]}},
    "mosaic": {"data": MASKS | {"augment": ["mosaic", "flip"]}, "model": per_pixel},
    "scaled crop": {
        "data": MASKS | {"augment": ["mosaic", {"name": "scale-crop", "crop": 6}]},
        "model": per_pixel,
    },
    "shifted images": {"data": {"partition": {"name": "feature", "clients": 4}}},
    "frozen part": {"model": FROZEN},
    "cached features": {"model": FROZEN | {"cache_features": True}, "data": {"augment": []}},
    "cached features of shifted images": {
        "model": FROZEN | {"cache_features": True},
        "data": {"augment": [], "partition": {"name": "feature", "clients": 4, "brightness": 0.5}},
    },
    # evaluation
    "held out": {
        "data": {"validation": 0.2, "partition": EVEN},
        "evaluation": {"train": True, "batch_size": 7},
    },
    "at clients": {"data": HELD_OUT, "evaluation": {"clients": "all"}},
    "sliding windows": {
        "data": MASKS,
        "model": per_pixel,
        "evaluation": {"size": {"window": 4, "stride": 2}},
    },
    "k-NN": {
        "data": {"dataset": COLOUR, "augment": ["flip"], "partition": EVEN},
        "model": GROUP_NORM,
        "task": SIMSIAM,
        "evaluation": {"neighbours": {"dataset": COLOUR, "k": 5}},
    },
    "recordings": {
        "record": {"clients": True, "local_models": {"every": 1}, "updates": {"every": 1}, "images": True}
    },
}
TOGETHER = (
    "adam + class weights + shifts and flips + held out",
    "lars + proximal + colours + uniform mean + server momentum",
    "clipped gradients + resized crops + normalized + shifted images + recordings",
    "layer rates + at clients",
    "adamw + projection + quantized",
    "client privacy",
    "tree privacy",
    "example privacy",
    "cached features + optimal convex",
    "cached features of shifted images",
    "mosaic + sliding windows",
    "scaled crop",
    "k-NN",
)


def merged(names: str) -> dict[str, Any]:
    """The tables of several rows, which name different settings."""
    tables: dict[str, Any] = {"data": DATA, "local": LOCAL, "model": NORM_NET}
    for name in names.split(" + "):
        for key, value in ROWS[name].items():
            tables[key] = {**tables.get(key, {}), **value} if isinstance(value, dict) else value
    return tables


def test_every_component_runs_in_the_ci_tier() -> None:
    # A layer of the contract table's network is frozen too, and `quantized` has the words of the others.
    alone = {"frozen part", "turbo-aggregate", "secagg", "lightsecagg"}
    assert {name for names in TOGETHER for name in names.split(" + ")} | alone == set(ROWS)


@pytest.mark.parametrize(
    ("components", "rounds"), tiers(TOGETHER, [*TOGETHER, *(name for name in ROWS if name not in TOGETHER)])
)
def test_a_run_has_the_processors_bits(components: str, rounds: int, tmp_path: Path) -> None:
    here, there = both(tmp_path, small(**{"rounds": rounds, **merged(components)}))
    # The loss of a batch of masks is a sum over pixels, which a GPU takes in another order.
    tolerance = 1e-6 if merged(components)["model"] is per_pixel else 0.0
    # Adam moves a weight by the sign of its gradient at first, also where that is only rounding.
    agree(there, here, tolerance, real=0.1 if "adam" in components else 1e-2)


@pytest.mark.parametrize(
    ("engine", "fits", "whole"),
    [
        ("inline", False, False),
        ("vectorized", False, True),
        pytest.param("inline", False, True, marks=pytest.mark.nightly),
        pytest.param("inline", True, False, marks=pytest.mark.nightly),
        pytest.param("vectorized", False, False, marks=pytest.mark.nightly),
    ],
)
def test_batches_have_the_same_bits_wherever_images_lie_and_are_normalized(
    engine: str, fits: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU if they fit, else batch by batch; of one client at once if that is little, else batch by batch."""
    if not whole:
        monkeypatch.setattr("fedlens.data.client_datasets._WHOLE", 0)
    placed: list[torch.device] = []

    def on(examples: Examples, device: torch.device, room: int) -> Examples:
        made = real(examples, device, room if fits else 0)
        placed.append(made.inputs.device)
        return made

    real = Examples.on
    monkeypatch.setattr(Examples, "on", on)
    given = small(
        rounds=1, model=GROUP_NORM, data=DATA | {"augment": [] if engine == "inline" else DATA["augment"]}
    )
    there = run(tmp_path / "gpu", given, GPU, engine)
    assert {device.type for device in placed} == {"cuda" if fits else "cpu"}
    here = run(tmp_path / "cpu", given, "cpu", engine)
    (near if engine == "vectorized" else agree)(there, here)


HALF = small(
    "scaffold", model=GROUP_NORM | {"width": 4}, rounds=1, engine={"name": "inline", "device": "cpu"}
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in fp32."""
    return run(tmp_path_factory.mktemp("fp32") / "run", HALF, GPU)


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        ("bf16", "vectorized"),
        ("fp16", "inline"),
        pytest.param("bf16", "inline", marks=pytest.mark.nightly),
        pytest.param("fp16", "vectorized", marks=pytest.mark.nightly),
    ],
)
def test_16_bits_are_near_those_of_fp32(precision: str, engine: str, full: Result, tmp_path: Path) -> None:
    """A GPU computes other operations in 16 bits than a processor does, so no bits of a processor exist."""
    there = run(tmp_path / "run", HALF, GPU, engine, precision=precision)
    made = build(plan(read_config(HALF), Source(HALF)), tmp_path, download=False)
    initial = made.model.build().state_dict()
    assert {name: value.dtype for name, value in model(there).items()} == {
        name: value.dtype for name, value in initial.items()
    }
    half, whole, before = (
        torch.cat([value.flatten().double() for value in tree.values()])
        for tree in (model(there), model(full), initial)
    )
    assert 0 < (half - whole).norm() < 0.3 * (whole - before).norm()
