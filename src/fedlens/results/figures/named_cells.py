"""The cells of a study that a figure shows: which ones, and the words for the settings that they differ in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import SPLITS, many, setting
from fedlens.results.cells import METHOD, Cell, cells, is_number, why_lost
from fedlens.results.rows import EFFECTIVE, Results, Role
from fedlens.results.statistics import mean

Names: TypeAlias = str | list[str]
_POINT = re.compile(r"( [\w.-]+=\S+)+$")  # of a method's grid, in the name of the method
LOCAL = "local.lr"
# Measured properties of a run that can be on an axis.
FACTS = {
    "emd": "earth mover's distance of the clients",
    "clients": "clients",
    "parameters": "parameters",
    "multiply_adds": "multiply-adds",
}
CENTRALIZED = "centralized"


@dataclass(frozen=True)
class NamedCells:
    """The cells of one part of a study, "final" or "tune", and the names of what they differ in."""

    results: Results
    role: Role = "final"
    cells: Sequence[Cell] = field(default_factory=tuple)

    @classmethod
    def of(cls, results: Results, role: Role = "final") -> NamedCells:
        """The cells of the plan."""
        return cls(results, role, cells(results, role))

    @property
    def metric(self) -> str:
        """The column that final values are taken from; that of validation data for runs of tuning."""
        return self.results.measured(self.role)

    def varying(self) -> list[str]:
        """The keys that have several values, in order: those of cases, the method, tuned settings."""
        keys = dict.fromkeys(key for cell in self.cells for key in cell.keys)
        order = sorted(keys, key=lambda key: key == METHOD)
        return [key for key in order if len(self.all_values(key)) > 1]

    def all_values(self, key: str) -> list[Any]:
        """The values of a key, numbers in rising order, other values in the order of the plan."""
        values = list(
            {_text(cell.keys[key]): cell.keys[key] for cell in self.cells if key in cell.keys}.values()
        )
        return sorted(values) if all(map(is_number, values)) else values

    def key(self, name: str, where: str) -> str:
        """The key that a study file names: in full, by its label, or by its last part.

        Raises `ConfigError` with the nearest name if the runs do not differ by a setting of this name.
        """
        keys = list(dict.fromkeys([METHOD, *(key for cell in self.cells for key in cell.keys)]))
        labels = {self.label(key): key for key in keys}
        if name in keys or name in labels:
            return name if name in keys else labels[name]
        ends = [key for key in keys if key.rpartition(".")[2] == name]
        if len(ends) == 1:
            return ends[0]
        raise ConfigError(
            f"the study has no dimension '{name}'",
            where=where,
            hint=nearest(name, list(dict.fromkeys([*keys, *labels]))),
        )

    def with_fact(self, name: str) -> NamedCells:
        """The same cells with a fact, its mean over seeds, as a key; without it where no run is done."""
        cells = []
        for cell in self.cells:
            value = mean(line.facts.get(name) for line in cell.done.values())
            more = {} if value is None else {name: float(f"{value:.4g}")}
            cells.append(replace(cell, point={**cell.point, **more}))
        return replace(self, cells=cells)

    def by_family(self) -> NamedCells:
        """The same cells with the points of a method's grid, "fedavgm lr=0.1", under the name of the method."""
        methods: dict[str, str] = {}
        for name, text in self.results.info.methods.items():
            family = _POINT.sub("", name)
            parts = name[len(family) :].count("=")
            methods.setdefault(family, text if not parts else ", ".join(text.split(", ")[:-parts]) or family)
        cells = [replace(cell, method=_POINT.sub("", cell.method)) for cell in self.cells]
        info = replace(self.results.info, methods=methods)
        return replace(self, cells=cells, results=replace(self.results, info=info))

    def label(self, key: str) -> str:
        """A key in words."""
        if key in FACTS:
            return FACTS[key]
        return self.results.info.dimensions.get(key) or key.rpartition(".")[2].replace("_", " ")

    def words(self, key: str, value: Any) -> str:
        """A value in words, as a legend has it: the label of a method, a number."""
        if key == METHOD:
            return str(self.results.info.methods.get(value, value))
        return f"{value:.4g}" if isinstance(value, float) else setting(value, most=3)

    def title(self, keys: Mapping[str, Any], names: Iterable[str]) -> str:
        """Some keys and their values: "alpha 0.1, FedAvg"."""
        parts = [
            self.words(name, keys[name])
            if name in (METHOD, "case")
            else f"{self.label(name)} {self.words(name, keys[name])}"
            for name in names
            if name in keys
        ]
        return ", ".join(parts)

    def gaps(self, cells: Sequence[Cell]) -> list[str]:
        """Sentences on failed and unfinished runs of some cells."""
        names = self.varying()
        sentences, waiting, empty = [], 0, []
        for cell in cells:
            title = self.title(cell.keys, names) or "the cell"
            if cell.lost:
                reasons = "; ".join(dict.fromkeys(why_lost(line) or "" for line in cell.lost.values()))
                sentences.append(
                    f"{title}: {len(cell.lost)} of {many(len(cell.runs), 'run')} failed ({reasons})."
                )
            waiting += sum(line.status is None for line in cell.runs.values())
            if not cell.done and not cell.lost:
                empty.append(title)
        if waiting:
            planned = sum(len(cell.runs) for cell in cells)
            sentences.append(f"{waiting:,} of {many(planned, 'run')} are not done yet.")
        if empty:
            more = f", and {len(empty) - 6} more" if len(empty) > 6 else ""
            sentences.append(f"No results yet: {'; '.join(empty[:6])}{more}.")
        return sentences

    def known_key(self, name: str) -> str:
        """The key of a name as `key` reads it, or the name itself if it is none."""
        try:
            return self.key(name, "document")
        except ConfigError:
            return name


def runs_of(study: Results, role: Role | None, names: Sequence[str]) -> NamedCells:
    """The runs of a role; without one the final runs, or those of tuning if a name is a setting of tuning alone."""
    names = [name for name in names if name not in FACTS]
    if role is not None:
        return NamedCells.of(study, role)
    final, tune = NamedCells.of(study, "final"), NamedCells.of(study, "tune")
    for name in names:
        try:
            final.key(name, "figures")
        except ConfigError:
            grid_keys = {key for grid in study.info.grids.values() for key in grid}
            tuned = {key for cell in tune.cells for key in cell.keys} | grid_keys
            if name in tuned or name in {key.rpartition(".")[2] for key in tuned}:
                return tune
    return final


def names_of(names: Names | None) -> list[str]:
    """A setting that is a name or a list of names, as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def selected(
    runs: NamedCells,
    where: Mapping[str, Any] | None,
    methods: Sequence[str] | None,
    relative: bool = False,
) -> list[Cell]:
    """The runs with these settings (a value, or a list of values) and of these methods.

    Args:
        relative: leaves out the centralized runs, that the others are divided by.

    Raises `ConfigError` for an unknown dimension, value or method.
    """
    wanted: dict[str, list[Any]] = {}
    for name, value in (where or {}).items():
        key, values = runs.key(name, f"figures.where.{name}"), value if isinstance(value, list) else [value]
        present = runs.all_values(key)
        for each in values:
            if each not in present:
                hint = nearest(str(each), [runs.words(key, v) for v in present])
                raise ConfigError(
                    f"no run has {runs.label(key)} = {each}", where=f"figures.where.{name}", hint=hint
                )
        wanted[key] = values
    for method in methods or ():
        if method not in runs.results.info.methods:
            hint = nearest(method, runs.results.info.methods)
            raise ConfigError(f"the study has no method '{method}'", where="figures.methods", hint=hint)
    return [
        cell
        for cell in runs.cells
        if all(cell.keys.get(key) in values for key, values in wanted.items())
        and (not methods or cell.method in methods)
        and not (relative and cell.method == CENTRALIZED)
    ]


def bare(metric: str) -> str:
    """A metric without its split.

    >>> bare("test_accuracy"), bare("accuracy")
    ('accuracy', 'accuracy')
    """
    split, _, name = metric.partition("_")
    return name if split in SPLITS and name else metric


def rates_of(cell: Cell) -> tuple[float, float] | None:
    """The effective rate eta / (1 - beta) of a cell and its client rate eta (hsu2019, section 4.2); None if unknown.

    Both stand in the keys of a cell, or in the facts of its runs ("effective_lr", "local_lr").
    """
    facts = next((line.facts for line in cell.done.values()), {})
    beta = next((cell.keys[k] for k in ("algorithm.momentum", "server.momentum") if k in cell.keys), 0.0)
    rate = _number(cell.keys.get(LOCAL, facts.get("local_lr")))
    effective = _number(cell.keys.get(EFFECTIVE, facts.get(EFFECTIVE)))
    shrunk = 1 - beta if is_number(beta) else 0.0
    if effective is None and rate is not None and shrunk > 0:
        effective = rate / shrunk
    if rate is None and effective is not None:
        rate = effective * shrunk
    return (effective, rate) if effective and rate and effective > 0 else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _text(value: Any) -> str:
    return repr(sorted(value.items())) if isinstance(value, Mapping) else repr(value)
