"""The numbers that a document states, as open markers and dashed lines in the figures of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlens.report.study_groups import SeedGroups, bare
from fedlens.report.study_panels import LineRuns, PanelLayout, PanelRuns, XScale
from fedlens.results.cells import METHOD
from fedlens.results.chart import GREY, Series, level
from fedlens.results.stated import StatedValue, stated_label, stated_values

NAME = "paper"


@dataclass(frozen=True)
class DocumentMark:
    """One stated number in a panel.

    Attributes:
        x: its value on the axis, or its round; None for a number that holds along the whole axis.
        line: the line that it is compared with; None if the study does not run its method.
        number: of that line among the lines of its panel; the next one after them without a line.
        text: what it says and where.
    """

    panel: PanelRuns
    line: LineRuns | None
    number: int
    x: Any
    y: float
    symbol: Literal["circle", "up", "down"]
    text: str


def document_marks(
    groups: SeedGroups, layout: PanelLayout, metric: str, x_key: str | None, rounds: bool = False
) -> list[DocumentMark]:
    """The numbers of a metric that belong to the panels of a figure.

    A number belongs to the panels and lines that its case does not contradict; it holds for all values of a dimension
    that it does not name.

    Args:
        x_key: the setting on the x axis; None for curves.
        rounds: whether the x axis shows rounds, so that a number at a budget of rounds has a place.
    """
    source = str(groups.results.info.document.get("source", ""))
    marks = []
    for stated in stated_values(groups.results.info.document):
        budget = stated.at.get("rounds") if rounds else None
        if bare(stated.metric) != bare(metric) or (stated.at and budget is None):
            continue
        case = {groups.known_key(name): value for name, value in stated.case.items()}
        for panel in layout.panels:
            if _contradicts(panel, case, stated.method, x_key, layout):
                continue
            lines = _lines(panel, case, stated.method, layout)
            if not lines and stated.method in groups.results.info.methods:
                continue  # the figure leaves the method out
            line = panel.lines[lines[0]] if lines else None
            label = groups.words(METHOD, stated.method)
            method = stated_label(groups.results.info.document, stated.method, label)
            place = ", ".join(filter(None, [source, stated.where]))
            text = f"{NAME}: {method} {stated.text} ({place})"
            x = budget if x_key is None else case.get(x_key, _only_place(line, case, x_key))
            symbol = _symbol(stated)
            marks.append(
                DocumentMark(
                    panel, line, lines[0] if lines else len(panel.lines), x, stated.number, symbol, text
                )
            )
    return marks


def _only_place(line: LineRuns | None, case: Mapping[str, Any], x_key: str) -> Any:
    """The value on the axis of the only point that a case is about; None if it is about several or none."""
    groups = line.groups if line and case else ()
    same = [g for g in groups if all(g.keys.get(key) == value for key, value in case.items())]
    return same[0].keys.get(x_key) if len(same) == 1 else None


def _contradicts(
    panel: PanelRuns, case: Mapping[str, Any], method: str, x_key: str | None, layout: PanelLayout
) -> bool:
    if METHOD in panel.keys and panel.keys[METHOD] != method:
        return True
    named = {key: value for key, value in case.items() if key != x_key and key not in layout.line_keys}
    shown = [group.keys for line in panel.lines for group in line.groups]
    return any(all(keys.get(key) != value for keys in shown) for key, value in named.items())


def _lines(panel: PanelRuns, case: Mapping[str, Any], method: str, layout: PanelLayout) -> list[int]:
    wanted = {**case, METHOD: method}
    return [
        k
        for k, line in enumerate(panel.lines)
        if all(key not in wanted or line.groups[0].keys.get(key) == wanted[key] for key in layout.line_keys)
    ]


def _symbol(stated: StatedValue) -> Literal["circle", "up", "down"]:
    return "up" if stated.low is not None else "down" if stated.high is not None else "circle"


def mark_series(
    marks: Sequence[DocumentMark], place: XScale | None, limits: tuple[float, float]
) -> list[Series]:
    """The marks of one panel: markers where they have a place on the axis, else lines across it; one legend entry.

    Args:
        place: where values stand on the axis; None if `x` is a place.
        limits: of the x axis.
    """
    series: list[Series] = []
    for mark in marks:
        color = mark.line.color if mark.line else GREY
        name, group = ("", NAME) if series else (NAME, "")
        look: dict[str, Any] = {"color": color, "texts": [mark.text] * 2, "group": group}
        if mark.x is None:
            series.append(level(mark.y, limits, name, "dashdot", **look))
            continue
        at = float(mark.x) if place is None else place.beside(mark.x, mark.number, len(mark.panel.lines))
        look |= {"texts": [mark.text], "symbol": mark.symbol}
        series.append(Series([at], [mark.y], name, "open", **look))
    return series
