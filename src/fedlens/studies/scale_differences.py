"""Compares a smaller scale of a study with the scale "paper", setting by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

from fedlens.core.parse_text import parse_toml
from fedlens.experiment.config import plain
from fedlens.report.format import many, setting
from fedlens.report.study_captions import shown
from fedlens.report.study_results import EFFECTIVE
from fedlens.studies.cells import StudyCells
from fedlens.studies.expansion import Method
from fedlens.studies.pretrained import PREFIX
from fedlens.studies.reproductions import FOLDER
from fedlens.studies.run_settings import PlacedSetting

NAMES = "names.toml"
_HIDDEN = ("name", "seed", "evaluation.", "record.", "engine.")  # they change no training
_COMPONENTS = ("algorithm", "aggregate", "data.dataset", "data.partition", "model", "select", "task")
_LISTED, _NAMED = 6, 12
_WORDS = {
    "rounds": "rounds",
    "data.dataset.name": "dataset",
    "data.dataset.size": "pixels a side",
    "data.partition.name": "partition",
    "data.partition.clients": "clients",
    "data.partition.size": "images a client",
    "select.clients_per_round": "clients a round",
    "local.epochs": "local epochs",
    "model.name": "model",
    "model.backbone": "backbone",
    "model.weights": "start",
}
_NAMES_OF = {"data.dataset.name": "datasets", "model.name": "models", "model.backbone": "models"}
Values = Mapping[str, Sequence[Any]]


class ChangedSetting(NamedTuple):
    """A setting that differs, with its value at the scale "paper" and here."""

    setting: str
    paper: str
    here: str


def scale_differences(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    """Returns the settings that differ from the scale "paper": one row for all runs, or else one for each method.

    >>> from fedlens.studies.study_plan import StudyPlan
    >>> study = {"base": "digits", "seeds": [0, 1, 2], "set": {"rounds": 10_000}, "grid": {"local.lr": [0.1, 0.2, 0.3]},
    ...          "scales": {"smoke": {"seeds": [0], "set": {"rounds": 2}, "grid": {"local.lr": [0.1]}}}}
    >>> for row in StudyPlan.load(study, "smoke").differences: print(*row, sep=" | ")
    rounds | 10,000 | 2
    local.lr | 0.1, 0.2, 0.3 | 0.1
    seeds | 3 | 1
    """
    labels = {**_WORDS, **paper.settings.labels, **here.settings.labels}
    ours, theirs = both_scales(here, paper)
    rows = _rows(ours, theirs, labels, here, paper)
    alike = [key for key in ours if _equal(ours[key], theirs[key])]
    of_methods: dict[ChangedSetting, list[str]] = {}
    for method, own in method_pairs(here, paper) if len(here.methods) > 1 else ():
        one, other = both_scales(here, paper, [method], [own])
        keys = [key for key in one if key in alike and not _equal(one[key], other[key])]
        used = _all_settings(here, method) | {EFFECTIVE: None} if keys else {}  # others have no effect
        shared = [{key: values[key] for key in keys if key in used} for values in (one, other)]
        for row in _rows(*shared, labels, here, paper):
            of_methods.setdefault(row, []).append(method.label)
    return [
        *sorted(rows, key=lambda row: row.setting not in ("dataset", "model", "start", "rounds")),
        *(row._replace(setting=f"{row.setting}: {_some(names, 2)}") for row, names in of_methods.items()),
        *_counts(here, paper),
        *_left_out(here, paper),
        *_pretraining(here, paper, labels),
        *_tuning(here, paper),
    ]


def both_scales(
    here: StudyCells,
    paper: StudyCells,
    ours: Sequence[Method] | None = None,
    theirs: Sequence[Method] | None = None,
) -> tuple[Values, Values]:
    """The values of each setting that one of both scales gives, over methods, cases and points."""
    runs = _Runs.of(here, ours), _Runs.of(paper, theirs)
    keys = dict.fromkeys(key for each in reversed(runs) for key in each.keys)
    return tuple({key: each.values(key) for key in keys} for each in runs)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Runs:
    """The given settings of runs by dotted key."""

    cells: StudyCells
    first: Method
    given: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, cells: StudyCells, methods: Sequence[Method] | None) -> _Runs:
        runs: list[dict[str, Any]] = []
        for method in methods or cells.methods:
            for case in cells.cases:
                runs.append(dotted(cells.given(method, case)))
                tuned = [(key, value) for key, values in method.tuned.values.items() for value in values]
                runs += [{**runs[-1], key: value} for key, value in tuned]
        return cls(cells, (methods or cells.methods)[0], runs)

    @property
    def keys(self) -> list[str]:
        keys = dict.fromkeys(key for run in self.given for key in run)
        return [key for key in keys if not key.startswith(_HIDDEN)]

    def values(self, key: str) -> list[Any]:
        """The different values; a run that leaves the setting out has the default of the first run."""
        found = {repr(run[key]): run[key] for run in self.given if key in run}
        if not all(key in run for run in self.given):
            default = _all_settings(self.cells, self.first).get(key)
            found |= {} if default is None else {repr(default): default}
        return list(found.values())


def _all_settings(cells: StudyCells, method: Method) -> dict[str, Any]:
    """The settings of the first run of a method with every default, by dotted key."""
    return dotted(plain(cells.made(method, cells.cases[0], cells.points(method)[0], "final").config))


def dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by dotted key; a component that is only named has the key of its name.

    >>> dotted({"model": "mlp", "data": {"dataset": {"name": "digits"}}})
    {'model.name': 'mlp', 'data.dataset.name': 'digits'}
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{before}{key}"
        if isinstance(value, Mapping):
            values |= dotted(value, f"{path}.")
        else:
            values[f"{path}.name" if path in _COMPONENTS else path] = value
    return values


@cache
def spellings() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """The names of datasets, models and starts in labels, from names.toml; the first of each is shown."""
    return parse_toml((FOLDER / NAMES).read_text(encoding="utf-8"))


def shown_names(key: str, values: Sequence[Any], cells: StudyCells) -> list[str]:
    """The different values of a setting as tables and captions show them."""
    return list(dict.fromkeys(_shown(key, value, cells) for value in values))


def _shown(key: str, value: Any, cells: StudyCells) -> str:
    if key == "model.weights":
        return start_name(str(value), cells)
    if key in _NAMES_OF:
        return spellings()[_NAMES_OF[key]].get(str(value), [str(value)])[0]
    return f"{value:,}" if type(value) is int else shown(value)


def start_name(weights: str, cells: StudyCells) -> str:
    """Initial weights in words: the label of a pre-training, or the name of a file."""
    table = (cells.settings.pretrained or {}).get(weights.removeprefix(PREFIX))
    if table is not None:
        return table.label or weights.removeprefix(PREFIX)
    path = PurePath(weights)
    return spellings()["starts"].get(path.name, [f"weights {path.stem}"])[0]


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return {*map(repr, one)} == {*map(repr, other)}


def _rows(
    ours: Values, theirs: Values, labels: Mapping[str, str], here: StudyCells, paper: StudyCells, of: str = ""
) -> list[ChangedSetting]:
    rows = []
    for key in dict.fromkeys([*theirs, *ours]):
        if not _equal(ours.get(key, []), theirs.get(key, [])):
            texts = (
                shown_names(key, values.get(key, []), cells)
                for values, cells in ((theirs, paper), (ours, here))
            )
            rows.append(ChangedSetting(of + labels.get(key, key), *(_some(each, _LISTED) for each in texts)))
    return rows


def _some(texts: Sequence[str], most: int) -> str:
    """Texts in a cell, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ("; " if any("," in text for text in texts) else ", ").join(texts[:most]) + more or "not set"


def method_pairs(here: StudyCells, paper: StudyCells) -> list[tuple[Method, Method]]:
    """The methods here with their counterparts."""
    theirs = {method.name: method for method in paper.methods}
    return [(method, theirs[method.own]) for method in here.methods if method.own in theirs]


def _counts(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    numbers = {
        "seeds": [len(cells.seeds) for cells in (paper, here)],
        "evaluations that a value is the mean of": [cells.settings.last for cells in (paper, here)],
    }
    return [ChangedSetting(name, *map(str, pair)) for name, pair in numbers.items() if pair[0] != pair[1]]


def _left_out(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    """What each stand-in stands for, and the methods and named cases that do not run."""
    rows = []
    for kind in ("method", "case"):
        (ours, names), (_, theirs) = (_labels(cells, kind) for cells in (here, paper))
        rows += [
            ChangedSetting(kind, theirs[own], names[name])
            for name, own in ours.items()
            if own in theirs and own != name
        ]
        absent = [label for name, label in theirs.items() if name not in ours.values()]
        if absent:
            rows.append(ChangedSetting(many(len(absent), kind), _some(absent, _NAMED), "not run"))
    return rows


def _labels(cells: StudyCells, kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """By name, the counterpart and the label of the methods, or of the named cases, of a scale."""
    if kind == "method":
        return {m.name: m.own for m in cells.methods}, {m.name: m.label for m in cells.methods}
    tables = cells.settings.cases or {}
    return {name: table.stands_for or name for name, table in tables.items()}, {name: name for name in tables}


def _pretraining(here: StudyCells, paper: StudyCells, labels: Mapping[str, str]) -> list[ChangedSetting]:
    rows = []
    theirs = paper.settings.pretrained or {}
    for name, table in (here.settings.pretrained or {}).items():
        label = f"pre-training {table.label or name}"
        if name not in theirs:
            rows.append(ChangedSetting(label, "none", setting(table.base)))
            continue
        values: list[Values] = []
        for cells, each in ((here, table), (paper, theirs[name])):
            placed = [PlacedSetting(key, value, "") for key, value in each.set.items()]
            given = dotted(cells.reader.given(each.base, "", placed))
            values.append({key: [value] for key, value in given.items() if not key.startswith(_HIDDEN)})
        rows += _rows(values[0], values[1], labels, here, paper, f"{label}: ")
    return rows


def _tuning(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    ours, theirs = ({} if cells.tune is None else cells.tune.model_dump() for cells in (here, paper))
    keys = [key for key in (theirs or ours) if ours.get(key) != theirs.get(key)]
    if not ours or not theirs:
        return (
            [ChangedSetting("tuning", *("yes" if each else "no" for each in (theirs, ours)))] if keys else []
        )
    return [ChangedSetting(f"tuning: {key}", setting(theirs[key]), setting(ours[key])) for key in keys]
