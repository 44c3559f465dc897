"""Describes how a smaller scale of a study differs from the full one, from the settings of both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from fedlens.core.errors import FedlensError
from fedlens.experiment.config_source import read_source
from fedlens.report.format import setting
from fedlens.report.study_results import EFFECTIVE
from fedlens.studies.study_file import StudySource

_HIDDEN = {"evaluation.every", "evaluation.train"}  # they change what is drawn, not what is trained
_LISTED = 6
_WORDS = {  # of settings, with {} for a value
    "rounds": "{} rounds",
    "data.partition.size": "{} images a client",
    "data.dataset.size": "images of {} pixels a side",
    "data.partition.clients": "{} clients",
    "select.clients_per_round": "{} clients a round",
    "local.epochs": "{} local epochs",
    "model.name": "the model {}",
}
_ABSENT = {"data.partition.size": "all images divided evenly"}


def scale_differences(source: StudySource) -> list[str]:
    """Returns the differences from the scale "paper", one sentence each; empty at that scale.

    >>> from fedlens.studies.study_file import read_study
    >>> study = {"base": "digits", "seeds": [0, 1, 2], "set": {"rounds": 10_000}, "grid": {"local.lr": [0.1, 0.2, 0.3]},
    ...          "scales": {"smoke": {"seeds": [0], "set": {"rounds": 2}, "grid": {"local.lr": [0.1]}}}}
    >>> for sentence in scale_differences(read_study(study, "smoke")): print(sentence)
    2 rounds instead of 10,000
    1 seed instead of 3
    local.lr: 1 value (0.1) instead of 3
    """
    if source.places.scale in ("", "paper"):
        return []
    here, full = source.values, source.full
    labels = {**_table(full, "labels"), **_table(here, "labels")}
    base = _base_settings(here.get("base"), source)
    return [
        *_settings(_table(here, "set"), _table(full, "set"), base, labels),
        *_counts(here, full),
        *_grids(_table(here, "grid"), _table(full, "grid"), labels),
        *_cases(_table(here, "cases"), _table(full, "cases"), source, base, labels),
        *_methods(_table(here, "methods"), _table(full, "methods"), labels),
        *_pretraining(_table(here, "pretrained"), _table(full, "pretrained"), source, labels),
        *_tuning(_table(here, "tune"), _table(full, "tune")),
    ]


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _base_settings(base: Any, source: StudySource) -> dict[str, Any]:
    """The settings of a base by dotted key; empty if it cannot be read."""
    if isinstance(base, Mapping):
        return _dotted(base)
    beside = source.folder / str(base)
    try:
        return _dotted(read_source(str(beside if beside.is_file() else base)).values)
    except FedlensError:
        return {}


def _dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= (
            _dotted(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
        )
    return values


def _settings(
    here: Mapping[str, Any], full: Mapping[str, Any], base: Mapping[str, Any], labels: Mapping[str, str]
) -> list[str]:
    """The settings that differ between two tables `set` over one base."""
    sentences = []
    for key in dict.fromkeys([*full, *here]):
        ours, theirs = (values.get(key, base.get(key, _component(base, key))) for values in (here, full))
        if ours != theirs and key not in _HIDDEN and not key.startswith("record."):
            sentences.append(_instead(key, ours, theirs, labels))
    return sentences


def _component(base: Mapping[str, Any], key: str) -> Any:
    """The table of a base by its key, such as that of its dataset; None if it has none."""
    inner = {
        name.removeprefix(f"{key}."): value for name, value in base.items() if name.startswith(f"{key}.")
    }
    return inner or None


def _instead(key: str, ours: Any, theirs: Any, labels: Mapping[str, str]) -> str:
    words, absent = _WORDS.get(key), _ABSENT.get(key, "the default")
    if words is None or ours is None:
        shown = labels.get(key, key)
        return f"{shown} = {_value(ours, absent)} instead of {_value(theirs, absent)}"
    text = words.format(_value(ours, absent))
    if ours == 1:
        text = re.sub(r"s\b", "", text, count=1)
    return f"{text} instead of {_value(theirs, absent)}"


def _value(value: Any, absent: str) -> str:
    return absent if value is None else f"{value:,}" if type(value) is int else setting(value)


def _counts(here: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    sentences = []
    ours, theirs = (len(values.get("seeds", [0])) for values in (here, full))
    if ours != theirs:
        sentences.append(f"{_many(ours, 'seed')} instead of {theirs}")
    if here.get("last", 1) != full.get("last", 1):
        sentences.append(
            f"a value is the mean of {here.get('last', 1)} evaluations instead of {full.get('last', 1)}"
        )
    if here.get("base") != full.get("base"):
        sentences.append(f"the recipe {here.get('base')} instead of {full.get('base')}")
    return sentences


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _grids(here: Mapping[str, Any], full: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    sentences = []
    for key in dict.fromkeys([*full, *here]):
        ours, theirs = here.get(key), full.get(key)
        shown = labels.get(key, key)
        if ours == theirs:
            continue
        if ours is None:
            sentences.append(f"{shown} not varied instead of {_many(len(theirs or ()), 'value')}")
        elif theirs is None:
            sentences.append(f"{shown}: {_listed(ours)}, which the full study does not vary")
        else:
            sentences.append(
                f"{shown}: {_many(len(ours), 'value')} ({_listed(ours)}) instead of {len(theirs)}"
            )
    return sentences


def _listed(values: Iterable[Any]) -> str:
    shown = [setting(value) for value in values]
    return ", ".join(shown[:_LISTED]) + (", ..." if len(shown) > _LISTED else "")


def _cases(
    here: Mapping[str, Any],
    full: Mapping[str, Any],
    source: StudySource,
    base: Mapping[str, Any],
    labels: Mapping[str, str],
) -> list[str]:
    sentences = []
    if len(here) != len(full):
        left_out = [name for name in full if name not in here]
        without = f", without {', '.join(left_out)}" if left_out else ""
        sentences.append(f"{_many(len(here), 'case')} instead of {len(full)}{without}")
    for name in here:
        ours, theirs = _table(here, name), _table(full, name)
        case_base = _base_settings(ours["base"], source) if "base" in ours else base
        changed = partial(_settings, base={**case_base, **_table(source.full, "set")}, labels=labels)
        if name in full:
            sentences += [f"{name}: {each}" for each in changed(_table(ours, "set"), _table(theirs, "set"))]
    return _merged(sentences)


def _methods(here: Mapping[str, Any], full: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    sentences = []
    if len(here) != len(full):
        sentences.append(f"{_many(len(here), 'method')} instead of {len(full)}")
    for name in here:
        if name not in full or here[name] == full[name]:
            continue
        ours, theirs = _table(here, name), _table(full, name)
        label = str(ours.get("label", theirs.get("label", name)))
        sentences += [f"{label}: {each}" for each in _method(ours, theirs, labels)]
    return _merged(sentences)


def _method(ours: Mapping[str, Any], theirs: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """What differs between the tables of one method."""
    settings, full_settings = dict(_table(ours, "set")), dict(_table(theirs, "set"))
    grid, full_grid = dict(_table(ours, "grid")), dict(_table(theirs, "grid"))
    sentences = []
    for key in [key for key in full_grid if key in settings and key not in grid]:
        values = full_grid.pop(key)
        shown = labels.get(key, key)
        sentences.append(f"{shown} = {setting(settings.pop(key))} instead of {_many(len(values), 'value')}")
    if EFFECTIVE in grid and EFFECTIVE not in full_grid and "local.lr" in full_grid:
        number = len(full_grid.pop("local.lr"))
        rates = f"{labels.get('local.lr', 'local.lr')}: {_many(number, 'value')}"
        sentences.append(f"effective learning rate: {_listed(grid.pop(EFFECTIVE))} instead of {rates}")
    sentences += _settings(settings, full_settings, {}, labels)
    sentences += _grids(grid, full_grid, labels)
    if ours.get("points") != theirs.get("points"):
        numbers = (len(table.get("points") or ()) for table in (ours, theirs))
        sentences.append("{} points instead of {}".format(*numbers))
    return sentences


def _pretraining(
    here: Mapping[str, Any], full: Mapping[str, Any], source: StudySource, labels: Mapping[str, str]
) -> list[str]:
    sentences = []
    for name in here:
        ours, theirs = _table(here, name), _table(full, name)
        label = f"pre-training {ours.get('label', name)}"
        if ours.get("base") != theirs.get("base"):
            sentences.append(f"{label}: {ours.get('base')} instead of {theirs.get('base') or 'none'}")
        if theirs:
            base = _base_settings(ours.get("base"), source)
            changed = _settings(_table(ours, "set"), _table(theirs, "set"), base, labels)
            sentences += [f"{label}: {each}" for each in changed]
    return _merged(sentences)


def _merged(sentences: Iterable[str]) -> list[str]:
    """Merges sentences that differ only in their first words: "FedAvg, FedAvgM: 2 rounds instead of 9"."""
    names: dict[str, list[str]] = {}
    for sentence in sentences:
        name, colon, change = sentence.partition(": ")
        names.setdefault(change if colon else "", []).append(name if colon else sentence)
    alone = names.pop("", [])
    return [*alone, *(f"{'; '.join(these)}: {change}" for change, these in names.items())]


def _tuning(here: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    if not here and not full:
        return []
    if not here or not full:
        return ["nothing is tuned" if full else "settings are tuned, which the full study does not do"]
    sentences = []
    if here.get("budget") != full.get("budget"):
        ours = here.get("budget", "other")
        runs = "run" if ours == 1 else "runs"
        sentences.append(
            f"{ours} tuning {runs} a method and case instead of {full.get('budget', 'another number')}"
        )
    if here.get("refit", True) != full.get("refit", True):
        share = f"{100 * float(here.get('share', 0.1)):g} %"
        sentences.append(
            f"final runs train without the {share} of the images that settings were chosen on"
            if not here.get("refit", True)
            else "final runs train on all training images"
        )
    if here.get("seeds") != full.get("seeds"):
        ours, theirs = here.get("seeds"), full.get("seeds")
        words = [
            _many(len(seeds), "seed") + " of its own" if seeds else "the study's seeds"
            for seeds in (ours, theirs)
        ]
        sentences.append(f"tuning on {words[0]} instead of {words[1]}")
    return sentences
