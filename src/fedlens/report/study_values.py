"""The final values of a study's runs, and the words below its figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import many
from fedlens.report.study_groups import CENTRALIZED, FACTS, SeedGroups
from fedlens.report.study_panels import SPREADS, PanelLayout, Spread
from fedlens.results.cells import METHOD, Cell
from fedlens.results.chart import GREY, Series
from fedlens.results.rows import Results, Role


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


@dataclass(frozen=True)
class Finals:
    """The final values of runs, relative to those of the centralized method if asked."""

    runs: SeedGroups
    metric: str
    relative: bool

    def __call__(self, group: Cell) -> list[float]:
        """The values of some runs that differ in the seed; none if one of them was lost.

        Raises `ConfigError` if they are to be relative and the study has no method `centralized`.
        """
        last = self.runs.results.info.last
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
        references = [each for each in self.runs.cells if each.keys[METHOD] == CENTRALIZED]
        if not references:
            methods = self.runs.results.info.methods
            raise ConfigError(
                "relative values need a method named 'centralized'",
                where="figures.relative",
                hint=nearest(CENTRALIZED, methods),
            )
        case = {key: value for key, value in group.keys.items() if key != METHOD}
        same = [each for each in references if all(each.keys.get(k, v) == v for k, v in case.items())]
        last = self.runs.results.info.last
        reference_values = [each.finals(self.metric, last) for each in same or references]
        filled = [values for values in reference_values if values]
        return filled[0] if same and filled else filled[0] if len(filled) == 1 else {}


def has_values(series: Series) -> bool:
    """Whether a series has a value."""
    return any(value is not None for value in series.y)


def start(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def caption_of(
    study: Results,
    title: str,
    groups: Sequence[Cell],
    band: Spread,
    role: Role,
    relative: bool,
    document: bool,
    chance: float | None,
    layout: PanelLayout,
) -> str:
    """Sentences on the lines, bands and markers of a figure."""
    numbers = sorted({len(group.done) for group in groups if group.done})
    seeds = many(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"
    last = study.info.last
    what = f" (mean of the last {last} evaluations)" if last > 1 and "against" in title else ""
    sentences = [f"{title}{what}." if numbers[-1] == 1 else f"{title}{what}: mean over {seeds}."]
    if numbers[-1] > 1 and band != "none":
        sentences.append(f"Bands are {SPREADS[band]}.")
    elif numbers[-1] == 1:
        sentences.append("One seed, so no interval.")
    if role == "tune":
        sentences.append("Runs of tuning, measured on validation data.")
    if relative:
        sentences.append("Values are divided by those of centralized training (hsu2020, section 6).")
    if any(line.color == GREY for panel in layout.panels for line in panel.lines):
        sentences.append("Dashed: centralized training.")
    if chance is not None:
        sentences.append(f"Dotted: guessing ({100 * chance:.3g} %).")
    if document:
        source = study.info.document.get("source")
        marks = "Open markers and dash-dotted lines"
        sentences.append(
            f"{marks}: numbers that the document states{f' ({source})' if source else ''}; "
            "a triangle is a bound, and points to where the value lies."
        )
    if layout.left_out:
        sentences.append(layout.left_out)
    return " ".join(sentences)
