"""What becomes of a block whose workers are gone, whoever's fault it was."""

from __future__ import annotations

from typing import Any

import pytest

from fedlens.core.protocol import Ask, ClientStates, Failure, Request
from fedlens.engines.schedule import DEATHS, LOSSES, Job, Schedule


def scheduled() -> tuple[Schedule, Job]:
    schedule = Schedule(ClientStates(), 2**20, lambda job: None, lambda due: None, lambda job: None)
    return schedule, schedule.publish(Ask("work", [Request(0)], {}), 1, 0, None, 1)


@pytest.mark.parametrize(("guilty", "times"), [(True, DEATHS), (False, LOSSES)])
def test_a_block_is_tried_again_until_it_was_lost_too_often(guilty: bool, times: int) -> None:
    """Also one that was never to blame: else workers that die as they are spoken to would be replaced for ever."""
    schedule, job = scheduled()
    for lost in range(1, times + 1):
        schedule.begin(job)
        schedule.lost(job, 0, guilty, "gone")
        assert list(job.waiting) == ([0] if lost < times else [])
    (failure,) = job.done[0]
    assert isinstance(failure, Failure)
    assert failure.reason == "gone"


def test_losses_that_were_nobodys_fault_do_not_add_to_the_deaths() -> None:
    schedule, job = scheduled()
    found: list[Any] = []
    for guilty in (True, False, False, True, False):
        schedule.begin(job)
        schedule.lost(job, 0, guilty, "gone")
        found.append(dict(job.done))
    assert found == [{}] * 5
