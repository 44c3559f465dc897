"""Compares a smaller scale of a study with the scale "paper": setting by setting, and in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

from fedlens.base.format import many, setting
from fedlens.base.parse_text import parse_toml
from fedlens.base.summary_text import conjoined
from fedlens.results.cells import is_number
from fedlens.results.rows import EFFECTIVE
from fedlens.results.words import shown
from fedlens.settings.config import plain
from fedlens.settings.keys import changes, diff, flat
from fedlens.studies.cells import StudyCells
from fedlens.studies.expansion import Method
from fedlens.studies.planned import PREFIX
from fedlens.studies.reproductions import FOLDER
from fedlens.studies.run_settings import PlacedSetting
from fedlens.studies.study_settings import PretrainedSettings

NAMES = "names.toml"
_COMPONENTS = ("algorithm", "aggregate", "data.dataset", "data.partition", "model", "select", "task")
_NAMED = 12
_LAST = "evaluations that a value is the mean of"
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
    whole = both_scales(here, paper)
    changed = changed_keys(*whole)
    rows = [_row(key, *whole, labels) for key in changed]
    counts = diff(*({"seeds": len(cells.seeds), _LAST: cells.settings.last} for cells in (paper, here)))
    of_methods: dict[ChangedSetting, list[str]] = {}
    for method, own in method_pairs(here, paper) if len(here.methods) > 1 else ():
        both = whole if own is None else both_scales(here, paper, [method], [own])
        keys = [key for key in changed_keys(*both) if key not in changed]
        used = {EFFECTIVE, *_all_settings(here, method)} if keys else set()  # others have no effect
        for key in [key for key in keys if key in used]:
            of_methods.setdefault(_row(key, *both, labels), []).append(method.label)
    return [
        *sorted(rows, key=lambda row: row.setting not in ("dataset", "model", "start", "rounds")),
        *(row._replace(setting=f"{row.setting}: {_some(names, 2)}") for row, names in of_methods.items()),
        *(ChangedSetting(name, str(theirs), str(ours)) for name, theirs, ours in counts),
        *_left_out(here, paper),
        *_pretraining(here, paper, labels),
        *_tuning(here, paper),
    ]


class ScaleValues(NamedTuple):
    """The different values of settings at a scale, by dotted key."""

    cells: StudyCells
    values: Mapping[str, Sequence[Any]]

    def shown(self, key: str) -> list[str]:
        """The values of a setting, as tables and captions show them, numbers in rising order."""
        values = self.values.get(key, [])
        ordered = sorted(values) if all(map(is_number, values)) else values
        return [*dict.fromkeys(_shown(key, value, self.cells) for value in ordered)]


def changed_keys(paper: ScaleValues, here: ScaleValues) -> list[str]:
    """The settings that differ."""
    both = ({key: {*map(repr, values)} for key, values in each.values.items()} for each in (paper, here))
    return [key for key, _, _ in diff(*both)]


def _row(
    key: str, paper: ScaleValues, here: ScaleValues, labels: Mapping[str, str], of: str = ""
) -> ChangedSetting:
    texts = (_some(each.shown(key), _NAMED) for each in (paper, here))
    return ChangedSetting(of + labels.get(key, key), *texts)


def both_scales(
    here: StudyCells,
    paper: StudyCells,
    ours: Sequence[Method] | None = None,
    theirs: Sequence[Method] | None = None,
) -> tuple[ScaleValues, ScaleValues]:
    """At both scales, the values of each setting that one of them gives, over methods, cases and points."""
    parts = [(paper, theirs or paper.methods), (here, ours or here.methods)]
    runs = [_runs(*part) for part in parts]
    given = dict.fromkeys(key for each in runs for run in each for key in run if changes(key, "readers"))
    one, other = (
        ScaleValues(cells, {key: _values(each, key, cells, methods[0]) for key in given})
        for each, (cells, methods) in zip(runs, parts, strict=True)
    )
    return one, other


def _runs(cells: StudyCells, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The given settings of the runs of some methods, for each case and each value that tuning tries."""
    runs: list[dict[str, Any]] = []
    for method in methods:
        for case in cells.cases:
            runs.append(dotted(cells.given(method, case)))
            tuned = [(key, value) for key, values in method.tuned.values.items() for value in values]
            runs += [{**runs[-1], key: value} for key, value in tuned]
    return runs


def _values(runs: Sequence[Mapping[str, Any]], key: str, cells: StudyCells, first: Method) -> list[Any]:
    """The different values of a setting; a run that leaves it out has the default of the first method."""
    found = {repr(run[key]): run[key] for run in runs if key in run}
    default = None if all(key in run for run in runs) else _all_settings(cells, first).get(key)
    return list((found | ({} if default is None else {repr(default): default})).values())


def _all_settings(cells: StudyCells, method: Method) -> dict[str, Any]:
    """The settings of the first run of a method with every default, by dotted key."""
    return dotted(plain(cells.made(method, cells.cases[0], cells.points(method)[0], "final").config))


def dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key; a component that is only named has the key of its name.

    >>> dotted({"model": "mlp", "data": {"dataset": {"name": "digits"}}})
    {'model.name': 'mlp', 'data.dataset.name': 'digits'}
    """
    return {f"{key}.name" if key in _COMPONENTS else key: value for key, value in flat(table).items()}


@cache
def spellings() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """The names of datasets, models and starts in labels, from names.toml; the first of each is shown."""
    return parse_toml((FOLDER / NAMES).read_text(encoding="utf-8"))


def _shown(key: str, value: Any, cells: StudyCells) -> str:
    if key == "model.weights":  # the label of a pre-training, or the name of a file
        name, path = str(value).removeprefix(PREFIX), PurePath(str(value))
        table = (cells.settings.pretrained or {}).get(name)
        return (
            table.label or name
            if table
            else spellings()["starts"].get(path.name, [f"weights {path.stem}"])[0]
        )
    if key in _NAMES_OF:
        return spellings()[_NAMES_OF[key]].get(str(value), [str(value)])[0]
    return f"{value:,}" if type(value) is int else shown(value)


def _some(texts: Sequence[str], most: int) -> str:
    """Texts in a cell, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ("; " if any("," in text for text in texts) else ", ").join(texts[:most]) + more or "not set"


def method_pairs(here: StudyCells, paper: StudyCells) -> list[tuple[Method, Method | None]]:
    """The methods here with their counterparts; None for one that the paper does not have."""
    theirs = {method.name: method for method in paper.methods}
    return [(method, theirs.get(method.own)) for method in here.methods]


def _left_out(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    """What each stand-in stands for, and the methods and named cases that do not run."""
    rows = []
    for kind in ("method", "case"):
        ours, theirs = _labels(here, kind), _labels(paper, kind)
        others = [(own, label) for name, (own, label) in ours.items() if own in theirs and own != name]
        rows += [ChangedSetting(kind, theirs[own][1], label) for own, label in others]
        run = {own for own, _ in ours.values()}
        if absent := [label for name, (_, label) in theirs.items() if name not in run]:
            rows.append(ChangedSetting(many(len(absent), kind), _some(absent, _NAMED), "not run"))
    return rows


def _labels(cells: StudyCells, kind: str) -> dict[str, tuple[str, str]]:
    """By name, the counterpart and the label of the methods, or of the named cases, of a scale."""
    if kind == "method":
        return {method.name: (method.own, method.label) for method in cells.methods}
    return {name: (case.stands_for or name, name) for name, case in (cells.settings.cases or {}).items()}


def _pretraining(here: StudyCells, paper: StudyCells, labels: Mapping[str, str]) -> list[ChangedSetting]:
    rows, theirs = [], paper.settings.pretrained or {}
    for name, table in (here.settings.pretrained or {}).items():
        label = f"pre-training {table.label or name}"
        if name in theirs:
            both = _of_pretraining(paper, theirs[name]), _of_pretraining(here, table)
            rows += [_row(key, *both, labels, f"{label}: ") for key in changed_keys(*both)]
        else:
            rows.append(ChangedSetting(label, "none", setting(table.base)))
    return rows


def _of_pretraining(cells: StudyCells, table: PretrainedSettings) -> ScaleValues:
    placed = [PlacedSetting(key, value, "") for key, value in table.set.items()]
    given = dotted(cells.reader.given(table.base, "", placed))
    return ScaleValues(cells, {key: [value] for key, value in given.items() if changes(key, "readers")})


def _tuning(here: StudyCells, paper: StudyCells) -> list[ChangedSetting]:
    theirs, ours = ({} if cells.tune is None else cells.tune.model_dump() for cells in (paper, here))
    if not theirs or not ours:
        words = ["yes" if each else "no" for each in (theirs, ours)]
        return [ChangedSetting("tuning", *words)] if theirs or ours else []
    return [ChangedSetting(f"tuning: {key}", setting(a), setting(b)) for key, a, b in diff(theirs, ours)]


_NUMBERS = ("no", "one", "two", "three", "four", "five")
_STAND_INS = ("data.dataset.name", "model.name", "model.backbone", "model.weights")
_MOST = 4  # names in a row


def caveats(here: StudyCells, paper: StudyCells, scale: str, trains: bool) -> list[str]:
    """Sentences on the rounds of a smaller scale, and on the datasets, models and starts that stand in for others.

    Args:
        trains: whether the study has runs; otherwise only its datasets count.
    """
    compared = [
        both_scales(here, paper, [method], [own] if own else None)
        for method, own in method_pairs(here, paper)
    ]
    parts = []
    for key in _STAND_INS if trains else _STAND_INS[:1]:
        new, replaced = list[str](), list[str]()
        for theirs, ours in ([each.shown(key) for each in both] for both in compared):
            if others := [name for name in ours if name not in theirs]:
                new += others
                replaced += [name for name in theirs if name not in ours] or theirs or ["none"]
        if new:
            parts.append(f"{_names(new)} for {_names(replaced)}")
    most, fewer = (max(each.values.get("rounds", [0])) if trains else 0 for each in both_scales(here, paper))
    sentences = [few_rounds(scale, fewer, most), f"Stand-ins: {'; '.join(parts)}." if parts else ""]
    return [sentence for sentence in sentences if sentence]


def _names(names: Sequence[str]) -> str:
    """Different names in a sentence, at most four; one with a comma in quotes."""
    shown = [f'"{name}"' if "," in name else name for name in dict.fromkeys(names)]
    return conjoined([*shown[:_MOST], *([f"{len(shown) - _MOST} more"] if len(shown) > _MOST else [])])


def few_rounds(scale: str, rounds: int, paper: int) -> str:
    """A sentence on a number of rounds below that of the paper; else empty.

    >>> few_rounds("smoke", 2, 4000), few_rounds("laptop", 120, 10_000), few_rounds("laptop", 80, 80)
    ('Two rounds, nothing learned.', "At most 120 rounds, not the paper's 10,000.", '')
    """
    if rounds >= paper:
        return ""
    if scale == "smoke" and rounds < len(_NUMBERS):
        return f"{_NUMBERS[rounds].capitalize()} round{'s' if rounds > 1 else ''}, nothing learned."
    return f"At most {many(rounds, 'round')}, not the paper's {paper:,}."
