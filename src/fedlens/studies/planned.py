"""A run of a study before it starts: its place in the study, and its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedlens.report.study_results import Role, StudyEntry


@dataclass(frozen=True)
class PlannedRun:
    """One run: settings in, one line of results out.

    Attributes:
        settings: those of `Experiment`, as nested tables, complete enough to start from; with its seed.
        key: a short readable name, such as "fedavgm-alpha0.1-lr0.03-seed0".
    """

    method: str
    case: Mapping[str, Any]
    point: Mapping[str, Any]
    role: Role
    seed: int
    settings: Mapping[str, Any]
    key: str

    @cached_property
    def digest(self) -> str:
        """What distinguishes it from other runs: its settings without its name, so that two cells can share a run."""
        settings = {key: value for key, value in self.settings.items() if key != "name"}
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def directory(self) -> str:
        """The name of its directory below `runs/`."""
        return f"{self.key}-{self.digest[:6]}"

    @property
    def entry(self) -> StudyEntry:
        """Its place in the study, as study.json has it."""
        return StudyEntry(
            self.digest, self.directory, self.method, dict(self.case), dict(self.point), self.role, self.seed
        )


@dataclass(frozen=True)
class DueRun:
    """A run that is to be carried out now, up to round `until`; None for all its rounds."""

    run: PlannedRun
    until: int | None = None
