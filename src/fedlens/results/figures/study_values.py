"""The final values of a study's runs, and the words below its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import many
from fedlens.results.cells import METHOD, Cell, reference_of
from fedlens.results.figures.chart import GREY, Axis, Chart, Panel, Series, level
from fedlens.results.figures.study_groups import CENTRALIZED, FACTS, SeedGroups, bare
from fedlens.results.figures.study_panels import (
    BANDS,
    Limits,
    LineRuns,
    PanelLayout,
    PanelRuns,
    XScale,
    chance_level,
    metric_title,
    y_axis,
)
from fedlens.results.rows import Results, Role
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.statistics import Band, ratios

NAME = "paper"
_INK = "#3c4350"  # of the paper's marks on bars


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
    cells: SeedGroups, layout: PanelLayout, metric: str, x_key: str | None, rounds: bool = False
) -> list[DocumentMark]:
    """The numbers of a metric that belong to the panels of a figure.

    A number belongs to the panels and lines that its case does not contradict; it holds for all values of a dimension
    that it does not name.

    Args:
        x_key: the setting on the x axis; None for curves.
        rounds: whether the x axis shows rounds, so that a number at a budget of rounds has a place.
    """
    source = str(cells.results.info.document.get("source", ""))
    marks = []
    for stated in stated_values(cells.results.info.document):
        budget = stated.at.get("rounds") if rounds else None
        if bare(stated.metric) != bare(metric) or (stated.at and budget is None):
            continue
        case = {cells.known_key(name): value for name, value in stated.case.items()}
        for panel in layout.panels:
            if _contradicts(panel, case, stated.method, x_key, layout):
                continue
            lines = _lines(panel, case, stated.method, layout)
            if not lines and stated.method in cells.results.info.methods:
                continue  # the figure leaves the method out
            line = panel.lines[lines[0]] if lines else None
            label = cells.words(METHOD, stated.method)
            method = stated_label(cells.results.info.document, stated.method, label)
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
    cells = line.cells if line and case else ()
    same = [g for g in cells if all(g.keys.get(key) == value for key, value in case.items())]
    return same[0].keys.get(x_key) if len(same) == 1 else None


def _contradicts(
    panel: PanelRuns, case: Mapping[str, Any], method: str, x_key: str | None, layout: PanelLayout
) -> bool:
    if METHOD in panel.keys and panel.keys[METHOD] != method:
        return True
    named = {key: value for key, value in case.items() if key != x_key and key not in layout.line_keys}
    shown = [cell.keys for line in panel.lines for cell in line.cells]
    return any(all(keys.get(key) != value for keys in shown) for key, value in named.items())


def _lines(panel: PanelRuns, case: Mapping[str, Any], method: str, layout: PanelLayout) -> list[int]:
    wanted = {**case, METHOD: method}
    return [
        k
        for k, line in enumerate(panel.lines)
        if all(key not in wanted or line.cells[0].keys.get(key) == wanted[key] for key in layout.line_keys)
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


def runs_of(study: Results, role: Role | None, names: Sequence[str]) -> SeedGroups:
    """The runs of a role; without one the final runs, or those of tuning if a name is a setting of tuning alone."""
    names = [name for name in names if name not in FACTS]
    if role is not None:
        return SeedGroups.of(study, role)
    final, tune = SeedGroups.of(study, "final"), SeedGroups.of(study, "tune")
    for name in names:
        try:
            final.key(name, "figures")
        except ConfigError:
            grid_keys = {key for grid in study.info.grids.values() for key in grid}
            tuned = {key for cell in tune.cells for key in cell.keys} | grid_keys
            if name in tuned or name in {key.rpartition(".")[2] for key in tuned}:
                return tune
    return final


def has_values(series: Series) -> bool:
    """Whether a series has a value."""
    return any(value is not None for value in series.y)


@dataclass(frozen=True)
class StudyPanels:
    """The runs that a figure of a study shows, by panel and line.

    Args:
        chosen: all of them, before they were laid out in panels.
        metric: a column, "test_accuracy".
        band: around the means over seeds.
        stated: the numbers of a document beside them.
    """

    shown: SeedGroups
    chosen: Sequence[Cell]
    layout: PanelLayout
    title: str
    metric: str
    relative: bool = False
    band: Band = "none"
    stated: Sequence[DocumentMark] = ()

    def finals(self, cell: Cell) -> list[float]:
        """The final values over seeds, relative to centralized ones if asked; none if a run was lost.

        Raises `ConfigError` if they are to be relative and the study has no method `centralized`.
        """
        last, values = self.shown.results.info.last, cell.finals(self.metric, self.shown.results.info.last)
        if not self.relative:
            return list(values.values())
        if not any(each.method == CENTRALIZED for each in self.shown.cells):
            raise ConfigError(
                "relative values need a method named 'centralized'",
                where="figures.relative",
                hint=nearest(CENTRALIZED, self.shown.results.info.methods),
            )
        reference = reference_of(self.shown.cells, CENTRALIZED, cell)
        return ratios(values, reference.finals(self.metric, last)) if reference else []

    def chart(
        self,
        axis: Axis,
        drawn: Sequence[list[Series]],
        y: Limits | None,
        chance: float | None,
        columns: int | None,
        gaps: Sequence[str],
        place: XScale | None = None,
        unified: bool = False,
        above: Sequence[Panel] = (),
    ) -> Chart:
        """The series of each panel, with the level of guessing and the numbers of the document, on shared axes.

        Args:
            axis: the x axis; `place` says where values stand on it.
            y: the ends of the axis of the metric; None fits them.
            chance: the value of guessing; None takes it from the runs.
            above: panels of something else.
        """
        guess = None if self.relative else chance_level(self.chosen, self.metric, chance, drawn, y)
        bars = any(series.kind == "bar" for series_of in drawn for series in series_of)
        ends = axis.limits or (0.0, 1.0)
        for panel, series_of in zip(self.layout.panels, drawn, strict=True):
            if guess is not None:
                series_of.append(level(guess, ends, "chance"))
            marks = mark_series([mark for mark in self.stated if mark.panel is panel], place, ends)
            series_of += [replace(m, color=_INK) if bars and m.color != GREY else m for m in marks]
        up = y_axis(self.metric, metric_title(self.metric, self.relative), drawn, self.relative, y)
        if bars:
            up = replace(up, limits=(0.0, max((up.limits or (0.0, 1.0))[1], 0.0)))
        built = [
            Panel(panel.title, f"{self.title} {panel.title}", axis, up, series_of, unified=unified)
            for panel, series_of in zip(self.layout.panels, drawn, strict=True)
        ]
        return Chart(self.title, self.caption(guess), [*above, *built], gaps, columns)

    def caption(self, chance: float | None = None) -> str:
        """Sentences on the lines, bands and markers of a figure."""
        numbers = sorted({len(cell.done) for cell in self.chosen if cell.done})
        seeds = many(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"
        last = self.shown.results.info.last
        what = f" (mean of the last {last} evaluations)" if last > 1 and "against" in self.title else ""
        sentences = [
            f"{self.title}{what}." if numbers[-1] == 1 else f"{self.title}{what}: mean over {seeds}."
        ]
        if numbers[-1] > 1 and self.band != "none":
            sentences.append(f"Bands are {BANDS[self.band]}.")
        elif numbers[-1] == 1:
            sentences.append("One seed, so no interval.")
        if self.shown.role == "tune":
            sentences.append("Runs of tuning, measured on validation data.")
        if self.relative:
            sentences.append("Values are divided by those of centralized training (hsu2020, section 6).")
        if any(line.color == GREY for panel in self.layout.panels for line in panel.lines):
            sentences.append("Dashed: centralized training.")
        if chance is not None:
            sentences.append(f"Dotted: guessing ({100 * chance:.3g} %).")
        if self.stated:
            source = self.shown.results.info.document.get("source")
            marks = "Open markers and dash-dotted lines"
            sentences.append(
                f"{marks}: numbers that the document states{f' ({source})' if source else ''}; "
                "a triangle is a bound, and points to where the value lies."
            )
        if self.layout.left_out:
            sentences.append(self.layout.left_out)
        return " ".join(sentences)
