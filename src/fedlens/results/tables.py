"""The tables of a study: the kinds of `[[tables]]`, and how to make them from the results.

A kind is a function of a `TableView` and of its options. The options are its keyword arguments; a study file may give
these names and types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.registry import settings_model
from fedlens.base.setting_errors import validated
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
    check_table(spec, where)
    options = dict(spec)
    common = {name: options.pop(name, None) for name in settings_model(_common).model_fields}
    narrow = narrowed(results, where, common["metric"], common["methods"], common["where"])
    view = TableView(
        narrow,
        common["name"] or str(common["kind"]),
        common["title"] or "",
        common["digits"],
        common["document"] is not False,
        where,
    )
    table = TABLES[str(common["kind"])](view, **options)
    return replace(table, caveats=results.info.caveats)


def study_tables(results: Results) -> list[StudyTable]:
    """All tables of a study; those of `default_tables` if its file has none. Names are unique."""
    specs = results.info.tables or default_tables(results.info)
    check_tables(specs)
    tables: list[StudyTable] = []
    for k, spec in enumerate(specs):
        wanted = str(spec.get("name") or spec["kind"])
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
        check_table(spec, f"tables[{k}]")


def check_planned_tables(info: StudyInfo) -> None:
    """Raises `ConfigError` for [[tables]] that the results of this study cannot have, before any run.

    Kinds, options, their types, and the names of methods, cases and targets are checked.
    """
    planned = Results(info, {})
    check_tables(info.tables)
    for k, spec in enumerate(info.tables):
        try:
            study_table(planned, spec, f"tables[{k}]")
        except DataError:
            continue  # only data.json is missing, which is written later


def check_table(spec: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` for a table of an unknown kind, or with an unknown option or a value that cannot be.

    >>> check_table({"kind": "summry"}, "tables[0]")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: unknown kind of table 'summry' (tables[0].kind); did you mean 'summary'.
    """
    kind = spec.get("kind")
    old = "kind" if str(kind) in _REMOVED else next((option for option in spec if option in _REMOVED), None)
    if old is not None:
        what, name = ("kind of table", str(kind)) if old == "kind" else ("option", old)
        raise ConfigError(f"the {what} '{name}' was removed", where=f"{where}.{old}", hint=_REMOVED[name])
    if not isinstance(kind, str) or kind not in TABLES:
        shown = "a table has no kind" if kind is None else f"unknown kind of table '{kind}'"
        raise ConfigError(shown, where=f"{where}.kind", hint=nearest(str(kind), TABLES))
    common, own = settings_model(_common), settings_model(TABLES[kind])
    known = [*common.model_fields, *own.model_fields]
    shared = {option: value for option, value in spec.items() if option in common.model_fields}
    for model, values in ((common, shared), (own, {k: v for k, v in spec.items() if k not in shared})):
        validated(model, values, where, known=lambda _: known, strict=True)
