"""A run of a study before it starts: its place in the study, and its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedlens.results.rows import Role, Row

Point = Mapping[str, Any]
"""The settings that tuning chooses among, by dotted key."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: settings in, one line of results out.

    Attributes:
        settings: those of `Experiment`, as nested tables, complete enough to start from; with its seed.
        key: a short readable name, such as "fedavgm-alpha0.1-lr0.03-seed0".
        files: SHA-256 of the user's Python files that the settings name, by path (`fedlens.settings.own_files`).
        start: the pre-training that the run starts from. `settings` hold its digest, so the digest of the run depends
            on it; see `fedlens.studies.pretrained`.
        folder: the name of its directory if that is not made of the key and the digest.
    """

    method: str
    case: Mapping[str, Any]
    point: Point
    role: Role
    seed: int
    settings: Mapping[str, Any]
    key: str
    files: Mapping[str, str] = field(default_factory=dict)
    start: PlannedRun | None = None
    folder: str = ""

    @cached_property
    def digest(self) -> str:
        """The identity of the run, without its name, so that two cells can share a run.

        It is a hash of the settings and of the contents of the files that they name.
        """
        settings = {key: value for key, value in self.settings.items() if key != "name"}
        if self.files:
            settings |= {"files": list(self.files.values())}
        # A run of `cost` can have functions among its settings.
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def engine(self) -> Mapping[str, Any]:
        """The table `[engine]` of its settings."""
        engine = self.settings.get("engine", {})
        return engine if isinstance(engine, Mapping) else {"name": engine}

    @property
    def directory(self) -> str:
        """The name of its directory below `runs/`."""
        return self.folder or f"{self.key}-{self.digest[:6]}"

    @property
    def entry(self) -> Row:
        """Its place in the study, as study.json has it."""
        return Row.planned(
            self.digest, self.directory, self.method, dict(self.case), dict(self.point), self.role, self.seed
        )


@dataclass(frozen=True)
class DueRun:
    """A run that must be carried out now, up to round `until`; None for all rounds."""

    run: PlannedRun
    until: int | None = None


def each_once(due: Sequence[DueRun]) -> list[DueRun]:
    """Merges due runs of equal digest, with the largest `until`, in order of their first appearance."""
    by_digest: dict[str, DueRun] = {}
    for one in due:
        other = by_digest.setdefault(one.run.digest, one)
        if other.until is not None and (one.until is None or one.until > other.until):
            by_digest[one.run.digest] = DueRun(other.run, one.until)
    return list(by_digest.values())
