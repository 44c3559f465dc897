"""The tables of a study: the kinds of `[[tables]]`, and how to make them from the results.

A kind is a function of a `TableView` and of its options. The options are its keyword arguments; a study file may give
these names and types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import checked_kind
from fedlens.results.claims import claims_table
from fedlens.results.data_tables import datasets, efficiency, pretraining_tables
from fedlens.results.rows import Results, StudyInfo, needs_runs
from fedlens.results.study_table import StudyTable, TableView, narrowed
from fedlens.results.table_kinds import budgets, choices, differences, relative, summary, targets

TABLES: dict[str, Callable[..., StudyTable]] = {
    kind.__name__: kind
    for kind in (summary, differences, choices, budgets, targets, relative, datasets, efficiency)
}
_REMOVED = {
    "interval": "remove it: intervals are t intervals",
    "simultaneous": "remove it: the adjusted p holds for all comparisons of the table together",
    "ranks": "take kind = 'differences', which shows how large the differences are",
    "clients": "take kind = 'summary' with metric = 'clients_accuracy_mean' or 'clients_accuracy_worst_decile'",
}  # options and kinds of earlier versions, and what to do


def _file_name(name: str) -> str:
    if re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)?", name):
        return name
    raise ValueError("must be letters, digits, dots, hyphens and underscores")


def _common(
    *,
    kind: str,
    name: Annotated[str, AfterValidator(_file_name)] = "",
    title: str = "",
    metric: str | None = None,
    methods: list[str] | None = None,
    where: dict[str, Any] | None = None,
    digits: Annotated[int, Field(ge=0, le=6)] | None = None,
    document: str | bool = True,
) -> None:
    """The options of every kind, as types."""


def study_table(results: Results, spec: Mapping[str, Any], where: str = "tables") -> StudyTable:
    """The table that a `[[tables]]` entry of a study file asks for.

    Args:
        spec: with "kind", the options of all kinds (`name`, `title`, `metric`, `methods`, `where` = the cases to keep,
            `digits`, `document`), and those of its kind.
        where: the entry in the study file, for messages.

    Raises `ConfigError` for an unknown kind or option, a value of the wrong type, and a table that these results
    cannot have.
    """
    common, options = _checked(spec, where)
    kept = (common.get(name) for name in ("metric", "methods", "where"))
    view = TableView(
        narrowed(results, where, *kept),
        common.get("name") or common["kind"],
        common.get("title", ""),
        common.get("digits"),
        common.get("document") is not False,
        where,
    )
    return replace(TABLES[common["kind"]](view, **options), caveats=results.info.caveats)


def study_tables(results: Results) -> list[StudyTable]:
    """All tables of a study; those of `default_tables` if its file has none. Names are unique."""
    specs = results.info.tables or default_tables(results.info)
    tables: list[StudyTable] = []
    for k, spec in enumerate(specs):
        wanted = str(spec.get("name") or spec.get("kind"))
        taken = [table.name for table in tables]
        name = next(n for n in [wanted, *(f"{wanted}-{i}" for i in range(2, k + 3))] if n not in taken)
        tables.append(study_table(results, {**spec, "name": name}, f"tables[{k}]"))
    claims = [claims_table(results)] if results.info.document.get("claims") else []
    return [*tables, *claims, *pretraining_tables(results)]


def default_tables(info: StudyInfo) -> list[dict[str, Any]]:
    """The tables of a study whose file has none; empty for a study that trains nothing."""
    if not needs_runs(info.figures, info.tables):
        return []
    specs: list[dict[str, Any]] = [{"kind": "summary"}]
    if len(info.methods) > 1:
        specs.append({"kind": "differences"})
    if info.tuning:
        specs.append({"kind": "choices"})
    if info.targets:
        specs.append({"kind": "targets"})
    return specs


def check_tables(specs: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` for invalid `[[tables]]`."""
    for k, spec in enumerate(specs):
        _checked(spec, f"tables[{k}]")


def check_planned_tables(info: StudyInfo) -> None:
    """Raises `ConfigError` for [[tables]] that the results of this study cannot have, before any run.

    Kinds, options, their types, and the names of methods, cases and targets are checked.
    """
    planned = Results(info, {})
    for k, spec in enumerate(info.tables):
        with suppress(DataError):  # only data.json is missing, which is written later
            study_table(planned, spec, f"tables[{k}]")


def _checked(spec: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of every kind, and those of its own. Raises `ConfigError` if they cannot be."""
    kind = str(spec.get("kind"))
    old = "kind" if kind in _REMOVED else next((option for option in spec if option in _REMOVED), None)
    if old is not None:
        what, name = ("kind of table", kind) if old == "kind" else ("option", old)
        raise ConfigError(f"the {what} '{name}' was removed", where=f"{where}.{old}", hint=_REMOVED[name])
    return checked_kind("table", TABLES, _common, spec, where, strict=True)
