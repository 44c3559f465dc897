"""Removes what runs leave at a site: by `fedlens site purge`, and by itself `[keep] days` after the last ask of a run.

States, stored answers and the logs of clients go. The chained log, which gets a line, and the approvals stay: they say
what was answered. So do the models in opened secure sums, which no later run may sum again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fedlens.files import jsonl
from fedlens.identity.private_files import one_writer
from fedlens.site.answers_log import NAME, AnswersLog
from fedlens.site.client_logs import LOGS, logs_of_run
from fedlens.site.kept_states import KeptStates

_DAY = 86_400.0
_BODIES = ("work", "sent")  # folders with bodies of answers, whose names begin with a digest in the log


@dataclass
class SiteRun:
    """A run in the log of a site: its lines, when it asked last, in seconds since 1970, whom, and digests of bodies."""

    lines: int = 0
    last: float = 0.0
    clients: set[str] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)


def runs_in_log(folder: Path) -> dict[str, SiteRun]:
    """The runs that the log names, also one that has not asked yet, in the order of their first lines."""
    runs: dict[str, SiteRun] = {}
    for line in jsonl.stream(folder / "log" / NAME):
        if "run" not in line:
            continue
        run = runs.setdefault(line["run"], SiteRun())
        run.lines += 1
        if "kind" not in line:
            run.last = line["time"]
            run.clients.add(line["client"])
            run.digests |= {line["ask"], line["answer"], line["payload"]}
    return runs


def purge_due(
    folder: Path, states: KeptStates, log: AnswersLog, days: int, now: float
) -> dict[str, dict[str, int]]:
    """Purges each run whose last ask is more than `days` old. Returns how many files went by folder, if any did."""
    due = {run: known for run, known in runs_in_log(folder).items() if now - known.last > days * _DAY}
    gone = {run: _purge_run(folder, states, log, run, known, asked=False) for run, known in due.items()}
    return {run: files for run, files in gone.items() if files}


def purge_site(folder: Path, days: int, now: float, run: str | None = None) -> dict[str, dict[str, int]]:
    """Purges a run, or without one all that are due; see `purge_due`.

    Raises `IdentityError` while another process, such as `fedlens site start`, uses the folder.
    """
    with one_writer(folder, wait=False):
        states, log = KeptStates(folder / "states"), AnswersLog(folder / "log", folder / "work")
        try:
            if run is None:
                return purge_due(folder, states, log, days, now)
            return {run: _purge_run(folder, states, log, run, runs_in_log(folder)[run], asked=True)}
        finally:
            log.close()


def _purge_run(
    folder: Path, states: KeptStates, log: AnswersLog, run: str, known: SiteRun, asked: bool
) -> dict[str, int]:
    """Returns how many files went, by folder; the log gets a line if any did, or if a person has `asked` for it."""
    before = _sizes(folder)
    try:
        for path in before:
            if path.parent.name in _BODIES and path.name.partition(".")[0] in known.digests:
                path.unlink(missing_ok=True)
        for path in logs_of_run(folder, run).glob("*"):
            path.unlink(missing_ok=True)
        states.purge(run)
    finally:  # also of a purge that is interrupted
        gone = before.keys() - _sizes(folder).keys()
        if gone or asked:
            log.event("purged", run=run, files=len(gone), bytes=sum(before[path] for path in gone))
    return dict(sorted(Counter(path.relative_to(folder).parts[0] for path in gone).items()))


def _sizes(folder: Path) -> dict[Path, int]:
    """The bytes of the files of states, of logs of clients, and of bodies."""
    patterns = ("states/*.safetensors", f"{LOGS}/*/*", *(f"{name}/*" for name in _BODIES))
    return {path: path.stat().st_size for pattern in patterns for path in folder.glob(pattern)}
