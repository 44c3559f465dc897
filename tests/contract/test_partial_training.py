"""A frozen part of a model, and its kept features, on every engine; on the embedded digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment, resume
from fedlens.api import Result
from fedlens.base.errors import ConfigError
from fedlens.base.frozen import FrozenSplit
from fedlens.core.tree import fixed_leaves
from fedlens.run import checkpoint
from fedlens.run.build import Built, build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from tests.contract.contract_kit import PARTITIONS, Stopping, lines, outcome
from tests.new_process import new_process
from tests.unit.engines.ray_kit import NEEDS_RAY

pytestmark = pytest.mark.usefixtures("quick_workers")

# Batch normalization in the frozen part, and dropout in front of the classifier.
NET = {"name": f"{__file__}:net", "freeze": "backbone"}
CLASSIFIER = {"head.weight": (10, 8), "head.bias": (10,)}
TRAINED = 90  # numbers in them
ENGINES: dict[str, Any] = {
    "inline": {"name": "inline"},
    "processes": {"name": "processes", "workers": 2},
    "vectorized": {"name": "vectorized"},
}


def net(classes: int) -> torch.nn.Module:
    from torch import nn

    module = nn.Sequential()
    for name, layer in {
        "conv": nn.Conv2d(1, 8, 3),
        "norm": nn.BatchNorm2d(8),
        "drop": nn.Dropout(0.5),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "head": nn.Linear(8, classes),
    }.items():
        module.add_module(name, layer)
    torch.nn.init.uniform_(module.norm.running_mean, -1, 1)  # not what a fresh layer has
    return module


def settings(model: dict[str, Any] = NET, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rounds": 3,
        "model": model,
        "algorithm": "fedavg",
        "local": {"lr": 0.2, "batch_size": 16},
        "select": {"clients_per_round": 3},
        "data": {"dataset": "digits", "partition": PARTITIONS["dirichlet"]},
        "record": {"clients": True},
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def tree(result: Result) -> dict[str, torch.Tensor]:
    return dict(checkpoint.read_model(result.directory / "model.safetensors")[0])


def agree(one: Result, other: Result) -> None:
    for a, b in zip(lines(one), lines(other), strict=True):
        known = {name: value for name, value in a.items() if value is not None}
        assert b.keys() == a.keys()
        assert {name: b[name] for name in known} == pytest.approx(known, rel=1e-5, abs=1e-6)


def made(given: dict[str, Any]) -> Built:
    source = Source(given)
    return build(plan(read_config(given), source), Path(), False)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Experiment(**settings()).run(tmp_path_factory.mktemp("inline") / "run")


def test_frozen_leaves_keep_their_bits_and_only_the_classifier_is_trained(inline: Result) -> None:
    module = made(settings()).model.build()
    fixed, after = fixed_leaves(module), tree(inline)
    assert {name: tuple(after[name].shape) for name in after.keys() - fixed.keys()} == CLASSIFIER
    assert all(torch.equal(after[name], value) for name, value in fixed.items())
    assert not any(torch.equal(after[name], module.state_dict()[name]) for name in CLASSIFIER)
    described = {"name": NET["name"], "parameters": 186, "trainable": TRAINED}
    assert inline.summary["model"].items() >= described.items()


def test_bytes_are_those_of_the_trained_weights(inline: Result) -> None:
    """Down: 90 floats and the rate; up: 90 floats and the client's weight; 3 clients a round, none in round 0."""
    for line in inline.metrics:
        expected = 3 * (4 * TRAINED + 8) if line["round"] else 0
        assert (line["bytes_down"], line["bytes_up"]) == (expected, expected)


RAY = pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.nightly])


@pytest.mark.parametrize("engine", ["processes", "vectorized", RAY])
@pytest.mark.parametrize("cached", [False, True])
def test_every_engine_leaves_them_alone(engine: str, cached: bool, inline: Result, tmp_path: Path) -> None:
    table = ENGINES.get(engine, {"name": "ray", "workers": 2, "cpus": 0.4, "connect_timeout": 300.0})
    model = {**NET, "cache_features": cached}
    other = Experiment(**settings(model, engine=table)).run(tmp_path / "run")
    expected = Experiment(**settings(model)).run(tmp_path / "inline") if cached else inline
    if engine == "vectorized":
        torch.testing.assert_close(tree(other), tree(expected), rtol=1e-5, atol=1e-6)
        for name in tree(inline).keys() - CLASSIFIER.keys():
            assert torch.equal(tree(other)[name], tree(inline)[name])
    else:
        assert outcome(other) == outcome(expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        "centralized",
        "scaffold",
        "mime",
        pytest.param("feddane", marks=pytest.mark.nightly),
        pytest.param("finetune", marks=pytest.mark.nightly),
        "local-only",
    ],
)
def test_kept_features_give_the_same_numbers(algorithm: str, tmp_path: Path) -> None:
    personal = algorithm in ("finetune", "local-only")
    data = {"dataset": "digits", "partition": PARTITIONS["dirichlet"]}
    data |= {"validation": 0.2, "validation_from": "client"} if personal else {"validation": 0.1}
    changes: dict[str, Any] = {"algorithm": algorithm, "data": data, "rounds": 2}
    changes["select"] = None if algorithm == "centralized" else {"clients_per_round": 3}
    plain = Experiment(**settings(**changes)).run(tmp_path / "plain")
    kept = Experiment(**settings({**NET, "cache_features": True}, **changes)).run(tmp_path / "kept")
    agree(plain, kept)
    torch.testing.assert_close(tree(kept), tree(plain), rtol=1e-5, atol=1e-6)


def test_shifted_images_have_the_features_of_their_shift(tmp_path: Path) -> None:
    shifts = {
        "dataset": "digits",
        "partition": {"name": "feature", "clients": 6, "brightness": 0.5},
        "validation": 0.1,
    }
    plain = Experiment(**settings(data=shifts, rounds=2)).run(tmp_path / "plain")
    kept = Experiment(**settings({**NET, "cache_features": True}, data=shifts, rounds=2)).run(
        tmp_path / "kept"
    )
    torch.testing.assert_close(tree(kept), tree(plain), rtol=1e-5, atol=1e-6)
    agree(plain, kept)


def test_each_image_goes_through_the_frozen_part_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []
    real = FrozenSplit.features
    monkeypatch.setattr(
        FrozenSplit, "features", lambda self, images: (seen.append(len(images)), real(self, images))[1]
    )
    whole = settings({**NET, "cache_features": True}, select={"name": "all"}, rounds=3)
    result = Experiment(**whole).run(tmp_path / "run")
    ran, tried = made(whole), len(seen)
    images = len(ran.client_data.indices) + len(ran.client_data.dataset.test)
    trials = seen[seen.index(max(seen)) :]  # without those of the build
    assert sum(n for n in seen if n > 2) <= images <= sum(seen)
    assert len(trials) < tried
    assert result.metrics[-1]["examples"] == len(ran.client_data.indices)


def test_with_little_memory_the_rest_is_computed_each_time(tmp_path: Path) -> None:
    few = {**settings()["data"], "cache": 300 * 8 * 4 / 2**30}
    kept = Experiment(**settings({**NET, "cache_features": True}, data=few)).run(tmp_path / "few")
    plain = Experiment(**settings(data=few)).run(tmp_path / "plain")
    torch.testing.assert_close(tree(kept), tree(plain), rtol=1e-5, atol=1e-6)
    source: Any = made(settings({**NET, "cache_features": True}, data=few)).source
    assert sum(len(split.store.rows) for split in (source.dataset.train, source.dataset.test)) in (299, 300)


def test_a_resumed_run_takes_frozen_leaves_from_its_checkpoint(tmp_path: Path) -> None:
    """The weights that the model starts from are others by then."""
    file = tmp_path / "own.py"
    text = "import torch\n\ndef net(classes):\n    torch.manual_seed({})\n" + (
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.Linear(5, classes))\n"
    )
    file.write_text(text.format(1))
    experiment = settings({"name": f"{file}:net", "freeze": "backbone", "cache_features": True})
    whole = Experiment(**experiment).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Experiment(**experiment).run(tmp_path / "stopped", progress=Stopping(1))
    file.write_text(text.format(2))
    new_process()
    assert outcome(resume(tmp_path / "stopped", accept_changes=True)) == outcome(whole)


def test_what_does_not_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    cached = {**NET, "cache_features": True}
    cases: list[tuple[dict[str, Any], str, str]] = [
        (settings(cached, data={**settings()["data"], "augment": "flip"}), "cache_features", "at random"),
        (settings({**cached, "freeze": ["norm"]}), "cache_features", "follows its frozen part"),
        (settings({"name": NET["name"], "cache_features": True}), "cache_features", "nothing is frozen"),
        (settings({**NET, "freeze": ["convv"]}), "freeze", "names 'convv'"),
        (settings({**NET, "freeze": "all-but-last:0"}), "freeze", "trains nothing"),
        (settings(local={"lr": 0.1, "lr_scale": {"conv": 2.0}}), "lr_scale", "no trained weight"),
        (settings(algorithm="fedbn", data={**settings()["data"], "validation": 0.2, "validation_from": "client"}),
         "freeze", "every batch normalization"),
    ]  # fmt: skip
    for given, key, says in cases:
        with pytest.raises(ConfigError) as refused:
            Experiment(**given).run(tmp_path / "never")
        assert key in str(refused.value)
        assert says in refused.value.what
    assert not (tmp_path / "never").exists()
