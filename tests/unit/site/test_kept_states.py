"""States stay at a site under handles, and the server can name the last one or that of a checkpoint, no other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import DataError, RunFailed
from fedlens.core.types import Payload
from fedlens.core.wire.message import Message
from fedlens.site.kept_states import KeptStates, StateLost
from tests.unit.site.ask_kit import ask_of

DAY = 86_400.0


class Kept:
    """The states of a site, and the asks of a server that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder / "states", 1000.0
        self.open()

    def open(self) -> None:
        self.states = KeptStates(self.folder, lambda: self.now)

    def ask(self, round: int, state: str | None, keep: Collection[str] = (), **changes: Any) -> Message:
        return ask_of(details={"state": state, "keep": sorted(keep)}, round=round, **changes)

    def get(self, round: int, state: str | None, keep: Collection[str] = (), **changes: Any) -> Payload:
        return self.states.get(self.ask(round, state, keep, **changes))

    def train(self, round: int, state: str | None, keep: Collection[str] = (), **changes: Any) -> str:
        """A round in which the client counts one up; the new handle."""
        ask = self.ask(round, state, keep, **changes)
        n = self.states.get(ask).get("n", torch.zeros(1)) + 1
        handle: str = self.states.put(ask, {"n": n, "at": (round, "x")})["at-site"]
        return handle

    def files(self) -> int:
        return len(list(self.folder.glob("*.safetensors")))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_a_state_comes_back_by_its_handle_also_after_a_restart(kept: Kept) -> None:
    first = kept.train(1, None)
    assert kept.get(2, first) == {"n": torch.ones(1), "at": (1, "x")}
    kept.open()
    assert kept.get(2, first)["n"] == 1
    assert len(first) == 64
    assert {path.stat().st_mode & 0o777 for path in kept.folder.iterdir()} == {0o600}
    # The handle says nothing of the state: equal ones of another client or ask have other handles.
    assert kept.train(1, None, client="b") != first


@pytest.mark.parametrize(
    ("round", "state", "changes"),
    [
        (2, "0" * 64, {}),
        (2, "first", {"client": "b"}),
        (2, "first", {"run": "other"}),
        (2, 5, {}),
    ],
)
def test_a_handle_that_is_not_of_this_client_and_run_is_refused(
    kept: Kept, round: int, state: Any, changes: dict[str, Any]
) -> None:
    first = kept.train(1, None)
    with pytest.raises(StateLost):
        kept.get(round, first if state == "first" else state, **changes)
    kept.open()
    assert kept.get(round, first)["n"] == 1  # nothing has changed


def test_a_state_that_is_over_is_refused_and_one_of_a_checkpoint_is_not(kept: Kept) -> None:
    first = kept.train(1, None)
    second = kept.train(2, first)
    third = kept.train(3, second, keep=[first])
    kept.open()
    assert kept.get(4, third)["n"] == 3
    with pytest.raises(StateLost, match="before the last"):
        kept.get(5, second)
    assert kept.get(1, first, attempt=2)["n"] == 1  # the server begins again at its checkpoint
    with pytest.raises(StateLost, match="before the last"):
        kept.get(2, third, attempt=2)


def test_the_server_can_take_back_a_round_and_no_more(kept: Kept) -> None:
    first = kept.train(1, None)
    second = kept.train(2, first)
    third = kept.train(2, second, exchange=1)
    assert kept.get(3, first)["n"] == 1  # round 2 was skipped
    fourth = kept.train(4, first)
    with pytest.raises(StateLost, match="no state, and"):
        kept.get(5, None)
    assert kept.get(5, fourth)["n"] == 2
    for over in (first, second, third):
        with pytest.raises(StateLost, match="before the last"):
            kept.get(5, over)


def test_a_late_ask_of_the_round_before_ends_no_state(kept: Kept) -> None:
    """An evaluation of a round may be asked for while the next one has begun."""
    first = kept.train(1, None)
    second = kept.train(2, first)
    assert kept.get(1, first, exchange=9)["n"] == 1
    third = kept.train(2, second, exchange=1)
    assert kept.get(2, third, exchange=2)["n"] == 3
    assert kept.get(3, first)["n"] == 1  # round 2 was skipped


def test_asks_without_checkpoints_remove_nothing(kept: Kept) -> None:
    """A server that has resumed names its checkpoints only after the next one."""
    first = kept.train(1, None)
    second = kept.train(2, first)
    third = kept.train(3, second, keep=[second])
    for round in range(4, 9):
        kept.get(round, third, keep=[second] if round % 2 else [])
    assert kept.files() == 3


def test_a_first_round_can_be_taken_back_too(kept: Kept) -> None:
    first = kept.train(1, None)
    kept.train(1, first, exchange=1)
    assert kept.get(2, None) == {}
    assert kept.get(3, None) == {}


def test_a_client_never_begins_anew(kept: Kept) -> None:
    first = kept.train(1, None)
    kept.get(2, first)
    with pytest.raises(StateLost, match="no state, and"):
        kept.get(3, None)
    [path] = kept.folder.glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x00")
    with pytest.raises(StateLost, match="damaged"):
        kept.get(3, first)
    path.unlink()
    with pytest.raises(StateLost, match="cannot be read"):
        kept.get(3, first)
    path.write_bytes(whole)
    assert kept.get(3, first)["n"] == 1


def test_a_state_that_no_checkpoint_names_goes_two_checkpoints_late(kept: Kept) -> None:
    handles: list[str] = [kept.train(1, None)]
    for round in range(2, 6):  # no checkpoint yet
        handles.append(kept.train(round, handles[-1]))
    assert kept.files() == 5
    handles.append(kept.train(6, handles[-1], keep=[handles[0]]))
    handles.append(kept.train(7, handles[-1], keep=[handles[0], handles[5]]))
    # Those of rounds 2 to 4 were over before both checkpoints, that of round 5 before one.
    assert kept.files() == 7 - 3
    kept.now += 13 * DAY
    for round in (8, 9, 10):
        handles.append(kept.train(round, handles[-1], keep=[handles[round - 3]]))
    last = kept.train(11, handles[0], keep=[handles[8]], attempt=2)
    kept.now += 15 * DAY
    for round in (12, 13):
        last = kept.train(round, last, keep=[last], attempt=2)
    with pytest.raises(StateLost, match="does not have"):
        kept.get(14, handles[0], attempt=2)
    assert kept.get(14, last, attempt=2)["n"] == 4


def test_a_run_that_has_finished_leaves_what_may_be_its_last_state_for_14_days(kept: Kept) -> None:
    first = kept.train(1, None)
    second = kept.train(2, first)
    third = kept.train(3, second, keep=[first])
    fourth = kept.train(4, third, keep=[first])
    kept.states.ended("run")
    assert kept.files() == 3  # that of the checkpoint, and those of the last round
    kept.now += 13 * DAY
    kept.open()
    assert kept.get(5, fourth, keep=[first])["n"] == 4  # it was not its end
    kept.now += 2 * DAY
    kept.open()
    assert kept.files() == 3
    kept.states.ended("run")
    kept.now += 15 * DAY
    kept.open()
    assert kept.files() == 0


def test_a_damaged_list_stops_the_site(kept: Kept) -> None:
    kept.train(1, None)
    (kept.folder / "states.json").write_text("[[1]]")
    with pytest.raises(DataError, match="damaged"):
        kept.open()


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("step", range(10))
def test_a_fault_at_any_write_loses_no_state(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, step: int, full: bool
) -> None:
    first = kept.train(1, None)
    calls = iter(range(100))

    def failing(name: str) -> Callable[..., object]:
        real = vars(os)[name]

        def call(*args: object, **options: object) -> object:
            if next(calls) != step:
                return real(*args, **options)
            raise OSError(errno.ENOSPC, "full") if full else Killed

        return call

    ask = kept.ask(2, first)
    kept.states.get(ask)
    new = None
    with monkeypatch.context() as patched:
        for name in ("write", "fsync", "replace"):
            patched.setattr(os, name, failing(name))
        with suppress(Killed, RunFailed):
            new = kept.states.put(ask, {"n": torch.full((1,), 2.0)})["at-site"]
    assert (new is not None) == (next(calls) <= step)
    kept.open()
    assert kept.get(2, first)["n"] == 1
    again = kept.states.put(ask, {"n": torch.full((1,), 2.0)})["at-site"]
    assert new in (None, again)
    assert kept.get(3, again)["n"] == 2
    assert kept.files() == 2
