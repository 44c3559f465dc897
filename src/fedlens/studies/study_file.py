"""The schema of a study file, and of the same settings in Python. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import SPLITS
from fedlens.base.setting_errors import explained, refuse_loose
from fedlens.settings.config_source import read_toml
from fedlens.settings.keys import flat
from fedlens.settings.toml_lines import key_lines
from fedlens.studies.grid_settings import (
    Draws,
    FrozenTable,
    Grid,
    Points,
    Range,
    Settings,
    as_in_toml,
    number,
)
from fedlens.studies.places import Places

_OF_SETTINGS = ("set", "grid", "random")  # tables whose keys are settings of runs
_MERGED = ("set", "grid", "random", "cases", "methods", "pretrained", "tune", "stop", "labels")


def given_settings(table: Any, ranges: bool = False) -> Any:
    """Returns settings by dotted key. A table with a name is a component and stays one value.

    Args:
        ranges: whether the innermost tables are values too, as in [random].

    >>> given_settings({"local": {"lr": 0.1}, "data.partition": {"name": "iid", "clients": 4}})
    {'local.lr': 0.1, 'data.partition': {'name': 'iid', 'clients': 4}}
    """

    def whole(value: Mapping[str, Any]) -> bool:
        innermost = not any(isinstance(item, Mapping) for item in value.values())
        return not value or "name" in value or (ranges and innermost)

    return flat(table, whole) if isinstance(table, Mapping) else table


def _named(value: Any) -> Any:
    if isinstance(value, Mapping) and not value:
        raise ValueError("the table must have at least one named table below it")
    if isinstance(value, Mapping) and "" in value:
        raise ValueError("the table must not have a table without a name")
    return value


def _numbers(value: Any) -> Any:
    values = [value] if isinstance(value, int | float) else value
    return [number(item) for item in values] if isinstance(values, list | tuple) else values


def _each_once(value: Any) -> Any:
    if isinstance(value, list | tuple):
        twice = [seed for number, seed in enumerate(value) if seed in value[:number]]
        if twice:
            raise ValueError(f"must not have the seed {twice[0]} twice: the same run would count as two")
    return value


def _by_name(value: Any) -> Any:
    return {name: {} for name in value} if isinstance(value, list | tuple) else value


def _kinds(value: Any) -> Any:
    if isinstance(value, list | tuple):
        for number, item in enumerate(value, 1):
            if isinstance(item, Mapping) and not isinstance(item.get("kind"), str):
                raise ValueError(f'entry {number} must have a kind, such as kind = "summary"')
    return value


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Base = str | dict[str, Any]
Specs = Annotated[list[dict[str, Any]], BeforeValidator(_kinds)]


_StandsFor = Annotated[
    str | None,
    Field(
        description="at a smaller scale: its counterpart at the scale paper, of other data or another model"
    ),
]


class CaseSettings(FrozenTable):
    """A table `[cases.NAME]`: a condition that methods are compared in."""

    base: Base | None = Field(None, description="a recipe or a file instead of the study's")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    stands_for: _StandsFor = None


class MethodSettings(FrozenTable):
    """A table `[methods.NAME]`: a row of the comparison."""

    label: str | None = Field(None, min_length=1, description="its name in tables and figures")
    base: Base | None = Field(None, description="a recipe or a file instead of the study's")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    grid: Grid | None = Field(None, description="every combination of these values of settings")
    random: Draws | None = Field(None, description="points drawn at random, like the table [random]")
    points: Points | None = Field(None, description="a list of points instead of every combination")
    stands_for: _StandsFor = None

    @model_validator(mode="after")
    def _one_way(self) -> MethodSettings:
        if self.points is not None and (self.grid is not None or self.random is not None):
            raise ValueError("the table must have either points, or grid and random")
        return self


class PretrainedSettings(FrozenTable):
    """A table `[pretrained.NAME]`: a run whose final model runs start from, by `model.weights = "pretrained:NAME"`."""

    label: str | None = Field(None, min_length=1, description="its name in the table of pre-trainings")
    base: Base = Field(description="a recipe or a file")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    seed: Seed = Field(0, description="`seed` of the run")
    cases: dict[str, str] = Field(
        default_factory=dict,
        description='weights that take its place in named cases: { cityscapes = "imagenet" }',
    )


class TuneSettings(FrozenTable):
    """The `[tune]` table."""

    on: Literal["validation"] = Field("validation", description="validation data of the training set")
    share: float = Field(
        0.1, gt=0, lt=1, description="`data.validation` of tuning runs, if the base holds out nothing"
    )
    seeds: Annotated[list[Seed], BeforeValidator(_each_once)] | None = Field(
        None,
        min_length=1,
        description="seeds for tuning only; by default the study's seeds",
    )
    budget: int | None = Field(
        None,
        ge=1,
        description="tuning runs of each method in each case. Without `seeds`, a method with fewer points gets more "
        "seeds for each point",
    )
    over: list[str] | None = Field(
        None,
        min_length=1,
        description="the tuned settings; by default those of the methods' grids, and those of [grid] and [random] "
        "outside `data.` and `seeds.`",
    )
    refit: bool = Field(
        True,
        strict=True,
        description="whether final runs train on all training data; false: they hold out the same share",
    )


class StopSettings(FrozenTable):
    """The `[stop]` table."""

    halving: int | None = Field(
        None, ge=2, description="keep one in this many points at each rung, by method and case"
    )
    first: int | None = Field(None, ge=1, description="rounds of the first rung")
    diverged: bool = Field(
        True, strict=True, description="stop a run whose loss diverged; it counts as the worst"
    )

    @model_validator(mode="after")
    def _both(self) -> StopSettings:
        if self.halving is not None and self.first is None:
            raise ValueError("the table must have 'first', the rounds of the first rung, with halving")
        if self.first is not None and self.halving is None:
            raise ValueError("the table must have 'halving' with 'first'")
        return self


class StudySettings(FrozenTable):
    """All settings of a study.

    >>> study = read_study({"base": "digits", "seeds": [0, 1], "grid": {"local.lr": [0.1, 0.3]}}).settings
    >>> study.grid, study.threads
    ({'local.lr': [0.1, 0.3]}, 1)
    """

    name: str = Field(
        "study",
        min_length=1,
        pattern=r"^[^./\\][^/\\]*$",
        description="by default the name of the file",
    )
    title: str = Field("", description="a sentence at the top of the page")
    base: Base = Field(description="a recipe or a TOML file, relative to the study file")
    set: Settings = Field(default_factory=dict, description="settings over the base, for all runs")
    seeds: Annotated[list[Seed], BeforeValidator(_each_once)] = Field(
        [0], min_length=1, description="`seed` of the runs, the same for every method"
    )
    metric: str | None = Field(
        None, min_length=1, description="the compared metric; by default the main metric of the task"
    )
    last: int = Field(1, ge=1, description="the number of evaluations at the end whose mean is a final value")
    target: Annotated[list[float], BeforeValidator(_numbers)] = Field(
        [], description="values of the metric; the results count rounds, batches and bytes to each"
    )
    baseline: str | None = Field(
        None, description="the method that others are compared with; by default the first"
    )
    threads: int = Field(1, ge=1, le=1024, description="threads of a run")
    same_data: bool = Field(True, strict=True, description="refuse methods that differ in data.* or seeds.*")
    labels: dict[str, str] = Field(
        default_factory=dict, description="names of settings in tables and figures"
    )
    grid: Grid | None = Field(None, description="every combination of these values of settings")
    random: Draws | None = Field(None, description="points drawn at random")
    cases: Annotated[dict[str, CaseSettings], BeforeValidator(_named)] | None = Field(
        None, description="named conditions"
    )
    methods: Annotated[dict[str, MethodSettings], BeforeValidator(_named)] | None = Field(
        None, description="the rows, in order"
    )
    pretrained: Annotated[dict[str, PretrainedSettings], BeforeValidator(_named)] | None = Field(
        None, description='pre-trainings, which runs name as model.weights = "pretrained:NAME"'
    )
    analyses: Annotated[dict[str, dict[str, Any]], BeforeValidator(_by_name)] = Field(
        default_factory=dict,
        description="analyses of the final runs: a list of names, or a table of their settings such as "
        '{ "loss-surface" = { count = 200 } }',
    )
    tune: TuneSettings | None = Field(None, description="how each method's point is chosen")
    stop: StopSettings | None = Field(None, description="which runs end early")
    scales: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="smaller versions of the study"
    )
    figures: Specs = Field([], description="figures, each with a kind")
    tables: Specs = Field([], description="tables, each with a kind")
    notes: list[str] = Field([], description="sentences below the results")


_TABLES: Mapping[str, type[BaseModel]] = {
    "": StudySettings, "tune": TuneSettings, "stop": StopSettings
}  # fmt: skip
_NAMED_TABLES: Mapping[str, type[BaseModel]] = {
    "cases": CaseSettings, "methods": MethodSettings, "pretrained": PretrainedSettings
}  # fmt: skip

_REMOVED = {
    "clock": 'remove it, and "hours" of tables and figures: rounds, batches and bytes are counted',
    "keep_recordings": "remove it: 'fedlens analyze RUN --record ROUNDS' makes the recordings of a run again",
    "tune.widen": "remove it: a star in the tables marks a chosen value at the edge of its grid; add values beyond it",
    "tune.search": "remove it: tuning tries the points of [grid], those drawn by [random], or a list of 'points'",
}  # settings of earlier versions, and what to do
_EXAMPLES = {"seeds": "seeds = [0, 1, 2]", "target": "target = [0.5, 0.75]", "over": 'over = ["local.lr"]'}


def _setting_names(key: str) -> list[str]:
    """The settings of a table of the study, such as `methods.fedavg`."""
    first, _, name = key.partition(".")
    if name and (first == "random" or ".random." in key):
        return list(Range.model_fields)
    model = _NAMED_TABLES.get(first) if name else _TABLES.get(first)
    return list(model.model_fields) if model else []


@dataclass(frozen=True)
class StudySource:
    """The checked settings of a study, and the place of each in its file.

    Attributes:
        values: the given settings, with those of the scale applied.
        full: the settings at the scale "paper", or of the study itself.
    """

    settings: StudySettings
    values: Mapping[str, Any]
    full: Mapping[str, Any]
    places: Places

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return Path() if self.places.path is None else self.places.path.parent

    @property
    def paper(self) -> StudySource:
        """The study at the scale "paper". Raises `ConfigError` if a setting of it is wrong."""
        places = Places(self.places.path, "paper", self.places.lines)
        full = {"name": self.settings.name, **self.full}
        return StudySource(_validated(full, places), full, full, places)


def read_study(
    study: str | Path | Mapping[str, Any],
    scale: str | None = None,
    changes: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
) -> StudySource:
    """Returns the checked settings of a study file, or of the same settings in Python.

    Args:
        scale: a table below `scales`; "paper" is the study itself if `scales` has no such table.
        changes: settings over those of the table `set`, by dotted key.
        seeds: instead of those of the study.

    Raises `ConfigError` with file, line and the nearest right name if a setting is wrong, or the scale is unknown.
    """
    path = None if isinstance(study, Mapping) else Path(study)
    given, lines = (as_in_toml(study), {}) if isinstance(study, Mapping) else _read(Path(study))
    values, places = _flattened(given), Places(path, "", lines)
    scales = values.get("scales", {})
    full = values
    if isinstance(scales, Mapping):
        for name, table in scales.items():
            _check_scale(places, str(name), table)
        chosen = _scale(places, scales, scale)
        places = Places(path, chosen, lines)
        full = merged(values, scales.get("paper", {}))
        values = merged(values, scales.get(chosen, {}))
    if path is not None:
        values = {"name": path.stem, **values}
    if changes:
        values = merged(values, {"set": given_settings(changes)})
    if seeds is not None:
        values = {**values, "seeds": list(seeds)}
    settings = _validated(values, places)
    refuse_loose(values, settings, "", places.locate_key, finite=True)
    _refuse_metric(settings, places)
    _refuse_shared_seeds(settings, places)
    _refuse_stand_ins(settings, full, places)
    if settings.stop is not None and settings.stop.halving is not None and settings.tune is None:
        raise ConfigError(
            "stop.halving needs a table [tune], because it chooses among tuned points",
            where=places.locate("stop", "halving"),
            hint="add a table [tune]",
        )
    return StudySource(settings, values, full, places)


def _refuse_removed(values: Mapping[str, Any], places: Places, *above: str) -> None:
    """Raises `ConfigError` for a setting that a study file of an earlier version had."""
    for key, hint in _REMOVED.items():
        table, _, name = key.rpartition(".")
        if isinstance(inner := values.get(table) if table else values, Mapping) and name in inner:
            where = places.locate(*above, *key.split("."))
            raise ConfigError(f"the setting '{key}' was removed", where=where, hint=hint)


def _validated(values: Mapping[str, Any], places: Places) -> StudySettings:
    _refuse_removed(values, places)
    try:
        return StudySettings.model_validate(values)
    except ValidationError as error:
        problem = explained(error, values, "", places.locate_key, _setting_names)
        hint = problem.hint.partition(", or pass --set")[0] if problem.hint else None  # a study has no --set
        key = next((part for part in reversed(error.errors()[0]["loc"]) if part in _EXAMPLES), "")
        if key and re.search(r"must be a list|in it must be", problem.what):
            hint = f"write a list, such as {_EXAMPLES[str(key)]}"
        raise ConfigError(problem.what, where=problem.where, hint=hint) from None


def _refuse_metric(settings: StudySettings, places: Places) -> None:
    """Raises `ConfigError` if the metric is not a column of metrics.jsonl, or has no validation counterpart."""
    metric = settings.metric
    if metric is None:
        return
    split, _, name = metric.partition("_")
    if split not in (*SPLITS, "clients") or not name:
        what, ready = (
            "does not name a split and a value",
            "test_loss" if split in SPLITS else f"test_{metric}",
        )
    elif settings.tune is not None and split not in (
        "test",
        "validation",
        "clients",
    ):  # clients: on what they hold out
        what, ready = "cannot be tuned on validation data", f"test_{name}"
    else:
        return
    raise ConfigError(
        f"'metric' is '{metric}', which {what}", where=places.locate("metric"), hint=f"write '{ready}'"
    )


def _refuse_shared_seeds(settings: StudySettings, places: Places) -> None:
    """Raises `ConfigError` if `tune.seeds` and `seeds` share a seed: it would choose settings and judge them.

    Without `refit`, a tuning run with a seed of the study is also a final run, and the captions name these seeds.
    """
    tune = settings.tune
    if tune is None or tune.seeds is None or not tune.refit:
        return
    shared = [str(seed) for seed in tune.seeds if seed in settings.seeds]
    if shared:
        which = f"the seed {shared[0]} is" if len(shared) == 1 else f"the seeds {', '.join(shared)} are"
        raise ConfigError(
            f"{which} in tune.seeds and in seeds, so the same seed would choose the settings and judge them",
            where=places.locate("tune", "seeds"),
            hint="set other seeds, or remove tune.seeds: the mean over all seeds of the study then chooses",
        )


def _refuse_stand_ins(settings: StudySettings, full: Mapping[str, Any], places: Places) -> None:
    """Raises `ConfigError` if `stands_for` names nothing of the scale "paper", or its own table has such a name."""
    for kind, tables in (("methods", settings.methods), ("cases", settings.cases)):
        names = full.get(kind) or {}
        for name, table in (tables or {}).items():
            target, where = table.stands_for, places.locate(kind, name, "stands_for")
            if target is not None and target not in names:
                what = f"'{name}' stands for '{target}', which is not among the {kind} of the scale paper"
                raise ConfigError(what, where=where, hint=nearest(target, names))
            if target is not None and name in names:
                what = f"'{name}' stands for '{target}', but has a name of the scale paper"
                raise ConfigError(what, where=where, hint="name it after what it runs")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    text, values = read_toml(path, "pass the path of a study file")
    return values, key_lines(text)


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a study, with dotted keys for the settings of runs, in scales too."""
    result = {
        key: given_settings(value, key == "random") if key in _OF_SETTINGS else value
        for key, value in values.items()
    }
    for tables in ("cases", "methods", "pretrained", "scales"):
        named = result.get(tables)
        if isinstance(named, Mapping):
            result[tables] = {
                str(name): _flattened(table) if isinstance(table, Mapping) else table
                for name, table in named.items()
            }
    points = result.get("points")
    if isinstance(points, list | tuple):
        result["points"] = [given_settings(point) for point in points]
    return result


def _check_scale(places: Places, name: str, table: Any) -> None:
    """Raises `ConfigError` for a key of a scale that no study has."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"the scale '{name}' must be a table", where=places.locate("scales", name))
    _refuse_removed(table, places, "scales", name)
    allowed = [*(key for key in StudySettings.model_fields if key not in ("scales", "name")), "data"]
    for key in table:
        if key not in allowed:
            where = places.locate("scales", name, key)
            raise ConfigError(f"unknown setting '{key}' of a scale", where=where, hint=nearest(key, allowed))


def _scale(places: Places, scales: Mapping[str, Any], scale: str | None) -> str:
    if scale is None:
        return "paper" if scales else ""
    names = list(dict.fromkeys([*scales, "paper"]))
    if scale not in names:
        where = None if places.path is None else str(places.path)
        raise ConfigError(f"the study has no scale '{scale}'", where=where, hint=nearest(scale, names))
    return scale


def merged(values: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a study with those of a scale applied; tables are merged key by key.

    >>> merged({"seeds": [0, 1], "set": {"rounds": 9, "local.lr": 1}}, {"seeds": [0], "set": {"rounds": 2}})
    {'seeds': [0], 'set': {'rounds': 2, 'local.lr': 1}}
    """
    result = dict(values)
    for key, value in scale.items():
        before = result.get(key)
        if key == "data":
            continue
        if key in _MERGED and isinstance(value, Mapping) and isinstance(before, Mapping):
            value = {**before, **value}
        result[key] = value
    return result
