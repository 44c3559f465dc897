"""Compares a study with the runs in its folder: new cells, and runs that no longer belong to the study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, FedlensError
from fedlens.base.summary_text import listed
from fedlens.files.atomic_files import read_regular
from fedlens.results.rows import INFO, LINES, Results, Row, StudyInfo, read_lines
from fedlens.settings.keys import diff
from fedlens.studies.expansion import shown_settings, shown_value
from fedlens.studies.planned import PlannedRun
from fedlens.studies.reproductions import COPY
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan, Values

_OF_TASK = "that of the task"
_MOST = 4  # cells or settings that are named
_VALUES = 12  # values of a setting that are named


@dataclass(frozen=True)
class StudyChange:
    """The differences between a study and the runs in its folder.

    Attributes:
        settings: the changed settings, a phrase each, compared with the copy of the study file in the folder.
        new: the runs that were not planned before, without those that depend on results.
        gone: the entries whose runs were made and no longer belong to the study.
        rules: phrases on what else changes the results of the runs that stay.
    """

    settings: Sequence[str] = ()
    new: Sequence[Row] = ()
    gone: Sequence[Row] = ()
    rules: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.rules)

    def sentences(self) -> list[str]:
        """Describes the change, one sentence each."""
        more = [f"{len(self.settings) - _MOST:,} more"] if len(self.settings) > _MOST else []
        changes = [f"Changed: {'; '.join([*self.settings[:_MOST], *more])}"] if self.settings else []
        if self.new:
            changes.append(f"New: {_runs(self.new)}")
        if self.gone:
            changes.append(f"No longer part of the study: {_runs(self.gone)}")
        return [*changes, *self.rules]


def changed_study(folder: Path, plan: StudyPlan) -> StudyChange:
    """Returns how the plan differs from the study in `folder`; empty if the study has no runs.

    Raises `DataError` if a file in `folder` is damaged.
    """
    lines = read_lines(folder / LINES)
    if not lines or not (folder / INFO).exists():
        return StudyChange()
    before = Results.read(folder).info
    made = {line.digest for line in lines}
    kept = {line.digest for line in lines if line.status != "failed"}
    repaired = {_before(run, before): run for run in plan.runs if run.files}
    planned = {entry.digest for entry in before.entries}
    # A failed run is repeated, so the file that caused the failure may change.
    tried = {old for old in repaired if old in planned and old not in kept}
    planned |= {repaired[old].digest for old in tried}
    new = [run.entry for run in plan.runs if run.digest not in planned]
    new += _further_seeds(before, plan)
    gone = [entry for entry in before.entries if entry.digest in made - tried and not _belongs(entry, plan)]
    changed = [*_settings(folder, before, plan), *_files(before, plan)]
    return StudyChange(changed, new, gone, _rules(before, plan))


def refuse_changed(folder: Path, plan: StudyPlan, accept_changes: bool = False) -> StudyChange:
    """Returns the change of a study if it is accepted or empty.

    Raises `ConfigError` otherwise, with the new cells, the runs that no longer belong to the study, and what to do.
    """
    change = changed_study(folder, plan)
    if change and not accept_changes:
        what = "\n".join([f"the study has changed since the runs in {folder} were made", *change.sentences()])
        stay = ""
        if change.gone:
            one = len(change.gone) == 1
            stay = f": the {'run that is' if one else 'runs that are'} no longer part of it "
            stay += f"{'stays' if one else 'stay'} in 'runs', but not in the results"
        hint = f"undo the change, continue with --accept-changes{stay}, or write to another folder with --out"
        raise ConfigError(what, hint=hint)
    return change


def _belongs(entry: Row, plan: StudyPlan) -> bool:
    """Whether the plan can have a run with this method, case, seed, point and settings."""
    cells = plan.cells
    method = next((one for one in cells.methods if one.name == entry.method), None)
    case = next((one for one in cells.cases if dict(one.values) == dict(entry.case)), None)
    if method is None or case is None or (entry.role == "tune" and cells.tune is None):
        return False
    seeds = cells.tuning_seeds[method.name] if entry.role == "tune" else cells.seeds
    if entry.seed not in seeds or dict(entry.point) not in [dict(one) for one in cells.points(method)]:
        return False
    with suppress(ConfigError):
        return cells.run(method, case, entry.point, entry.role, entry.seed).digest == entry.digest
    return False


def _before(run: PlannedRun, before: StudyInfo) -> str:
    """The digest of a run with the earlier contents of its files."""
    return replace(
        run, files={name: before.files.get(name, sha256) for name, sha256 in run.files.items()}
    ).digest


def _files(before: StudyInfo, plan: StudyPlan) -> list[str]:
    """The user's Python files with changed content, a phrase each."""
    now = {name: sha256 for run in plan.runs for name, sha256 in run.files.items()}
    return [
        f"the content of {name}" for name, sha256 in now.items() if before.files.get(name, sha256) != sha256
    ]


def _further_seeds(before: StudyInfo, plan: StudyPlan) -> list[Row]:
    """The final runs of new seeds, whose points tuning chooses."""
    if plan.cells.tune is None:
        return []
    return [
        Row.planned("", "", method.name, dict(case.values), {}, "final", seed)
        for seed in plan.cells.seeds
        if seed not in before.seeds
        for method, case in plan.cells.pairs
    ]


def _rules(before: StudyInfo, plan: StudyPlan) -> list[str]:
    """Changes that affect when runs end or which points tuning chooses, while the runs stay."""
    now = plan.info({})
    ends = []
    if before.stop_diverged not in (None, now.stop_diverged):
        new, old = _value(now.stop_diverged), _value(before.stop_diverged)
        ends = [f"Finished runs stay as they are, though stop.diverged is {new} instead of {old}"]
    if not before.tuning or not now.tuning:
        return ends
    pairs = {
        "metric": (before.metric or _OF_TASK, now.metric or _OF_TASK),
        "last": (before.last, now.last),
        "tune.refit": (before.tuning.get("refit"), now.tuning.get("refit")),
        "stop.halving": (before.tuning.get("halving"), now.tuning["halving"]),
        "stop.first": (before.tuning.get("first"), now.tuning["first"]),
    }
    return ends + [
        f"The points that tuning chooses can change: {name} is {_value(new)} instead of {_value(old)}"
        for name, (old, new) in pairs.items()
        if old != new
    ]


def _value(value: Any) -> str:
    return "not set" if value is None else shown_value(value)


def _settings(folder: Path, before: StudyInfo, plan: StudyPlan) -> list[str]:
    """Differences from the copy of the study file; empty if the copy is missing or unreadable."""
    try:
        read_regular(folder / COPY)
        old = read_study(folder / COPY, before.scale or None)
    except (FedlensError, OSError):
        return []
    values = {key: value for key, value in old.values.items() if key != "base"}  # relative to another folder
    return differences(values, {key: value for key, value in plan.source.values.items() if key != "base"})


def _runs(entries: Iterable[Row]) -> str:
    """The number of runs, and their cells, in words."""
    cells: dict[str, int] = {}
    for entry in entries:
        name = entry.method + (f" {shown_settings(entry.case)}" if entry.case else "")
        cells[name] = cells.get(name, 0) + 1
    number = sum(cells.values())
    parts = [f"{name}: {count}" for name, count in cells.items()]
    return f"{number} {'run' if number == 1 else 'runs'} ({listed(parts, _MOST)})"


def differences(before: Values, now: Values) -> list[str]:
    """Returns the settings that change results and differ between two studies, a phrase each.

    >>> differences({"seeds": [0, 1]}, {"seeds": [0, 2]}), differences({"seeds": [0, 1]}, {"seeds": [0]})
    (['seeds: 0, 2 instead of 0, 1'], ['seeds: 1 instead of 2'])
    """
    same_number = len(before.get("seeds", ())) == len(now.get("seeds", ()))
    tables = {
        key: before.get(key, {}).keys() & now.get(key, {}).keys()
        for key in ("cases", "methods", "pretrained")
    }  # the settings of one that was added or removed are no change of their own
    old, new = (_described(values, tables, same_number) for values in (before, now))
    return [f"{key}: {_short(now)} instead of {_short(was)}" for key, was, now in diff(old, new)]


def _short(words: str | None) -> str:
    values = [] if words is None else words.split(", ")
    return "not set" if words is None else listed(values, _VALUES)


def _described(values: Values, tables: Mapping[str, Set[str]], name_seeds: bool) -> dict[str, str]:
    """The settings that results depend on, by key, each in words; of cases and methods those in `tables`."""
    words: dict[str, str] = {}
    for key, value in values.items():
        if key in ("base", "last", "threads", "metric"):
            words[key] = shown_value(value)
        elif key == "seeds":
            words[key] = shown_value(value) if name_seeds else str(len(value))
        elif key in ("set", "grid", "random", "tune", "stop"):
            for name, item in value.items():
                name = "points" if (key, name) == ("random", "number") else name
                words[name if key == "set" else f"{key} {name}"] = shown_value(item)
        elif key in tables:
            words[key] = ", ".join(value)
            for name in [name for name in value if name in tables[key]]:
                for part, item in value[name].items():
                    if part in ("set", "grid"):
                        words |= {f"{name}, {setting}": shown_value(one) for setting, one in item.items()}
                    elif part != "label":
                        words[f"{name}, {part}"] = shown_value(item)
    return words
