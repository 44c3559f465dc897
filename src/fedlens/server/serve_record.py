"""What a run directory keeps of `fedlens serve` in `serve.json`, and the run that a server resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.core.wire.terms import DEFAULT_DAYS, ExperimentTerms
from fedlens.files.atomic_files import sweep, write_atomically
from fedlens.files.text_files import read_json
from fedlens.run.rundir import RunDir, new_run_id


@dataclass(frozen=True)
class ServeRecord:
    """The identity of a run of sites, which is on the disk before the first site is told of the run.

    Attributes:
        run: the id in signed messages, and the name of the directory unless the user names another.
        attempt: how often the run was started. A site answers one ask under the same `Id` and attempt.
        experiment: SHA-256 of the settings as the user wrote them, in hexadecimal.
        root: SHA-256 of the federation's root certificate, in hexadecimal.
        contract: the settings that the sites approve, as TOML. They stay, whatever later versions would write.
        until, agreement, keep_days: those of `ExperimentTerms`.
    """

    run: str
    attempt: int
    experiment: str
    root: str
    contract: str
    until: str | None = None
    agreement: str | None = None
    keep_days: int = DEFAULT_DAYS

    @property
    def terms(self) -> ExperimentTerms:
        """What the sites approve beside the contract, without the sites."""
        return ExperimentTerms(self.until, self.agreement, keep_days=self.keep_days)

    @classmethod
    def new(cls, settings: Mapping[str, Any], root: bytes, contract: str) -> ServeRecord:
        """The record of a run that was not started yet, of these settings and this root (DER)."""
        return cls(new_run_id(), 0, digest_of(settings), hashlib.sha256(root).hexdigest(), contract)

    @property
    def digest(self) -> str:
        """SHA-256 of the contract, in hexadecimal."""
        return hashlib.sha256(self.contract.encode()).hexdigest()

    def with_terms(self, other: ServeRecord) -> ServeRecord:
        """The record with the terms that another one has; the sites have to approve what is new in them."""
        until, agreement = other.until or self.until, other.agreement or self.agreement
        return replace(self, until=until, agreement=agreement, keep_days=other.keep_days)

    def same(self, other: ServeRecord) -> bool:
        """Whether both are of the same experiment in the same federation."""
        return (self.experiment, self.root) == (other.experiment, other.root)

    @classmethod
    def read(cls, run: RunDir) -> ServeRecord | None:
        """The record in a run directory, None if a server never had it. Raises `RunDirectoryError` if it is damaged."""
        content = read_json(run.serve_path)
        if content is None:
            return None
        # Runs of earlier versions have no terms.
        given = {"until": None, "agreement": None, "keep_days": DEFAULT_DAYS, **content}
        kinds: dict[str, tuple[type, ...]] = {
            each.name: (int,) if each.name in ("attempt", "keep_days") else (str,) for each in fields(cls)
        }
        kinds |= {name: (str, type(None)) for name in ("until", "agreement")}
        if given.keys() != kinds.keys() or not all(type(given[n]) in kind for n, kind in kinds.items()):
            raise RunDirectoryError(
                "serve.json is damaged", where=str(run.serve_path), hint="copy it again, or start a new run"
            )
        return cls(**given)

    def started(self, run: RunDir) -> ServeRecord:
        """The record with one attempt more, written to the disk."""
        record = replace(self, attempt=self.attempt + 1)
        write_atomically(run.serve_path, (json.dumps(asdict(record), indent=1) + "\n").encode())
        return record


def digest_of(settings: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal of settings as they were written, without defaults, which differ among versions.

    >>> digest_of({"seed": 1, "name": "a"}) == digest_of({"name": "a", "seed": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def run_to_serve(out: Path | None, name: str, new: ServeRecord) -> tuple[RunDir, ServeRecord]:
    """The directory of the unfinished run of this experiment, or a new one, with its record.

    Args:
        out: the directory that the user named; without it the runs in `runs/<name>/` are looked at, the latest first.
        name: the name of the experiment.
        new: the record of a new run.

    Raises `RunDirectoryError` if `out` is not empty, or has a run of another experiment or federation whose roster is
    frozen.
    """
    if out is not None and (kept := ServeRecord.read(run := RunDir(out.expanduser()))) is not None:
        if not kept.same(new) and not run.roster_path.exists():
            return run, new  # no site had a part in it
        if not kept.same(new):
            other = "federation" if kept.root != new.root else "experiment"
            raise RunDirectoryError(
                f"the directory contains a run of another {other}",
                where=str(out),
                hint="name another directory with --out, or undo the change of the settings",
            )
        return run, kept.with_terms(new)
    if out is None:
        for path in sorted((Path("runs") / name).glob("*/serve.json"), reverse=True):
            run = RunDir(path.parent)
            kept = ServeRecord.read(run)
            if kept is not None and kept.same(new) and not _finished(run):
                return run, kept.with_terms(new)
    return RunDir.create(out, name, new.run), new


def _finished(run: RunDir) -> bool:
    summary = run.read_summary() or {}
    return summary.get("status") == "finished" or not summary.keys().isdisjoint(("purged", "superseded"))


def is_begun(run: RunDir) -> bool:
    """Whether a run has its settings, so that it is resumed; removes what a server that was killed before left."""
    if run.config_path.exists():
        return True
    sweep(run.path)
    with suppress(FileNotFoundError):  # it is written before the settings
        run.environment_path.unlink()
    return False
