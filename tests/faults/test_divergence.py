"""A reply that is finite and huge, and a run that diverges: refused or reported at once, by the client's name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import Experiment, resume
from fedlens.base.errors import RunFailed
from fedlens.cli.main import app
from fedlens.run.progress import ProgressBase
from tests.faults import faulty
from tests.faults.run_kit import outcome, sha
from tests.unit.engines.ray_kit import NEEDS_RAY

pytestmark = pytest.mark.usefixtures("quick_workers")

FILE = str(Path(faulty.__file__))
ENGINES: dict[str, Any] = {
    "inline": "inline",
    "processes": {"name": "processes", "workers": 2},
    "groups": {"name": "processes", "workers": 2, "group": 4},
    "vectorized": {"name": "vectorized"},
    "ray": {"name": "ray", "workers": 2},
}


class Listener(ProgressBase):
    """Collects what is said, and may stop the run after a round."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.notes = stop, list[str]()
        self.round = -1

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.round = metrics["round"]
        if self.round == self.stop:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(f"after round {self.round}: {text}")

    def problem(self, text: str) -> None:
        self.note(f"warning: {text}")


def experiment(after: int, value: float = 3e38, clients: int = 12, **more: Any) -> Experiment:
    """The linear model; all clients take part, and client 3 turns huge after some accepted replies."""
    settings: dict[str, Any] = {
        "rounds": 6,
        "seed": 1,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": clients}},
        "model": "linear",
        "select": {"name": "uniform", "clients_per_round": clients},
        "algorithm": {"name": f"{FILE}:huge", "client": 3, "after": after, "value": value},
        "local": {"lr": 0.1, "batch_size": 20},
        "checkpoint": {"seconds": 0},
    }
    return Experiment(**{**settings, **more})


def refused(run: Any) -> dict[str, int]:
    """How often each client's reply was refused for its norm."""
    failures = run.summary["failures"]
    assert all("times the median of accepted replies" in r for reasons in failures.values() for r in reasons)
    return {client: sum(reasons.values()) for client, reasons in failures.items()}


@pytest.fixture(scope="module")
def inline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 good replies in two rounds; from the third on client 3 sends 3e38."""
    out = tmp_path_factory.mktemp("divergence") / "inline"
    experiment(after=2).run(out)
    return out


def test_a_huge_reply_is_refused_by_name_and_the_run_goes_on(inline_run: Path) -> None:
    from fedlens import load_result

    run = load_result(inline_run)
    assert refused(run) == {"3": 4}
    (reason,) = run.summary["failures"]["3"]
    assert reason.startswith("update norm 7.6e+39 is 10^")
    assert reason.endswith(" times the median of accepted replies (limit: 10,000 times)")
    assert (run.summary["status"], run.summary["warnings"]) == ("finished", [])
    assert [line["failed"] for line in run.metrics] == [0, 0, 0, 1, 1, 1, 1]
    assert run.metrics[-1]["test_loss"] < run.metrics[2]["test_loss"]


@pytest.mark.parametrize("engine", ["processes", "groups", "vectorized"])
def test_the_bound_holds_on_every_engine(tmp_path: Path, inline_run: Path, engine: str) -> None:
    """... also where several clients are computed together."""
    run = experiment(after=2, engine=ENGINES[engine]).run(tmp_path / "run")
    assert refused(run) == {"3": 4}
    assert math.isfinite(run.metrics[-1]["test_loss"])
    if engine == "processes":
        assert sha(tmp_path / "run/model.safetensors") == sha(inline_run / "model.safetensors")


@pytest.mark.parametrize(
    "engine",
    ["inline", "processes", "vectorized", pytest.param("ray", marks=[pytest.mark.nightly, NEEDS_RAY])],
)
def test_the_bound_holds_where_blocks_are_reduced_in_the_worker(tmp_path: Path, engine: str) -> None:
    more: dict[str, Any] = {"rounds": 3, "engine": ENGINES[engine], "evaluation": {"every": 3}}
    run = experiment(after=1, clients=150, **more).run(tmp_path / "run")
    assert refused(run) == {"3": 2}
    assert math.isfinite(run.metrics[-1]["test_loss"])


def test_a_resumed_run_refuses_the_same(tmp_path: Path, inline_run: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment(after=2).run(tmp_path / "run", progress=Listener(stop=2))
    assert refused(resume(tmp_path / "run")) == {"3": 4}
    assert outcome(tmp_path / "run") == outcome(inline_run)


def test_before_twenty_replies_the_bound_does_not_apply_and_the_warning_names_the_client(
    tmp_path: Path,
) -> None:
    listener = Listener()
    with pytest.raises(RunFailed, match=r"the loss of round 2 is not a finite number; .* local\.lr is 0\.1"):
        experiment(after=1).run(tmp_path / "run", progress=listener)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (warning,) = summary["warnings"]
    assert (warning["kind"], warning["since"], warning["until"]) == ("loss-not-finite", 2, 2)
    assert warning["clients"][0]["client"] == "3"
    assert warning["try"] == (
        "Check the data of client '3'; then try local.lr = 0.01 (a tenth), or set local.clip_norm."
    )
    (said,) = [note for note in listener.notes if "warning: " in note]
    assert said.startswith("after round 1: warning: The test loss of round 2 is not finite. Largest update: ")
    assert "client '3' in round 2 (norm 7.65e+39, 10^" in said


@pytest.mark.parametrize(("every", "since", "reported"), [(1, 5, 7), (2, 7, 9)])
def test_a_loss_that_jumps_and_stays_is_reported_once_with_the_client_that_caused_it(
    tmp_path: Path, every: int, since: int, reported: int
) -> None:
    """Large but below the limit of 10^4: accepted, and the model is gone; a resumed run says the same.

    Where the test loss is measured in every second round, the local loss shows it first.
    """
    more = {"rounds": 10, "evaluation": {"every": every}}
    listener = Listener()
    ref = experiment(after=3, value=200.0, **more).run(tmp_path / "ref", progress=listener)
    assert refused(ref) == {}
    assert ref.summary["status"] == "finished"
    (warning,) = [w for w in ref.summary["warnings"] if w["kind"] == "loss-jump"]
    assert (warning["since"], warning["until"]) == (since, 10)
    assert (warning["clients"][0]["client"], warning["clients"][0]["round"]) == ("3", since)
    said = [note for note in listener.notes if "has been more than 100 times" in note]
    assert [note[:14] for note in said] == [f"after round {reported - 1}:"]
    with pytest.raises(KeyboardInterrupt):
        experiment(after=3, value=200.0, **more).run(tmp_path / "run", progress=Listener(stop=since + 1))
    again = Listener()
    resumed = resume(tmp_path / "run", progress=again)  # in the middle of the three rounds
    assert resumed.summary["warnings"] == ref.summary["warnings"]
    repeated = [note for note in again.notes if "has been more than 100 times" in note]
    assert [note.partition(": ")[2] for note in repeated] == [note.partition(": ")[2] for note in said]


@pytest.mark.report_page
def test_strict_makes_a_warning_exit_with_1_and_the_page_shades_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(
        """
        rounds = 6
        model = "mlp"
        data.dataset = "digits"
        data.partition = { name = "iid", clients = 4 }
        local.lr = 3.0
        """
    )
    cli = CliRunner()
    loose = cli.invoke(app, ["run", "own.toml", "--out", "loose", "--json"])
    assert loose.exit_code == 0
    summary = json.loads(loose.stdout)
    assert summary["status"] == "finished"
    (chance,) = [w for w in summary["warnings"] if w["kind"] == "accuracy-at-chance"]
    assert (chance["since"], chance["until"], chance["metric"]) == (1, 6, "test_accuracy")
    assert "Try local.lr = 0.1, or set local.clip_norm." in loose.stderr
    page = (tmp_path / "loose/report.html").read_text()
    assert "<b>Rounds 1 to 6.</b> The test accuracy has been at chance since round 1" in page
    assert '"type": "rect"' in page or '"type":"rect"' in page
    for verb in (["run", "own.toml", "--out", "strict"], ["resume", "strict"]):
        strict = cli.invoke(app, [*verb, "--strict", "--quiet"])
        assert strict.exit_code == 1
        assert "has 1 warning: The test accuracy has been at chance since round 1" in strict.stderr
    sound = cli.invoke(
        app, ["run", "own.toml", "--set", "local.lr=0.1", "--out", "sound", "--strict", "--quiet"]
    )
    assert (sound.exit_code, sound.stderr) == (0, "")


SCALE = {"algorithm": "fedavg", "local": {"lr": 1e-6, "batch_size": 20}}
BOUND = "replies-beyond-bound"


def scaled(stop: int, out: Path, engine: str = "inline") -> None:
    """A run whose replies are 10^5 times as large after the third round; stopped after round `stop`, and resumed."""
    growing = {"name": f"{FILE}:growing", "after": 3, "times": 1e5}
    run = experiment(**{**SCALE, "algorithm": growing}, after=3, engine=ENGINES[engine])
    if not stop:
        run.run(out)
        return
    with pytest.raises(KeyboardInterrupt):
        run.run(out, progress=Listener(stop=stop))
    resume(out)


@pytest.fixture(scope="module")
def scaled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scaled") / "run"
    scaled(0, out)
    return out


def test_a_round_of_replies_beyond_the_bound_leaves_the_model_and_the_run_goes_on(scaled_run: Path) -> None:
    from fedlens import load_result

    run = load_result(scaled_run)
    assert [line["failed"] for line in run.metrics] == [0, 0, 0, 0, 12, 0, 0]
    assert run.metrics[4]["test_loss"] == run.metrics[3]["test_loss"]
    assert run.metrics[6]["test_loss"] < run.metrics[4]["test_loss"] - 0.1
    (warning,) = run.warnings
    assert (warning["kind"], warning["since"], warning["until"]) == (BOUND, 4, 4)
    assert warning["sentence"].startswith(
        "In round 4 the norm bound rejected every reply to 'train': 12 in all, the first from client '11' (update norm "
    )
    assert warning["sentence"].endswith(
        " times)). The model is unchanged in that round. The scale of the replies has changed, so the bound starts "
        "anew and the next replies are accepted."
    )
    assert (
        warning["try"]
        == "If the loss rises from there on, try local.lr = 1e-07 (a tenth), or set local.clip_norm."
    )


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_run_resumed_around_a_round_beyond_the_bound_is_the_same(
    tmp_path: Path, scaled_run: Path, stop: int
) -> None:
    scaled(stop, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(scaled_run)


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_a_round_beyond_the_bound_is_the_same_on_every_engine(
    tmp_path: Path, scaled_run: Path, engine: str
) -> None:
    scaled(0, tmp_path / "run", engine)
    summaries = [json.loads((out / "summary.json").read_text()) for out in (tmp_path / "run", scaled_run)]
    assert [[w["since"] for w in summary["warnings"]] for summary in summaries] == [[4], [4]]
    if engine == "processes":
        assert sha(tmp_path / "run/model.safetensors") == sha(scaled_run / "model.safetensors")


def test_a_resumed_run_with_another_learning_rate_has_a_bound_of_its_own(tmp_path: Path) -> None:
    short = experiment(after=9, **SCALE, rounds=3).run(tmp_path / "run")
    config = tmp_path / "run/config.toml"
    text = config.read_text().replace("rounds = 3", "rounds = 6").replace("lr = 1e-06", "lr = 0.1")
    assert text.count("lr = 0.1") == 1
    config.write_text(text)
    run = resume(tmp_path / "run", accept_changes=True)
    assert (refused(run), run.warnings) == ({}, [])
    assert run.metrics[4]["test_loss"] < short.metrics[3]["test_loss"] - 0.1


def dying(**more: Any) -> Experiment:
    """The linear model at four clients, of which three send NaN."""
    faults = {"name": f"{FILE}:algorithm", "first": 0, "faults": ["nan"] * 3}
    return experiment(0, clients=4, **{"algorithm": faults, **more})


@pytest.mark.report_page
def test_clients_whose_values_are_not_finite_are_named_and_end_the_run(tmp_path: Path) -> None:
    """Not the good client, whose update is the largest because it is the only one."""
    listener = Listener()
    with pytest.raises(RunFailed) as refused:
        dying().run(tmp_path / "run", progress=listener)
    assert str(refused.value) == (
        "3 of 4 clients sent values that are not finite: '0', '1', '2'; round 3 is number 3 in a row in which at "
        "least half did; try local.lr = 0.01 (a tenth), or set local.clip_norm; with divergence.patience = 0 such a "
        "run goes on."
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("failed", 3)
    (warning,) = summary["warnings"]
    assert (warning["kind"], warning["since"], warning["until"]) == ("replies-not-finite", 1, 3)
    assert [each["client"] for each in warning["clients"]] == ["0", "1", "2"]
    assert not any("Largest update" in note for note in listener.notes)
    with pytest.raises(KeyboardInterrupt):  # the count goes on where it was
        dying().run(tmp_path / "cut", progress=Listener(stop=2))
    config = tmp_path / "cut/config.toml"
    written = config.read_text()
    config.write_text(written.replace("[divergence]\npatience = 3\n", ""))  # as earlier versions wrote it
    assert config.read_text() != written
    with pytest.raises(RunFailed, match="round 3 is number 3 in a row"):
        resume(tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "run")
    config.write_text(written.replace("patience = 3", "patience = 0"))
    assert resume(tmp_path / "cut").summary["status"] == "finished"  # nothing else is asked
    page = (tmp_path / "cut/report.html").read_text()
    assert '<span class="badge interrupted">finished, 1 warning</span>' in page
