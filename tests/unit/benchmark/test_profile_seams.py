from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlens.benchmark.profile_clock import Clock
from fedlens.benchmark.profile_seams import SEAMS, Watch, owner_of
from fedlens.core.modules import Loadable
from fedlens.core.protocol import Id, Program, Reply
from fedlens.core.schema import Schema
from fedlens.core.tree import digest, tree_of
from fedlens.engines.executor import Executor, Item
from fedlens.experiment.build import Built
from fedlens.tasks.classification import Classification
from tests.unit.benchmark.profile_kit import built


def run_state(experiment: Built) -> dict[str, Any]:
    """Every function that a watch replaces, as it is now."""
    found = {f"{seam.owner}.{seam.name}": vars(owner_of(seam))[seam.name] for seam in SEAMS}
    rule = experiment.algorithm.ops["train"].rule  # type: ignore[attr-defined]
    found |= {f"rule.{name}": value for name, value in vars(rule).items() if name != "plain"}
    found |= {name: vars(Classification)[name] for name in ("loss", "losses")}
    return {**found, "load": Loadable.load}


def trained(site: Executor, model: Any) -> Reply:
    item = Item(Id(1, 0, 0), 3, {}, {})
    answer = site.answer("train", {"model": model, "lr": 0.1}, item, Schema())
    assert isinstance(answer, Reply), answer
    return answer


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.owner}.{seam.name}")
def test_every_seam_is_there(seam: Any) -> None:
    assert callable(vars(owner_of(seam))[seam.name])


def test_a_watched_client_gives_the_same_bits_and_leaves_everything_as_it_was() -> None:
    experiment = built("algorithm.name=fedprox", "algorithm.mu=0.1")
    before, ops = run_state(experiment), experiment.algorithm.ops
    site, model = Executor(Program(ops, experiment.holders, 0)), tree_of(experiment.model.build())
    plain = digest(trained(site, model).payload["update"])
    clock = Clock()
    with Watch(clock, ops.values()):
        assert all(
            value is not before[name] for name, value in run_state(experiment).items() if name in CHANGED
        )
        watched = digest(trained(site, model).payload["update"])
    after = run_state(experiment)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert plain == watched == digest(trained(site, model).payload["update"])
    (learner,) = [value for value in site.scratch.values() if isinstance(value, Loadable)]
    assert not learner.module._forward_hooks
    assert not learner.module._forward_pre_hooks
    steps = clock.calls["backward"]
    assert steps > 3
    assert clock.calls["rule"] == clock.calls["forward"] == clock.calls["forward.loss"] == steps
    for part in ("data.gathering", "data.normalization", "optimizer", "client.loop", "client.set-up"):
        assert clock.seconds[part] > 0, part


CHANGED = (
    "load", "loss", "losses", "rule.grad", "fedlens.local.training.gradients_of",
    "fedlens.data.client_datasets.normalize",
    "fedlens.data.client_datasets:ClientDataset.batches", "fedlens.local.training:Train.__call__",
)  # fmt: skip


def test_everything_is_put_back_after_an_exception() -> None:
    experiment = built("algorithm.name=fedprox", "algorithm.mu=0.1")
    before, watch = run_state(experiment), Watch(Clock(), experiment.algorithm.ops.values())
    with pytest.raises(KeyboardInterrupt), watch:
        raise KeyboardInterrupt
    assert all(value is before[name] for name, value in run_state(experiment).items())


def test_a_client_that_fails_in_its_forward_pass_leaves_no_part_open() -> None:
    experiment = built()
    site = Executor(Program(experiment.algorithm.ops, experiment.holders, 0))
    wrong = tree_of(experiment.model.build())
    trained(site, wrong)
    (learner,) = [value for value in site.scratch.values() if isinstance(value, Loadable)]
    learner.module.append(torch.nn.Linear(3, 3))
    clock = Clock()
    with Watch(clock, experiment.algorithm.ops.values()), clock.part("other"):
        answer = site.answer("train", {"model": wrong, "lr": 0.1}, Item(Id(1, 0, 0), 3, {}, {}), Schema())
        assert not isinstance(answer, Reply)
        assert clock._inside == ["other"]
    assert not learner.module._forward_hooks
