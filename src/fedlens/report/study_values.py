"""The final values of a study's runs, and the words below its figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import many
from fedlens.report.study_document_marks import DocumentMark, mark_series
from fedlens.report.study_groups import CENTRALIZED, FACTS, SeedGroups
from fedlens.report.study_panels import (
    SPREADS,
    Limits,
    PanelLayout,
    Spread,
    XScale,
    chance_level,
    metric_title,
    y_axis,
)
from fedlens.results.cells import METHOD, Cell
from fedlens.results.chart import GREY, Axis, Chart, Panel, Series, level
from fedlens.results.rows import Results, Role

_INK = "#3c4350"  # of the paper's marks on bars


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
            tuned = {key for group in tune.cells for key in group.keys} | grid_keys
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
    band: Spread = "none"
    stated: Sequence[DocumentMark] = ()

    def finals(self, group: Cell) -> list[float]:
        """The final values of runs of several seeds, relative to centralized ones if asked; none if one was lost.

        Raises `ConfigError` if they are to be relative and the study has no method `centralized`.
        """
        last = self.shown.results.info.last
        values = group.finals(self.metric, last)
        if not self.relative:
            return list(values.values())
        bound = self._bound(group)
        if not bound:
            return []
        mean = statistics.fmean(bound.values())
        paired = all(seed in bound for seed in values)
        return [value / (bound[seed] if paired else mean) for seed, value in values.items()]

    def _bound(self, group: Cell) -> dict[int, float]:
        references = [each for each in self.shown.cells if each.keys[METHOD] == CENTRALIZED]
        if not references:
            methods = self.shown.results.info.methods
            raise ConfigError(
                "relative values need a method named 'centralized'",
                where="figures.relative",
                hint=nearest(CENTRALIZED, methods),
            )
        case = {key: value for key, value in group.keys.items() if key != METHOD}
        same = [each for each in references if all(each.keys.get(k, v) == v for k, v in case.items())]
        last = self.shown.results.info.last
        reference_values = [each.finals(self.metric, last) for each in same or references]
        filled = [values for values in reference_values if values]
        return filled[0] if same and filled else filled[0] if len(filled) == 1 else {}

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
        numbers = sorted({len(group.done) for group in self.chosen if group.done})
        seeds = many(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"
        last = self.shown.results.info.last
        what = f" (mean of the last {last} evaluations)" if last > 1 and "against" in self.title else ""
        sentences = [
            f"{self.title}{what}." if numbers[-1] == 1 else f"{self.title}{what}: mean over {seeds}."
        ]
        if numbers[-1] > 1 and self.band != "none":
            sentences.append(f"Bands are {SPREADS[self.band]}.")
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
