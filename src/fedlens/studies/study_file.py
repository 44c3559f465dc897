"""Reads a study file, or the same settings in Python. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import SPLITS
from fedlens.base.setting_errors import explained, refuse_loose
from fedlens.settings.config_source import read_toml
from fedlens.settings.keys import flat
from fedlens.settings.toml_lines import key_lines
from fedlens.studies.study_settings import (
    CaseSettings,
    MethodSettings,
    PretrainedSettings,
    Range,
    StopSettings,
    StudySettings,
    TuneSettings,
)

_OF_SETTINGS = ("set", "grid", "random")  # tables whose keys are settings of runs
_MERGED = ("set", "grid", "random", "cases", "methods", "pretrained", "tune", "stop", "labels")


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
class Places:
    """Where the settings of a study stand: the file, the scale, and the lines by key.

    Attributes:
        changed: the keys of [set] that `--set` has given.
    """

    path: Path | None = None
    scale: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    changed: Sequence[str] = ()

    def locate(self, *keys: str | int) -> str:
        """Returns the place of a key for error messages: the file, the line, the table and the key.

        >>> places = Places(Path("study.toml"), lines={"grid": 4, "grid.local.lr": 5})
        >>> places.locate("grid", "local.lr"), places.locate("grid", "rounds")
        ('study.toml, line 5: [grid] local.lr', 'study.toml, line 4: [grid] rounds')
        """
        parts = [str(key) for key in keys]
        if parts[0] == "set" and parts[-1] in self.changed:
            return f"--set {parts[-1]}"
        shown = parts[-1] if len(parts) == 1 else f"[{'.'.join(parts[:-1])}] {parts[-1]}"
        if self.path is None:
            return shown
        in_scale = self.lines.get(".".join(["scales", self.scale, *parts])) if self.scale else None
        lines = (self.lines.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
        line = in_scale or next((line for line in lines if line is not None), None)
        return f"{self.path}, line {line}: {shown}" if line else f"{self.path}: {shown}"

    def locate_listed(self, kind: str, number: int | None, key: str = "") -> str:
        """The same for a key of a list of tables, counted from 0; None for no table of it.

        >>> Places(Path("study.toml"), lines={"tables.0.document": 9}).locate_listed("tables", 0, "document")
        'study.toml, line 9: [[tables]] 1 document'
        """
        parts = [kind, *([] if number is None else [str(number)]), *filter(None, key.split("."))]
        place = self.locate(*parts)
        shown = f"[[{kind}]]" + ("" if number is None else f" {number + 1}") + (f" {key}" if key else "")
        return f"{place.rpartition(': ')[0]}: {shown}" if ": " in place else shown

    def locate_key(self, key: str) -> str:
        """The same for a key such as `methods.fedavg.set`."""
        table = next((name for name in ("grid.", "random.", "set.") if f".{name}" in f".{key}"), None)
        if table:  # what follows is a dotted setting
            before, _, setting = f".{key}".partition(f".{table}")
            return self.locate(*filter(None, before.split(".")), table[:-1], setting)
        return self.locate(*key.rsplit(".", 1)) if "." in key else self.locate(key)


@dataclass(frozen=True)
class StudySource:
    """The checked settings of a study, and the place of each in its file.

    Attributes:
        values: the given settings, with those of the scale applied.
        given: the same without those of the scale applied.
        full: the settings at the scale "paper", or of the study itself.
    """

    settings: StudySettings
    values: Mapping[str, Any]
    full: Mapping[str, Any]
    places: Places
    given: Mapping[str, Any] = field(default_factory=dict)

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
    read, lines = (as_in_toml(study), {}) if isinstance(study, Mapping) else _read(Path(study))
    values, places = _flattened(read), Places(path, "", lines)
    scales, full = values.get("scales", {}), values
    changed = given_settings(changes or {})
    replaced = ({"set": changed} if changed else {}) | ({} if seeds is None else {"seeds": list(seeds)})
    if isinstance(scales, Mapping):
        for name, table in scales.items():
            _check_scale(places, str(name), table)
        chosen = _scale(places, scales, scale)
        full = merged(values, scales.get("paper", {}))
        if replaced and chosen:
            scales = {**scales, chosen: merged(scales.get(chosen, {}), replaced)}
            replaced = {"scales": scales}
        places, values = Places(path, chosen, lines, [*changed]), merged(values, replaced)
    if path is not None:
        values = {"name": path.stem, **values}
    given = values
    if isinstance(scales, Mapping):
        values = merged(values, scales.get(places.scale, {}))
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
    return StudySource(settings, values, full, places, given)


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
            hint="set other seeds, or remove tune.seeds: tuning then takes seeds that the results do not use",
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


def as_in_toml(value: Any) -> Any:
    """A value of Python as TOML would have it: lists for ranges, tuples, sets and arrays, numbers for those of NumPy.

    >>> import numpy as np
    >>> as_in_toml({"seeds": range(2), "grid": {"local.lr": np.array([0.1, 0.3])}, "base": Path("my.toml")})
    {'seeds': [0, 1], 'grid': {'local.lr': [0.1, 0.3]}, 'base': 'my.toml'}
    """
    import numpy as np  # `reproduce --list` imports this module, and no study

    if isinstance(value, Mapping):
        return {key: as_in_toml(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [as_in_toml(item) for item in value]
    if isinstance(value, set | frozenset):
        return [as_in_toml(item) for item in sorted(value)]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
