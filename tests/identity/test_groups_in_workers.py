"""Groups of clients in local workers: the numbers of the engine that does them in one process, to the bit."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import Vectorized
from fedlens.local.rules import ClientRule, LocalContext, Traits
from tests.contract.contract_kit import nightly_but
from tests.identity.identity_kit import course, model, parts, same, world

pytestmark = pytest.mark.usefixtures("quick_workers")

STEPS = {"lr": 0.2, "epochs": 2, "batch_size": 4, "momentum": 0.3}


def both(name: str, group: int, rounds: int = 3, **how: Any) -> tuple[Any, Any]:
    made = ALGORITHMS.find(name)(parts(world(), STEPS, **how))
    one = course(made, world(), rounds, engine=Vectorized(group=group))
    return one, course(made, world(), rounds, engine=processes(workers=2, group=group))


@pytest.mark.parametrize(("name", "group"), [("fedavg", 2), ("scaffold", 4)])
def test_they_are_those_of_vectorized_to_the_bit(name: str, group: int) -> None:
    one, many = both(name, group, select=Uniform(4))
    assert same(one.final, many.final)
    assert [s.tally.per_client for s in one.steps] == [s.tally.per_client for s in many.steps]
    assert not same(one.final, one.steps[0].before["model"])


@pytest.mark.parametrize("group", nightly_but({7}, [2, 7, 50]))
def test_reduced_blocks_stay_whole_whatever_the_group(group: int) -> None:
    """A hundred clients in blocks of three, folded where they ran: a stretch is the whole blocks that a group holds."""
    there = world([1 + k % 5 for k in range(100)])
    made = fedavg(parts(there, {"lr": 0.2, "batch_size": 2}, select=Everyone()))
    one = course(made, there, 2, engine=Vectorized(group=group))
    many = course(made, there, 2, engine=processes(workers=2, group=group))
    assert same(one.final, many.final)


@dataclass(frozen=True)
class Deadly:
    """Kills its process the first time that it sees client 3's examples."""

    grave: Path

    def __call__(self, context: LocalContext) -> None:
        if len(context.problem.data) and context.problem.client.id == 3 and not self.grave.exists():
            self.grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_in_a_group_is_replaced_and_the_numbers_stay(tmp_path: Path) -> None:
    def made(grave: Path) -> Any:
        rule = ClientRule(name="deadly", traits=Traits(stackable=True), start=Deadly(grave))
        return fedavg(parts(world(), STEPS, client=rule, select=Everyone()))

    (tmp_path / "there").touch()
    one = course(made(tmp_path / "there"), world(), 2, engine=Vectorized(group=3))
    many = course(made(tmp_path / "not yet"), world(), 2, engine=processes(workers=2, group=3))
    assert (tmp_path / "not yet").exists()
    assert same(one.final, many.final)


def test_what_cannot_be_stacked_is_refused_with_the_setting() -> None:
    made = fedavg(parts(world(), STEPS, model(norm=True)))
    engine = processes(workers=1, group=2)
    with pytest.raises(ConfigError, match=r"'processes' with engine\.group = 2 cannot train several clients"):
        engine.check(made.ops)
    with pytest.raises(ConfigError, match="cannot use the channels-last layout"):
        processes(workers=1, group=2, channels_last=True).check({})
    processes(workers=1).check(made.ops)
