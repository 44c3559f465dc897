"""The panels and lines of a study's figures: which cells they show, a paper's numbers beside them, and their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.format import capitalized, many
from fedlens.base.summary_text import conjoined
from fedlens.results.cells import METHOD, Cell, reference_of
from fedlens.results.figures.chart import DASHES, GREY, TEN, Axis, Chart, Panel, Series, level
from fedlens.results.figures.named_cells import CENTRALIZED, NamedCells, Names, bare, names_of
from fedlens.results.figures.study_axes import BANDS, Limits, XScale, chance_level, metric_title, y_axis
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.statistics import Band, ratios

Columns: TypeAlias = Annotated[int, Field(ge=1, le=8)]  # panels beside each other

PAPER = "paper"
_INK = "#3c4350"  # of the paper's marks on bars
_PANELS = 24  # at most


@dataclass(frozen=True)
class LineCells:
    """One line of a panel: the runs at each of its points, with the colour that it has in all panels."""

    name: str
    color: str
    dash: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class PanelCells:
    """The lines of a panel; `keys` are the settings that its runs share with no other panel."""

    title: str
    keys: Mapping[str, Any]
    lines: Sequence[LineCells]


@dataclass(frozen=True)
class DocumentMark:
    """One stated number in a panel.

    Attributes:
        x: its value on the axis, or its round; None for a number that holds along the whole axis.
        line: the line that it is compared with; None if the study does not run its method.
        number: of that line among the lines of its panel; the next one after them without a line.
        text: what it says and where.
        shared: whether it holds for further panels, which do not repeat it.
    """

    panel: PanelCells
    line: LineCells | None
    number: int
    x: Any
    y: float
    symbol: Literal["circle", "up", "down"]
    text: str
    shared: bool


@dataclass(frozen=True)
class StudyPanels:
    """The runs that a figure of a study shows, by panel and line.

    Args:
        chosen: all of them, before they were laid out in panels.
        line_keys: what lines differ in.
        metric: a column, "test_accuracy".
        about: what it is shown against: "against alpha".
        left_out: a sentence if the figure has fewer panels than there are cases.
        band: around the means over seeds.
        stated: the numbers of a paper beside them.
        asked: the cells whose gaps are told, if they are more than `chosen`.
    """

    shown: NamedCells
    chosen: Sequence[Cell]
    panels: Sequence[PanelCells]
    line_keys: Sequence[str]
    metric: str
    about: str
    relative: bool = False
    band: Band = "none"
    left_out: str = ""
    stated: Sequence[DocumentMark] = ()
    asked: Sequence[Cell] = ()

    @property
    def title(self) -> str:
        """The metric, and what it is shown against."""
        return f"{capitalized(metric_title(self.metric, self.relative))} {self.about}"

    @property
    def gaps(self) -> list[str]:
        """Sentences on failed and unfinished runs."""
        return self.shown.gaps(self.asked or self.chosen)

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
        place: XScale | None = None,
        unified: bool = False,
        above: Sequence[Panel] = (),
    ) -> Chart:
        """The series of each panel, with the level of guessing and the numbers of the paper, on shared axes.

        Args:
            axis: the x axis; `place` says where values stand on it.
            y: the ends of the axis of the metric; None fits them.
            chance: the value of guessing; None takes it from the runs.
            above: panels of something else.
        """
        guess = None if self.relative else chance_level(self.chosen, self.metric, chance, drawn, y)
        # The line of guessing is there already.
        stated = [one for one in self.stated if one.line or one.x is not None or one.y != guess]
        bars = any(series.kind == "bar" for series_of in drawn for series in series_of)
        ends = axis.limits or (0.0, 1.0)
        for panel, series_of in zip(self.panels, drawn, strict=True):
            if guess is not None:
                series_of.append(level(guess, ends, "chance"))
            marks = mark_series([mark for mark in stated if mark.panel is panel], place, ends)
            series_of += [replace(m, color=_INK) if bars and m.color != GREY else m for m in marks]
        up = y_axis(self.metric, metric_title(self.metric, self.relative), drawn, self.relative, y)
        if bars:
            up = replace(up, limits=(0.0, max((up.limits or (0.0, 1.0))[1], 0.0)))
        built = [
            Panel(panel.title, f"{self.title} {panel.title}", axis, up, series_of, unified=unified)
            for panel, series_of in zip(self.panels, drawn, strict=True)
        ]
        return replace(self, stated=stated).captioned([*above, *built], columns, guess)

    def captioned(self, panels: Sequence[Panel], columns: int | None, chance: float | None = None) -> Chart:
        """The panels with a caption, and with notes on the lines, bands and markers that they have."""
        numbers = sorted({len(cell.done) for cell in self.chosen if cell.done})
        seeds = many(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"
        last, source = self.shown.results.info.last, self.shown.results.info.document.get("source")
        what = f" (mean of the last {last} evaluations)" if last > 1 and "against" in self.title else ""
        single = numbers[-1] == 1
        drawn = [series for panel in panels for series in panel.series]
        spreads = {
            "bands": any(series.kind == "band" for series in drawn),
            "error bars": any(end is not None for series in drawn for end in series.low),
        }
        marks = {
            "open markers": any(series.kind == "open" for series in drawn),
            "dash-dotted lines": any((series.kind, series.dash) == ("level", "dashdot") for series in drawn),
        }
        ranges, stated = (
            conjoined([name for name, is_there in each.items() if is_there]) for each in (spreads, marks)
        )
        notes = (
            "One seed, so no interval." if single else "",
            f"{capitalized(ranges)} are {BANDS[self.band]}." if ranges else "",
            "Runs of tuning, measured on validation data." if self.shown.role == "tune" else "",
            "Values are divided by those of centralized training (hsu2020, section 6)."
            if self.relative
            else "",
            "Dashed: centralized training."
            if any((each.color, each.dash, each.kind) == (GREY, "dash", "line") for each in drawn)
            else "",
            "" if chance is None else f"Dotted: guessing ({100 * chance:.3g} %).",
            f"{capitalized(stated)}: numbers that the paper states{f' ({source})' if source else ''}."
            if stated
            else "",
            "A triangle is a bound, and points to where the value lies."
            if any(series.symbol != "circle" for series in drawn)
            else "",
            "A number that several panels share stands in the first."
            if any(mark.shared for mark in self.stated)
            else "",
            self.left_out,
        )
        caption = f"{self.title}{what}{'' if single else f': mean over {seeds}'}."
        return Chart(self.title, caption, panels, self.gaps, columns, notes=[*filter(None, notes)])


def arrange(
    runs: NamedCells,
    cells: Sequence[Cell],
    axes: Sequence[str],
    lines: Names,
    panels: Names | None,
    metric: str,
    about: str,
    relative: bool = False,
    points: bool = False,
) -> StudyPanels:
    """The runs by panel and line. Settings that differ and are neither on an axis nor a line make panels.

    Args:
        axes: the keys on the axes.
        lines, panels: what they differ in, as the study file names it.
        metric, about, relative: as in `StudyPanels`.
        points: whether the points of a line may differ in every setting of the case, so that none makes panels.
    """
    line_keys = [key for name in names_of(lines) if (key := runs.key(name, "figures.lines")) not in axes]
    panel_keys = [runs.key(name, "figures.panels") for name in names_of(panels)]
    used = {*axes, *line_keys, *panel_keys}
    differing = [key for key in runs.varying() if len({repr(cell.keys.get(key)) for cell in cells}) > 1]
    panel_keys += [key for key in differing if key not in used and (key == METHOD or not points)]
    styles = _styles(runs, line_keys)
    by_panel: dict[str, tuple[dict[str, Any], dict[str, list[Cell]]]] = {}
    for cell in cells:
        keys = {key: cell.keys[key] for key in panel_keys if key in cell.keys}
        _, by_line = by_panel.setdefault(repr(keys), (keys, {}))
        by_line.setdefault(_line_id(cell.keys, line_keys), []).append(cell)
    shown = [
        PanelCells(
            runs.title(keys, panel_keys),
            keys,
            [
                LineCells(_line_name(runs, by_line[line][0], line_keys), *styles[line], by_line[line])
                for line in styles
                if line in by_line
            ],
        )
        for keys, by_line in by_panel.values()
    ]
    for key in reversed(panel_keys):
        order = [repr(value) for value in runs.all_values(key)]
        shown.sort(key=lambda panel: order.index(repr(panel.keys[key])) if key in panel.keys else -1)
    left_out = ""
    if len(shown) > _PANELS:
        left_out = f"{_PANELS} of {len(shown)} panels are shown; choose others with `where`."
    return StudyPanels(runs, cells, shown[:_PANELS], line_keys, metric, about, relative, left_out=left_out)


def _line_name(runs: NamedCells, cell: Cell, line_keys: Sequence[str]) -> str:
    without = [f"no {runs.label(key)}" for key in line_keys if key not in cell.keys]
    return ", ".join(filter(None, [runs.title(cell.keys, line_keys), *without]))


def _styles(runs: NamedCells, line_keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash by line, the same in every figure of the study. The centralized method is grey and dashed."""
    ids: dict[str, Any] = {}
    cells = sorted(runs.cells, key=lambda g: [_rank(runs, key, g.keys.get(key)) for key in line_keys])
    for cell in cells:
        ids.setdefault(_line_id(cell.keys, line_keys), cell.keys.get(METHOD))
    styles, place = {}, 0
    for line, method in ids.items():
        if line_keys == [METHOD] and method == CENTRALIZED:
            styles[line] = (GREY, "dash")
            continue
        styles[line] = (TEN[place % len(TEN)], DASHES[place // len(TEN) % len(DASHES)])
        place += 1
    return styles


def _rank(runs: NamedCells, key: str, value: Any) -> int:
    values = list(runs.results.info.methods) if key == METHOD else runs.all_values(key)
    return values.index(value) if value in values else len(values)


def _line_id(keys: Mapping[str, Any], line_keys: Sequence[str]) -> str:
    return repr([keys.get(key) for key in line_keys])


def with_marks(drawing: StudyPanels, x_key: str | None, rounds: bool = False) -> StudyPanels:
    """The panels with the paper's numbers that belong to them.

    A number belongs to the panels and lines that its case does not contradict; it holds for all values of a dimension
    that it does not name. It stands once, in the first of its panels.

    Args:
        x_key: the setting on the x axis; None for curves.
        rounds: whether the x axis shows rounds, so that a number at a budget of rounds has a place.
    """
    shown, document, marks = drawing.shown, drawing.shown.results.info.document, []
    metric = f"relative_{bare(drawing.metric)}" if drawing.relative else drawing.metric
    source = str(document.get("source", ""))
    for stated in stated_values(document):
        budget = stated.at.get("rounds") if rounds else None
        if bare(stated.metric) != bare(metric) or (stated.at and budget is None):
            continue
        case = {shown.known_key(name): value for name, value in stated.case.items()}
        known = stated.method in shown.results.info.methods  # else it belongs to no line
        found = [
            (panel, _lines(panel, case, stated.method, drawing) if known else [])
            for panel in drawing.panels
            if not _contradicts(panel, case, stated.method, x_key, drawing)
        ]
        if known:  # without the panels that leave the method out
            found = [(panel, lines) for panel, lines in found if lines]
        for panel, lines in found[:1]:
            line = panel.lines[lines[0]] if lines else None
            method = stated_label(document, stated.method, shown.words(METHOD, stated.method))
            place = ", ".join(filter(None, [source, stated.where]))
            text = f"{PAPER}: {method} {stated.text} ({place})"
            x = budget if x_key is None else case.get(x_key, _only_place(line, case, x_key))
            number = lines[0] if lines else len(panel.lines)
            shared = len(found) > 1
            mark = DocumentMark(panel, line, number, x, stated.number, _symbol(stated), text, shared)
            marks.append(mark)
    return replace(drawing, stated=marks)


def _only_place(line: LineCells | None, case: Mapping[str, Any], x_key: str) -> Any:
    """The value on the axis of the only point that a case is about; None if it is about several or none."""
    cells = line.cells if line and case else ()
    same = [g for g in cells if all(g.keys.get(key) == value for key, value in case.items())]
    return same[0].keys.get(x_key) if len(same) == 1 else None


def _contradicts(
    panel: PanelCells, case: Mapping[str, Any], method: str, x_key: str | None, drawing: StudyPanels
) -> bool:
    if METHOD in panel.keys and panel.keys[METHOD] != method:
        return True
    named = {key: value for key, value in case.items() if key != x_key and key not in drawing.line_keys}
    shown = [cell.keys for line in panel.lines for cell in line.cells]
    return any(all(keys.get(key) != value for keys in shown) for key, value in named.items())


def _lines(panel: PanelCells, case: Mapping[str, Any], method: str, drawing: StudyPanels) -> list[int]:
    wanted = {**case, METHOD: method}
    return [
        k
        for k, line in enumerate(panel.lines)
        if all(key not in wanted or line.cells[0].keys.get(key) == wanted[key] for key in drawing.line_keys)
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
        name, group = ("", PAPER) if series else (PAPER, "")
        look: dict[str, Any] = {"color": color, "texts": [mark.text] * 2, "group": group}
        if mark.x is None:
            series.append(level(mark.y, limits, name, "dashdot", **look))
            continue
        at = float(mark.x) if place is None else place.beside(mark.x, mark.number, len(mark.panel.lines))
        look |= {"texts": [mark.text], "symbol": mark.symbol}
        series.append(Series([at], [mark.y], name, "open", **look))
    return series


def no_values(title: str, gaps: Sequence[str]) -> DataError:
    """The error for a figure that no run has values for."""
    return DataError(f"no run has values for the figure '{title}'", hint=" ".join(gaps) or None)
