"""A run of a study before it starts: its place in the study, its settings, and the pre-training that it starts from.

A run names a pre-training of its study by `model.weights = "pretrained:NAME"`. Its planned settings have the digest of
the pre-training in place of the name, so its own digest depends on the settings of the pre-training, and on no path.
When the run is carried out, the run directory of the pre-training takes this place.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.models.weights_setting import NONE, RUN
from fedlens.results.rows import Role, Row

PREFIX = "pretrained:"
Point = Mapping[str, Any]
"""The settings that tuning chooses among, by dotted key."""


def settings_text(settings: Any) -> str:
    """A text that is equal for equal settings; a run of `cost` can have functions among them."""
    return json.dumps(settings, sort_keys=True, separators=(",", ":"), default=repr)


@dataclass(frozen=True)
class PlannedRun:
    """One run: settings in, one line of results out.

    Attributes:
        settings: those of `Experiment`, as nested tables, complete enough to start from; with its seed.
        key: a short readable name, such as "fedavgm-alpha0.1-lr0.03-seed0".
        files: SHA-256 of the user's Python files that the settings name, by path (`fedlens.settings.own_files`).
        start: the pre-training that the run starts from. `settings` hold its digest, so the digest of the run depends
            on it.
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
        return hashlib.sha256(settings_text(settings).encode()).hexdigest()[:16]

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


def pretrained_weights(weights: Any, starts: Mapping[str, PlannedRun], place: str) -> PlannedRun | None:
    """The pre-training that `model.weights` names; None for other weights.

    Raises `ConfigError` with the nearest name if the study has no such pre-training.
    """
    if not isinstance(weights, str) or not weights.startswith(PREFIX):
        return None
    name = weights.removeprefix(PREFIX)
    if name not in starts:
        names = [f"{PREFIX}{known}" for known in starts]
        hint = nearest(weights, names) if names else f"add a table [pretrained.{name}]"
        raise ConfigError(f"the study has no pre-training '{name}'", where=place, hint=hint)
    return starts[name]


def planned_weights(start: PlannedRun) -> str:
    """What stands in planned settings for the weights of a pre-training."""
    return f"{RUN}{PREFIX}{start.digest}"


def settings_in(run: PlannedRun, runs: Path) -> Mapping[str, Any]:
    """The settings of a run with the weights of its pre-training in the folder `runs`; without one, as planned."""
    if run.start is None:
        return run.settings
    return _with_weights(run, f"{RUN}{(runs / run.start.directory).absolute()}")


def settings_without_start(run: PlannedRun) -> Mapping[str, Any]:
    """The settings of a run that starts at random instead of from its pre-training, to measure its cost."""
    return run.settings if run.start is None else _with_weights(run, NONE)


def _with_weights(run: PlannedRun, weights: str) -> dict[str, Any]:
    settings = copy.deepcopy(dict(run.settings))
    settings["model"]["weights"] = weights
    return settings


def after_pretraining(wanted: list[DueRun], lines: Mapping[str, Row]) -> list[DueRun]:
    """The due runs among the wanted ones: a run waits for its pre-training, which is due in its place."""
    due: list[DueRun] = []
    for one in wanted:
        line = None if one.run.start is None else lines.get(one.run.start.digest)
        waits = one.run.start is not None and (line is None or line.status == "stopped")
        due.append(DueRun(one.run.start) if waits and one.run.start is not None else one)
    return sorted(each_once(due), key=lambda one: one.run.role != "pretrain")


def pretraining_problem(run: PlannedRun, lines: Mapping[str, Row]) -> str | None:
    """Why a run cannot start: its pre-training failed or collapsed. None if it can."""
    line = None if run.start is None else lines.get(run.start.digest)
    if line is None or line.status != "failed" or run.start is None:
        return None
    return f"its pre-training '{run.start.method}' failed: {line.reason or 'no reason is known'}"
