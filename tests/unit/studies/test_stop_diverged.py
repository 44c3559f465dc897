"""A run whose loss diverges is stopped, at the same round after an interruption too."""

from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Experiment, resume
from fedlens.files import jsonl
from fedlens.run.progress import ProgressBase
from fedlens.run.rundir import RunDir
from fedlens.studies.carry_out import RunDiverged, StopDiverged, refuse_diverged


def _experiment(lr: float, **settings: Any) -> Experiment:
    return Experiment(
        rounds=12,
        model="linear",
        local={"lr": lr, "steps": 5},
        data={"dataset": "digits", "partition": {"name": "iid", "clients": 4}, "validation": 0.1},
        engine={"name": "inline", "threads": 1},
        **settings,
    )


class _KillAt(ProgressBase):
    """Ends the run like Ctrl-C after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt


def _stopped(path: Path, lr: float) -> str:
    with pytest.raises(RunDiverged) as caught:
        _experiment(lr).run(path, progress=StopDiverged(), report=False)
    return str(caught.value)


def test_a_run_whose_loss_diverges_ends_before_its_last_round(tmp_path: Path) -> None:
    why = _stopped(tmp_path / "run", 1e6)
    rounds = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) - 1
    assert why.startswith(f"diverged in round {rounds}: The ")
    assert 1 <= rounds < 12


def test_a_run_with_a_usual_rate_is_not_stopped(tmp_path: Path) -> None:
    result = _experiment(0.1).run(tmp_path / "run", progress=StopDiverged(), report=False)
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_run_is_stopped_at_the_same_round(tmp_path: Path, at: int) -> None:
    why = _stopped(tmp_path / "whole", 1e6)
    with pytest.raises(KeyboardInterrupt):
        _experiment(1e6).run(tmp_path / "cut", progress=StopDiverged(_KillAt(at)), report=False)
    with pytest.raises(RunDiverged, match="diverged in round") as caught:
        resume(tmp_path / "cut", progress=StopDiverged(), report=False)
    assert str(caught.value) == why
    whole, cut = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut"))
    assert len(whole) == len(cut)


def test_a_run_that_was_killed_after_it_diverged_trains_no_further_round(tmp_path: Path) -> None:
    why = _stopped(tmp_path / "run", 1e6)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunDiverged) as caught:
        resume(tmp_path / "run", progress=StopDiverged(), report=False)
    assert str(caught.value) == why
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_run_that_diverged_and_is_due_to_no_later_round_has_diverged_all_the_same(tmp_path: Path) -> None:
    why = _stopped(tmp_path / "run", 1e6)
    resume(tmp_path / "run", progress=StopDiverged(), report=False, until=3)  # it trains no round
    with pytest.raises(RunDiverged) as caught:
        refuse_diverged(tmp_path / "run")
    assert str(caught.value) == why


def test_a_run_that_did_not_diverge_is_not_refused(tmp_path: Path) -> None:
    _experiment(0.1).run(tmp_path / "run", report=False)
    refuse_diverged(tmp_path / "run")


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_collapsed_run_is_not_retried(split: str, tmp_path: Path) -> None:
    """The run ends at its collapse by itself; when it is resumed, it would go on."""
    collapsed = [{"round": k, f"{split}_embedding_deviation": 0.9 if k < 2 else 0.01} for k in range(6)]
    run = RunDir.create(tmp_path / "run", "x", None)
    run.write_config('name = "x"')
    for line in collapsed:
        jsonl.append(run.metrics_path, [line])
    outline = {"directory": str(run.path), "rounds": 10}
    stop = StopDiverged()
    stop.started({**outline, "collapse_advice": "nothing"})
    with pytest.raises(
        RunDiverged, match=r"diverged in round 4: The embeddings have collapsed: the embedding dev"
    ):
        stop.refuse()
    spared = StopDiverged()  # of a task whose embeddings do not collapse
    spared.started({**outline, "collapse_advice": None})
    spared.refuse()
    warning = {"kind": "collapse", "until": 4, "sentence": "The embeddings have collapsed."}
    run.write_summary({"warnings": [warning]})
    with pytest.raises(RunDiverged, match="diverged in round 4: The embeddings have collapsed"):
        refuse_diverged(run.path)
