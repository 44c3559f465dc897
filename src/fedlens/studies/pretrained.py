"""The pre-trainings of a study: runs whose final model other runs of the study start from.

A run names one by `model.weights = "pretrained:NAME"`. Its planned settings have the digest of the pre-training in
place of the name, so its own digest depends on the settings of the pre-training, and on no path. When the run is
carried out, the run directory of the pre-training takes this place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.models.weights_setting import NONE, RUN
from fedlens.results.rows import Row
from fedlens.studies.planned import DueRun, PlannedRun, each_once

PREFIX = "pretrained:"


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
