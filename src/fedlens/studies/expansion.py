"""Expands the grids, random draws and lists of points of a study into methods, cases and points."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.summary_text import listed
from fedlens.studies.run_settings import PlacedSetting
from fedlens.studies.study_file import Places
from fedlens.studies.study_settings import (
    Base,
    CaseSettings,
    MethodSettings,
    RandomDraws,
    Range,
    StudySettings,
)

Values = Mapping[str, Any]
_ALONE = "data.", "seeds."  # settings that are not tuned unless `tune.over` names them
_LONG = 24  # characters of a value in a name
_MOST = 1_000_000  # combinations
_NAMED = 8  # values in an error
_TRIES = 100  # draws for each point of [random], of which some can be equal


@dataclass(frozen=True)
class Grid:
    """Points, and the place of each of their settings in the study file.

    Attributes:
        points: settings by dotted key, all with the same keys.
        places: by key.
    """

    points: Sequence[Values] = field(default_factory=lambda: [{}])
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> Mapping[str, Sequence[Any]]:
        """The values of each setting, in order, without repetition."""
        values: dict[str, list[Any]] = {key: [] for key in self.places}
        for point in self.points:
            for key, value in point.items():
                if value not in values[key]:
                    values[key].append(value)
        return values


@dataclass(frozen=True)
class Case:
    """A condition that methods are compared in.

    Attributes:
        values: by dimension: "case" for a named one, and each grid setting that is not tuned.
        base: the base that the case names, and its place.
    """

    values: Values
    settings: Sequence[PlacedSetting]
    grid: Sequence[PlacedSetting]
    base: tuple[Base, str] | None = None


@dataclass(frozen=True)
class Method:
    """A row of the comparison.

    Attributes:
        table: the name of its table in the study. Without tuning, each point of its grid is a method.
        tuned: the points that tuning chooses among; one empty point without.
        own: the name of its counterpart at the scale "paper", which is another for a stand-in.
    """

    name: str
    label: str
    table: str
    settings: Sequence[PlacedSetting]
    tuned: Grid
    base: tuple[Base, str] | None = None
    own: str = ""


def drawn(draws: RandomDraws, where: str | None = None) -> list[dict[str, Any]]:
    """The points of a table [random]: `number` different ones, uniform in each range, the same for the same seed.

    A range of whole numbers gives whole numbers. With `log`, the logarithm is uniform. Numbers have three digits.

    Raises `ConfigError` if the ranges have fewer points.

    >>> ranges = {"local.lr": {"low": 0.01, "high": 1.0, "log": True}, "rounds": {"low": 2, "high": 4}}
    >>> drawn(RandomDraws(number=2, **ranges))
    [{'local.lr': 0.0107, 'rounds': 2}, {'local.lr': 0.0877, 'rounds': 2}]
    """
    random = np.random.Generator(np.random.Philox(draws.seed))
    points: list[dict[str, Any]] = []
    for _ in range(_TRIES * draws.number):
        point = {key: _drawn(one, random) for key, one in draws.ranges.items()}
        if point not in points:
            points.append(point)
        if len(points) == draws.number:
            return points
    raise ConfigError(
        f"the ranges have fewer than {draws.number} different points",
        where=where,
        hint="lower 'number', or widen the ranges",
    )


def _drawn(one: Range, random: np.random.Generator) -> Any:
    share = float(random.random())
    if one.choices is not None:
        return one.choices[int(share * len(one.choices))]
    assert one.low is not None
    assert one.high is not None
    whole = isinstance(one.low, int) and isinstance(one.high, int)
    low, high = (one.low, one.high + 1) if whole else (one.low, one.high)
    value = math.exp(math.log(low) + share * math.log(high / low)) if one.log else low + share * (high - low)
    return min(int(value), int(one.high)) if whole else float(f"{value:.3g}")


def product(grids: Iterable[Grid]) -> Grid:
    """Every combination of the points of several grids, the last varying fastest.

    >>> product([Grid([{"a": 1}, {"a": 2}]), Grid([{"b": 3}, {"b": 4}])]).points
    [{'a': 1, 'b': 3}, {'a': 1, 'b': 4}, {'a': 2, 'b': 3}, {'a': 2, 'b': 4}]
    """
    listed = list(grids)
    points = [
        {key: value for part in parts for key, value in part.items()}
        for parts in itertools.product(*(grid.points for grid in listed))
    ]
    return Grid(
        points,
        {key: place for grid in listed for key, place in grid.places.items()},
    )


class Expansion:
    """The methods and cases of a study. Raises `ConfigError` for grids that do not fit together.

    Args:
        default: the name of the only method of a study without methods, such as the algorithm of its base.
        label: that of this method.
    """

    def __init__(self, study: StudySettings, places: Places, default: str, label: str) -> None:
        self._study, self._places = study, places
        tables = study.methods or {default: MethodSettings(label=label)}
        self._parts = {name: self._grids_of_method(name, table) for name, table in tables.items()}
        self._common = self._grids(study.grid, study.random, ())
        self.over = self._over()
        self.cases: list[Case] = list(self._cases())
        self.methods: list[Method] = [
            method for name, table in tables.items() for method in self._methods(name, table)
        ]
        self._refuse_unused()
        self._refuse_varied()
        self._refuse_set_again()
        _refuse_twice(self.methods, places)

    def _grids(
        self, grid: Mapping[str, Sequence[Any]] | None, random: RandomDraws | None, table: tuple[str, ...]
    ) -> list[Grid]:
        """One grid a setting of `grid`, and one of all settings of `random`."""
        grids = [
            Grid([{key: value} for value in values], {key: self._places.locate(*table, "grid", key)})
            for key, values in (grid or {}).items()
        ]
        if random is not None:
            places = {key: self._places.locate(*table, "random", key) for key in random.ranges}
            both = next((key for key in places if grid is not None and key in grid), None)
            if both is not None:
                raise ConfigError(
                    f"'{both}' is in both grid and random",
                    where=places[both],
                    hint="remove it from one of them",
                )
            points = drawn(random, self._places.locate(*table, "random", "number"))
            grids.append(Grid(points, places))
        if math.prod(len(one.points) for one in grids) > _MOST:
            where = self._places.locate(*table, "grid" if grid else "random")
            raise ConfigError(f"the grid has more than {_MOST:,} points", where=where, hint="remove values")
        return grids

    def _grids_of_method(self, name: str, table: MethodSettings) -> list[Grid]:
        """The grids of a method."""
        if table.points is None:
            return self._grids(table.grid, table.random, ("methods", name))
        place = self._places.locate("methods", name, "points")
        return [Grid(table.points, dict.fromkeys(table.points[0], place))]

    def _over(self) -> set[str]:
        """The settings that are tuned."""
        tune = self._study.tune
        if tune is None:
            return set()
        of_methods = {key for grids in self._parts.values() for grid in grids for key in grid.places}
        common = {key for grid in self._common for key in grid.places}
        if tune.over is None:
            chosen = of_methods | {key for key in common if not key.startswith(_ALONE)}
        else:
            chosen = set(tune.over)
            for key in tune.over:
                if key not in of_methods | common:
                    names = sorted(of_methods | common)
                    raise ConfigError(
                        f"'{key}' is tuned, but is in no grid",
                        where=self._places.locate("tune", "over"),
                        hint=nearest(key, names) if names else "add a table [grid] with its values",
                    )
        if not chosen:
            raise ConfigError(
                "[tune] has no setting to tune",
                where=self._places.locate("tune"),
                hint="add a grid of settings outside data. and seeds., or remove [tune]",
            )
        for grid in [*self._common, *(grid for grids in self._parts.values() for grid in grids)]:
            tuned = [key for key in grid.places if key in chosen]
            if tuned and len(tuned) < len(grid.places):
                other = next(key for key in grid.places if key not in chosen)
                raise ConfigError(
                    f"'{tuned[0]}' is tuned and '{other}' is not, but they are drawn or listed together",
                    where=grid.places[other],
                    hint="move one of them to a grid",
                )
        return chosen

    def _cases(self) -> Iterable[Case]:
        named: list[tuple[str | None, CaseSettings]] = [*(self._study.cases or {}).items()]
        grid = product(one for one in self._common if not self.over.intersection(one.places))
        for name, table in named or [(None, CaseSettings())]:
            for point in grid.points:
                settings, base = [], None
                if name is not None:
                    settings = self._settings(table.set, "cases", name, "set")
                    base = self._base(table.base, "cases", name)
                    self._refuse_both(settings, grid.places)
                values = ({"case": name} if name is not None else {}) | dict(point)
                yield Case(values, settings, _located(point, grid.places), base)

    def _methods(self, name: str, table: MethodSettings) -> Iterable[Method]:
        grids = self._parts[name]
        settings = self._settings(table.set, "methods", name, "set")
        base = self._base(table.base, "methods", name)
        tuned = [grid for grid in grids if self.over.intersection(grid.places)]
        shown = product(grid for grid in grids if not self.over.intersection(grid.places))
        of_method = {key for grid in tuned for key in grid.places}
        for one in self._common:
            if self.over.intersection(one.places):
                # A method's values of a setting replace those of the study.
                replaced = of_method.intersection(one.places)
                if replaced and len(replaced) < len(one.places):
                    key = min(replaced)
                    raise ConfigError(
                        f"the method '{name}' has values of '{key}', which [random] draws with other settings",
                        where=next(grid.places[key] for grid in tuned if key in grid.places),
                        hint="draw all of them for the method too",
                    )
                if not replaced:
                    tuned = [*tuned, one]
            else:
                self._refuse_both(_located(shown.points[0], shown.places), one.places)
        whole = product(tuned)
        for grid in (whole, shown, *self._common):
            self._refuse_both(settings, grid.places)
        for point in shown.points:
            short = {key: short_key(key, shown.places) for key in point}
            names = [f"{short[key]}={shown_value(value)}" for key, value in point.items()]
            labels = [
                f"{self._study.labels.get(key, short[key])} = {shown_value(value)}"
                for key, value in point.items()
            ]
            yield Method(
                " ".join([name, *names]),
                ", ".join([table.label or name, *labels]),
                name,
                [*settings, *_located(point, shown.places)],
                whole,
                base,
                " ".join([table.stands_for or name, *names]),
            )

    def _settings(self, table: Values, *keys: str) -> list[PlacedSetting]:
        return [PlacedSetting(key, value, self._places.locate(*keys, key)) for key, value in table.items()]

    def _base(self, base: Base | None, *keys: str) -> tuple[Base, str] | None:
        return None if base is None else (base, self._places.locate(*keys, "base"))

    def _refuse_both(self, settings: Iterable[PlacedSetting], places: Mapping[str, str]) -> None:
        """Raises `ConfigError` for a setting that a grid sets again, so that it would have no effect."""
        for one in settings:
            if one.key in places:
                raise ConfigError(
                    f"'{one.key}' is set to one value, but a grid sets it again ({places[one.key]})",
                    where=one.place,
                    hint="remove one of them",
                )

    def _refuse_set_again(self) -> None:
        """Raises `ConfigError` for a key of the study's `set` that grids set again in every run."""
        placed = [
            {key: place for grid in grids for key, place in grid.places.items()}
            for grids in self._parts.values()
        ]
        everywhere = {
            key: place for key, place in placed[0].items() if all(key in places for places in placed)
        }
        everywhere |= {key: place for grid in self._common for key, place in grid.places.items()}
        self._refuse_both(self._settings(self._study.set, "set"), everywhere)

    def _refuse_varied(self) -> None:
        """Raises `ConfigError` for a `--set` without effect, since methods, cases or grids set it again."""
        placed = [one for case in self.cases for one in (*case.settings, *case.grid)]
        for method in self.methods:
            placed += method.settings
            placed += [one for point in method.tuned.points for one in _located(point, method.tuned.places)]
        for key in self._places.changed:
            pairs = [(one, f"{key}.", f"{one.key}.") for one in placed]
            found = [one for one, own, other in pairs if own.startswith(other) or other.startswith(own)]
            same = [one for one in found if one.key == found[0].key]
            values = list(dict.fromkeys(shown_value(one.value) for one in same))
            if values:
                verb, which = ("varies", "") if len(values) > 1 else ("sets", " for a part of its runs")
                raise ConfigError(
                    f"the study {verb} '{found[0].key}'{which} ({listed(values, _NAMED)}), so --set cannot change it",
                    where=found[0].place,
                    hint=f"remove --set {key}, or change the values in a copy of the study file",
                )

    def _refuse_unused(self) -> None:
        """Raises `ConfigError` if a case and a method both name a base."""
        for method in self.methods:
            for case in self.cases:
                if method.base is not None and case.base is not None:
                    raise ConfigError(
                        f"the method '{method.table}' and the case '{case.values['case']}' both name a base",
                        where=method.base[1],
                        hint="name it in one of them, and set the differences with 'set'",
                    )


def _located(point: Values, places: Mapping[str, str]) -> list[PlacedSetting]:
    return [PlacedSetting(key, value, places[key]) for key, value in point.items()]


def _refuse_twice(methods: Sequence[Method], places: Places) -> None:
    names = [method.name for method in methods]
    for method in methods:
        if names.count(method.name) > 1:
            raise ConfigError(
                f"two methods have the name '{method.name}'",
                where=places.locate("methods", method.table),
                hint="rename one of them",
            )


def short_key(key: str, among: Iterable[str]) -> str:
    """Returns the last part of a key, with as many parts before it as make it unique.

    >>> short_key("local.lr", ["local.lr", "rounds"]), short_key("local.lr", ["local.lr", "algorithm.lr"])
    ('lr', 'local.lr')
    """
    parts = key.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if not any(other != key and (other == end or other.endswith(f".{end}")) for other in among):
            return end
    return key


def shown_value(value: Any) -> str:
    """A value in a name: of a table its name, and a number without needless digits.

    >>> shown_value(0.1), shown_value(100.0), shown_value({"name": "iid", "clients": 4}), shown_value(True)
    ('0.1', '100', 'iid', 'true')
    """
    if isinstance(value, Mapping):
        return str(value["name"]) if "name" in value else json.dumps(value, sort_keys=True)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return ", ".join(map(shown_value, value)) if isinstance(value, list | tuple) else str(value)


def shown_settings(values: Values) -> str:
    """Settings in a sentence: "(data.partition.alpha = 0.1, rounds = 2)"."""
    return f"({', '.join(f'{key} = {shown_value(value)}' for key, value in values.items())})"


def file_name(text: str, most: int = _LONG) -> str:
    """A text as a part of a directory name.

    >>> file_name("two classes"), file_name("fedavgm momentum=0.9")
    ('two-classes', 'fedavgm-momentum0.9')
    """
    cleaned = re.sub(r"[^A-Za-z0-9.=+-]+", "-", text).replace("=", "").strip("-.")
    return cleaned[:most].rstrip("-.") or "x"


def _says_all(key: str, value: Any) -> bool:
    """Whether a value is clear without its key: a named case, or the name of a component."""
    return (
        key == "case" or key.endswith("name") or isinstance(value, Mapping) or key in ("algorithm", "model")
    )


def run_key(method: str, case: Values, point: Values, role: str, seed: int) -> str:
    """A short readable name of a run.

    >>> run_key("fedavgm", {"data.partition.alpha": 0.1}, {"local.lr": 0.03}, "final", 0)
    'fedavgm-alpha0.1-lr0.03-seed0'
    """
    keys = [*case, *point]
    named = [
        file_name(f"{'' if _says_all(key, value) else short_key(key, keys)}{shown_value(value)}")
        for part in (case, point)
        for key, value in part.items()
    ]
    parts = [file_name(method, 40), *named]
    return f"{'-'.join(parts)[:120]}-{'' if role == 'final' else f'{role}-'}seed{seed}"
