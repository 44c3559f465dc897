"""The ledger has every release: before the round is written, after a kill, and of repeated rounds."""

import stat
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant

from fedlens import Experiment, Observer, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.files import jsonl
from fedlens.privacy.accounting import epsilons
from fedlens.run.journal_file import JournalFile

PRIVATE: dict[str, Any] = {
    "rounds": 4,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 20}},
    "select": {"name": "poisson", "fraction": 0.3},
    "engine": "inline",
    "privacy": {"clip": 0.1, "noise_multiplier": 2.0, "delta": 1e-3},
    "checkpoint": {"seconds": 0},
}


class Killed(BaseException):
    """The process is gone."""


class Killer(Observer):
    """Ends the run in a hook of a round, as a kill does."""

    ends_run = True

    def __init__(self, hook: str, round: int) -> None:
        self._hook, self._round = hook, round

    def released(self, round: int, state: Any, tally: Any) -> None:
        if (self._hook, self._round) == ("released", round):
            raise Killed

    def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
        if (self._hook, self._round) == ("round_done", metrics["round"]):
            raise Killed


def test_each_round_has_its_release_and_its_epsilon(tmp_path: Path) -> None:
    run = Experiment(**PRIVATE).run(tmp_path / "run", report=False)
    events = jsonl.read(tmp_path / "run" / "privacy.jsonl")
    assert [event["round"] for event in events] == [1, 2, 3, 4]
    assert {(event["z"], event["q"], event["sampling"], event["clip"]) for event in events} == {
        (2.0, 0.3, "poisson", 0.1)
    }
    spent = [line.get("epsilon") for line in run.metrics]
    assert spent == [None, *(epsilons(events[:t], 1e-3).best for t in range(1, 5))]
    assert run.summary["privacy"]["epsilon"] == spent[-1]
    assert run.summary["privacy"]["sentence"].startswith("After 4 rounds the model is (")


@pytest.mark.parametrize("hook", ["released", "round_done"])
def test_a_repeated_round_counts_again(hook: str, tmp_path: Path) -> None:
    """The first noise of round 3 is drawn, and perhaps seen, when the run is killed."""
    with pytest.raises(Killed):
        Experiment(**PRIVATE).run(tmp_path / "run", report=False, progress=Killer(hook, 3))
    with (tmp_path / "run" / "privacy.jsonl").open("a") as file:
        file.write('{"event": "gau')  # a line that a power cut has cut
    run = resume(tmp_path / "run", report=False)
    events = jsonl.read(tmp_path / "run" / "privacy.jsonl")
    assert [event["round"] for event in events] == [1, 2, 3, 3, 4]
    assert run.metrics[-1]["epsilon"] == epsilons(events, 1e-3).best
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3, 4]


def test_a_ledger_that_lost_lines_is_refused(tmp_path: Path) -> None:
    Experiment(**PRIVATE).run(tmp_path / "run", report=False, until=3)
    path = tmp_path / "run" / "privacy.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(RunDirectoryError, match="has 2 releases, and the checkpoint knows of 3"):
        resume(tmp_path / "run", report=False)


def test_a_run_without_the_table_has_no_ledger(tmp_path: Path) -> None:
    settings = {name: value for name, value in PRIVATE.items() if name not in ("privacy", "select")}
    run = Experiment(**settings, select={"fraction": 0.3}).run(tmp_path / "run", report=False, until=1)
    assert not (tmp_path / "run" / "privacy.jsonl").exists()
    assert "privacy" not in run.summary
    assert "epsilon" not in run.metrics[-1]


@pytest.mark.usefixtures("few_orders")
def test_an_epsilon_is_solved_for_the_rounds_of_the_run(tmp_path: Path) -> None:
    privacy, six = {"clip": 0.1, "epsilon": 4.0, "delta": 1e-3}, {"clients_per_round": 6}
    run = Experiment(**{**PRIVATE, "privacy": privacy, "select": six}).run(tmp_path / "run", report=False)
    assert 3.9 < run.summary["privacy"]["epsilon"] <= 4.0


@pytest.mark.parametrize(
    ("changes", "old", "new", "match"),
    [
        (
            {"privacy": {**PRIVATE["privacy"], "noise": "seeded"}},
            '"seeded"',
            '"system"',
            "so far were not private",
        ),
        ({"record": {"unsafe": True}}, "unsafe = true", "unsafe = false", "so far were not private"),
        (
            {"select": {"name": "uniform", "clients_per_round": 10}},
            "clients_per_round = 10",
            "clients_per_round = 20",
            "no common epsilon",
        ),
    ],
)
def test_a_run_promises_nothing_that_its_first_rounds_broke(
    changes: dict[str, Any], old: str, new: str, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    Experiment(**{**PRIVATE, **changes}).run(path, report=False, until=2)
    text = (path / "config.toml").read_text()
    assert text.count(old) == 1
    (path / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(RunDirectoryError, match=match):
        resume(path, accept_changes=True)
    assert len(jsonl.read(path / "privacy.jsonl")) == 2


def test_a_run_is_trained_longer(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Experiment(**{**PRIVATE, "rounds": 2}).run(path, report=False)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    resume(path, accept_changes=True)
    assert [event["round"] for event in jsonl.read(path / "privacy.jsonl")] == [1, 2, 3]


TREE: dict[str, Any] = {
    **PRIVATE,
    "select": {"name": "once-each", "clients_per_round": 4},
    "rounds": 5,
    "privacy": {**PRIVATE["privacy"], "mechanism": "tree"},
}


def levels(times: int) -> float:
    release = {
        "q": 1.0,
        "z": 2.0,
        "sampling": "all",
        "relation": "add-or-remove",
        "cohort": 4.0,
        "clients": 20,
    }
    return epsilons([release] * times, 1e-3).best


@pytest.mark.parametrize("hook", ["released", "round_done"])
def test_a_repeated_round_starts_a_new_tree_of_noise(hook: str, tmp_path: Path) -> None:
    """Its clients are in two trees, and pay for both; the secret of the first is still at hand."""
    path = tmp_path / "run"
    with pytest.raises(Killed):
        Experiment(**TREE).run(path, report=False, progress=Killer(hook, 3))
    assert JournalFile(path / "journal").log_of("@server")["round"] == 3
    run = resume(path, report=False)
    events = jsonl.read(path / "privacy.jsonl")
    assert [(event["round"], event["leaf"]) for event in events] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (3, 1),
        (4, 2),
        (5, 3),
    ]
    assert run.metrics[-1]["epsilon"] == levels(2 + 2)
    assert (
        "20 clients take part in one order that is public, 4 a round" in run.summary["privacy"]["assumed"][0]
    )


def test_a_paused_run_goes_on_with_its_tree_which_its_owner_alone_can_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Experiment(**TREE).run(path, report=False, until=3)
    secret = path / "journal" / "client-@server.safetensors"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    nodes = JournalFile(path / "journal").log_of("@server")["nodes"]
    assert [len(node) for node in nodes] == [650, 650]
    for file in path.rglob("*"):
        if file.is_file() and file != secret:
            held = file.read_bytes()
            assert not any(node[100:104].numpy().tobytes() in held for node in nodes)
            assert not any(node[100:104].float().numpy().tobytes() in held for node in nodes)
    run = resume(path, report=False)
    assert [event["leaf"] for event in jsonl.read(path / "privacy.jsonl")] == [1, 2, 3, 4, 5]
    assert run.metrics[-1]["epsilon"] == levels(3)
    assert JournalFile(path / "journal").log_of("@server") == {}  # the noise of the last model is gone


def test_another_order_of_clients_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Experiment(**TREE, seed=7).run(path, report=False, until=2)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("clients_per_round = 4", "clients_per_round = 5"))
    with pytest.raises(RunDirectoryError, match="asked clients in another order"):
        resume(path, accept_changes=True)
    assert len(jsonl.read(path / "privacy.jsonl")) == 2


def test_each_client_has_its_own_ledger_line_and_epsilon(tmp_path: Path) -> None:
    """Each ask to train counts, and a repeated round counts again."""
    local = {"lr": 0.1, "steps": 2, "batch_size": "all"}
    noised = {"unit": "example", "clip": 1.0, "noise_multiplier": 20.0, "delta": 1e-3}
    settings = {
        **PRIVATE,
        "rounds": 3,
        "evaluation": {"every": 3},
        "privacy": noised,
        "local": local,
        "select": {"clients_per_round": 2},
    }
    settings["data"] = {"dataset": "digits", "partition": {"name": "iid", "clients": 3}, "normalize": "unit"}
    with pytest.raises(Killed):
        Experiment(**settings).run(tmp_path / "run", report=False, progress=Killer("released", 2))
    run = resume(tmp_path / "run", report=False)
    events = jsonl.read(tmp_path / "run" / "privacy.jsonl")
    assert [event["round"] for event in events] == [1, 1, 2, 2, 2, 2, 3, 3]
    spent = run.summary["privacy"]
    own = {
        row["client"]: [event for event in events if event["client"] == row["client"]]
        for row in spent["clients"]
    }
    assert {row["client"]: row["trained"] for row in spent["clients"]} == {k: len(v) for k, v in own.items()}
    for row in spent["clients"]:  # dp-accounting's, for the client's own steps: q = 1, so each is a Gaussian
        accountant = RdpAccountant()
        accountant.compose(GaussianDpEvent(20.0), 2 * len(own[row["client"]]))
        assert row["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-4)
        assert row["epsilon"] <= spent["epsilon_rdp"]
    assert run.metrics[-1]["epsilon"] == spent["epsilon"] <= spent["epsilon_rdp"]
    assert "local_loss" not in run.metrics[-1]
    assert run.metrics[-1]["clients"] == 2
    assert spent["sentence"].startswith(f"All that client {spent['clients'][0]['client']} sends is (")
