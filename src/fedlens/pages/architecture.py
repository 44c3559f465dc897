"""The cells of the architecture that a search found (`genotype.json`), as drawings on the page of its run."""

from __future__ import annotations

from typing import NamedTuple

from fedlens.base.errors import RunDirectoryError
from fedlens.files.text_files import read_json
from fedlens.results.run import Run

FILE = "genotype.json"
_TITLES = {"normal": "Normal cell", "reduce": "Reduction cell, which halves height and width"}
_INPUTS = ("cell before last", "last cell")
_COLORS = ("var(--test)", "var(--validation)", "var(--train)", "var(--local)")  # of the operations of a node
_ROW, _STEP = 46, 45  # between two states, and of an arc for each row that it spans: labels do not meet


class DrawnEdge(NamedTuple):
    """One operation of a cell: the arc in SVG's words, its color, the place of its label, and what it says."""

    arc: str
    color: str
    x: float
    y: float
    operation: str
    about: str


class DrawnCell(NamedTuple):
    """A cell, its states from the top down: the two inputs, and the nodes. A state is (its y, its name)."""

    title: str
    states: list[tuple[int, str]]
    edges: list[DrawnEdge]
    width: int
    height: int


def cells_of(run: Run) -> list[DrawnCell]:
    """The drawings of both cells; none without the file, or if it is damaged."""
    try:
        found = read_json(run.path / FILE) or {}
        return [_cell(title, found[kind]) for kind, title in _TITLES.items()]
    except (RunDirectoryError, KeyError, TypeError, ValueError):
        return []


def _cell(title: str, nodes: list[list[tuple[str, int]]]) -> DrawnCell:
    names = [*_INPUTS, *(f"node {k}" for k in range(len(nodes)))]
    edges = [
        _edge(str(operation), state, 2 + k, names) for k, own in enumerate(nodes) for operation, state in own
    ]
    states = [(_ROW * at, name) for at, name in enumerate(names)]
    most = max((edge.x for edge in edges), default=0)
    return DrawnCell(title, states, edges, round(most) + 50, _ROW * len(names))


def _edge(operation: str, state: int, node: int, names: list[str]) -> DrawnEdge:
    if not 0 <= state < node:
        raise ValueError
    # Arrows leave below the middle of a state and arrive above it.
    top, bottom, apex = _ROW * state + 3, _ROW * node - 3, _STEP * (node - state)
    control = round(4 / 3 * apex, 1)  # a cubic curve reaches three quarters of it
    arc = f"M4 {top}C{control} {top} {control} {bottom} 5 {bottom}"
    about = f"{names[node]} takes {operation} of the {names[state]}"
    return DrawnEdge(arc, _COLORS[(node - 2) % len(_COLORS)], apex, (top + bottom) / 2, operation, about)
