"""What a federation's runs have of one site: deletes it, and names the rounds and models that the site is in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time

from fedlens.data.partition.roster import Roster
from fedlens.files.chained_log import read_chained
from fedlens.observers.read_recordings import folder_of
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.run.state_files import StateFiles
from fedlens.server.retention import Removed, ServedRuns, held, remove, removed_before
from fedlens.server.serve_record import ServeRecord


@dataclass(frozen=True)
class Withdrawal:
    """What a run had of a site.

    Attributes:
        run: its directory.
        rounds: those that have an answer of the site; None if the run has no log of answers, so that it may be any.
        models: the names of the model files that were computed from them.
        moments: whether its images are in the mean and the deviation of the run.
        removed: what was removed.
    """

    run: Path
    rounds: list[int] | None
    models: list[str]
    moments: bool
    removed: Removed

    @property
    def spans(self) -> str:
        """The rounds in words.

        >>> Withdrawal(Path("run"), [1, 2, 3, 7], [], False, Removed()).spans
        '1 to 3, 7'
        """
        starts = [r for r in self.rounds or () if r - 1 not in (self.rounds or ())]
        ends = [r for r in self.rounds or () if r + 1 not in (self.rounds or ())]
        spans = zip(starts, ends, strict=True)
        return ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in spans)


def served_runs(federation: Path, root: bytes, folders: Sequence[Path]) -> tuple[list[RunDir], list[Path]]:
    """The runs that a federation has served, and the directories of those that are not where they were.

    Args:
        federation: its folder, and `root` its root certificate in DER.
        folders: where else to look, for copies.
    """
    listed, own = ServedRuns(federation).paths, hashlib.sha256(root).hexdigest()
    copies = sorted(path.parent.resolve() for folder in folders for path in folder.rglob("serve.json"))
    runs = [RunDir(path) for path in dict.fromkeys([*listed, *copies])]
    records = {run: ServeRecord.read(run) for run in runs}
    of_it = [run for run, record in records.items() if record is not None and record.root == own]
    return of_it, [path for path in listed if records[RunDir(path)] is None]


def has_site(run: RunDir, site: str) -> bool:
    """Whether a site is in the roster of a run."""
    return run.roster_path.exists() and site in Roster.load(run.roster_path).sites


def rounds_with(run: RunDir, site: str) -> list[int] | None:
    """The rounds, evaluations of round 0 included, in which an answer of a site was taken.

    Of a round that was repeated the last attempt counts. None if the run has no log of answers.
    """
    if not run.answers_path.exists():
        return None
    attempts: dict[int, int] = {}
    rounds = set[int]()
    for line, _, _ in read_chained(run.answers_path):
        if "kind" in line:
            continue
        round, attempt = line["round"], line["attempt"]
        if attempt > attempts.get(round, 0):
            attempts[round] = attempt
            rounds.discard(round)
        if (line["site"], line["decision"], attempt) == (site, "taken", attempts[round]):
            rounds.add(round)
    return sorted(rounds)


def withdraw(run: RunDir, site: str, clock: Callable[[], float] = time) -> Withdrawal:
    """Deletes what a run has of a site of its roster; the run cannot be resumed then.

    Checkpoints from its first round on go, with the states in them, the journal, and the recordings of its rounds as a
    whole: from those of all others its update could be computed.

    Raises `RunDirectoryError` while a process writes the run.
    """
    with held(run):
        rounds = rounds_with(run, site)
        first = 0 if rounds is None else min(rounds, default=None)
        roster, best = Roster.load(run.roster_path), (run.read_summary() or {}).get("best") or {}
        moments = roster.moments is not None
        if first is None:
            return Withdrawal(run.path, [], [], moments, Removed())
        before = {checkpoint.path_of(run.checkpoint_path, saved) for saved in saved_before(run, first)}
        folders = (
            [run.recordings_path] if rounds is None else [folder_of(run.recordings_path, r) for r in rounds]
        )
        saved = [path for path in run.checkpoint_path.glob("*") if path not in before]
        gone = [*saved, *folders, run.journal_path]
        removed = remove(run, gone, "withdrawn", clock, site=site, rounds=rounds)
        removed = removed_before(run, "withdrawn", site) or removed  # a repeat names the first
        StateFiles(run.states_path).sweep(checkpoint.states_of_all(run.checkpoint_path), set())
        models = [run.model_path, *([run.best_path] if best.get("round", first) >= first else [])]
        return Withdrawal(run.path, rounds, [m.name for m in models if m.exists()], moments, removed)


def saved_before(run: RunDir, round: int) -> list[int]:
    """The rounds before `round` whose checkpoints are there."""
    return [saved for saved in checkpoint.rounds_saved(run.checkpoint_path) if saved < round]
