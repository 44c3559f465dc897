"""Rounds of several asks: states that are held back until the end, clients' logs, and what a killed round leaves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import RoundRefused
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Client, ClientStates, Outcome, Payload, Program, Request
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField
from fedlens.run.journal_file import JournalFile
from tests.seam.seam_kit import ENGINES, Points, gate


class Killed(Exception):
    """The server is gone."""


def count(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """How often the client was asked, by its state and by its log."""
    times, logged = client.state.get("times", 0), payload["log"].get("times", 0)
    seen = torch.tensor([float(times), float(logged)])
    return Outcome({"seen": seen, "log": {"times": logged + 1}}, {"times": times + 1})


def asked(holds: bool = True) -> Ask:
    schema = Schema({"seen": TensorField((2,), torch.float32)})
    return Ask("count", [Request(k) for k in range(3)], holds=holds, logged=True, expect=schema)


def seen(answers: Any) -> list[list[float]]:
    return [answer.payload["seen"].tolist() for answer in answers]


@pytest.mark.parametrize("engine", ENGINES)
def test_held_states_are_committed_when_the_round_ends(engine: str) -> None:
    def steps() -> Any:
        first = seen((yield asked()))
        return first, seen((yield asked(holds=False)))

    with gate(engine, {"count": count}) as g:
        # The second ask does not see the states that the first one holds back, but it sees the logs.
        assert g.drive(steps(), 1) == ([[0.0, 0.0]] * 3, [[0.0, 1.0]] * 3)
        assert [g.states.get(k) for k in range(3)] == [{"times": 1}] * 3


def test_a_round_that_is_refused_commits_nothing_and_keeps_the_logs() -> None:
    def steps() -> Any:
        list((yield asked()))
        raise RoundRefused("no sum")

    with gate("inline", {"count": count}) as g:
        with pytest.raises(RoundRefused):
            g.drive(steps(), 1)
        assert [g.states.get(k) for k in range(3)] == [{}] * 3
        assert g.journal.log_of(2) == {"times": 1}


def test_a_second_holding_ask_drops_the_states_of_the_first() -> None:
    def steps() -> Any:
        list((yield asked()))
        list((yield replace(asked(), requests=[Request(2)])))

    with gate("inline", {"count": count}) as g:
        g.drive(steps(), 1)
        assert [g.states.get(k) for k in range(3)] == [{}, {}, {"times": 1}]


@pytest.mark.parametrize("ends", ["between the asks", "before the ask"])
def test_a_killed_round_is_continued_from_the_journal(ends: str, tmp_path: Path) -> None:
    def killed() -> Any:
        if ends == "between the asks":
            list((yield asked()))
        raise Killed

    def continued() -> Any:
        yield from ()

    def driver(states: ClientStates) -> Driver:
        made = ENGINES["inline"]()
        made.open(Program({"count": count}, Points(), 0), states)
        return Driver(made, states, journal=JournalFile(tmp_path / "journal"))

    with pytest.raises(Killed):
        driver(ClientStates()).drive(killed(), 4)
    states = ClientStates()
    driver(states).drive(continued(), 4)
    kept = {"times": 1} if ends == "between the asks" else {}
    assert [states.get(k) for k in range(3)] == [kept] * 3


def test_logs_have_no_bytes() -> None:
    def steps() -> Any:
        return [answer.nbytes for answer in (yield asked())]

    with gate("inline", {"count": count}) as g:
        assert g.drive(steps(), 1) == [8] * 3
        assert (g.tally.bytes_up, g.tally.bytes_down) == (24, 0)


def test_notes_are_gone_with_the_checkpoint_and_logs_and_the_name_of_the_run_stay(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal")
    journal.note(3, "masked", {"sum": torch.arange(3)})
    journal.note(4, "masked", {"sum": torch.arange(4)})
    journal.keep_log(5, {"answered": 4})
    journal.saved(3)
    again = JournalFile(tmp_path / "journal")
    assert again.run == journal.run != JournalFile(tmp_path / "other").run
    assert again.noted(3, "masked") is None
    assert (again.noted(4, "masked") or {})["sum"].tolist() == [0, 1, 2, 3]
    assert again.log_of(5) == {"answered": 4}
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "journal").iterdir()}
    assert modes == {"0o600"}
    assert oct((tmp_path / "journal").stat().st_mode & 0o777) == "0o700"


def test_an_ask_in_arrival_order_holds_and_logs_nothing() -> None:
    for given in ({"holds": True}, {"logged": True}):
        with pytest.raises(ValueError, match="arrival order"):
            Ask("count", [Request(0)], order="arrival", **given)
