"""docs/evidence.md: what stands below its markers is made from the results; the rest is written by hand.

<!-- table: hsu2019.accuracy -->     the rows of a table follow
<!-- line: hsu2019.cost -->          one line follows
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.evidence import store, tables
from benchmarks.evidence.studies import Study

PAGE = store.HOME.with_suffix(".md")
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(?:\|.*\n)*")
LINE = re.compile(r"(<!-- line: (\S+) -->\n)(?:.+\n)?")

_TABLES: Mapping[str, Callable[[Study, tables.Store], list[str]]] = {
    "accuracy": tables.accuracy,
    "differences": tables.differences,
    "rounds": tables.rounds,
    "budgets": tables.budgets,
    "choices": tables.choices,
}


def rendered(page: str, there: tables.Store) -> str:
    """The page with everything below its markers written anew. Raises `KeyError` at a marker of nothing."""
    page = TABLE.sub(lambda match: match[1] + "".join(f"{row}\n" for row in _rows(match[2], there)), page)
    return LINE.sub(lambda match: match[1] + f"{_line(match[2], there)}\n", page)


def _rows(name: str, there: tables.Store) -> list[str]:
    study, _, kind = name.partition(".")
    return _TABLES[kind](_study(study), there)


def _line(name: str, there: tables.Store) -> str:
    study, _, kind = name.partition(".")
    if name == "total":
        return tables.total(there)
    if kind != "cost":
        raise KeyError(name)
    return tables.cost(_study(study), there)


def _study(name: str) -> Study:
    return {study.name: study for study in tables.ordered()}[name]


def write(folder: Path) -> None:
    """Writes the page and the figures from the results in `folder`."""
    from benchmarks.evidence.curves import draw_all

    there = store.read(folder)
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), there), encoding="utf-8")
    drawn = draw_all(folder, there)
    print(f"{PAGE.name} and {len(drawn)} figures from {len(there)} results")
