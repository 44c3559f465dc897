"""Figures of the populations of a study: classes of clients, and counts by rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import many, setting
from fedlens.report import pictures, plotly_figures
from fedlens.report.downsample import PartitionSample, ranked, sample_partition, short
from fedlens.report.figures import Axis, Figure, Series
from fedlens.report.palette import TEN, class_colors, shade
from fedlens.report.partition_figures import emd_counts
from fedlens.report.render import Plot
from fedlens.results.populations import CasePopulation

STYLES = ("bars", "matrix", "classes")
COUNTS = {
    "classes": "classes of the client",
    "examples": "examples of the client",
    "class": "training examples of the class",
    "test": "test examples of the class",
}
_COLORS, _NAMED = 100, 25  # classes with a colour of their own; names on an axis
_PANEL, _ROW = 1.9, 2.5  # inches


@dataclass(frozen=True)
class Panel:
    """One population of a figure, and its title."""

    title: str
    population: CasePopulation


def panels(
    populations: Sequence[CasePopulation], dimensions: Mapping[str, str], spec: Mapping[str, Any]
) -> list[Panel]:
    """The populations that a figure or a table shows, each with the name of its case.

    `spec` chooses with `dataset`, a name or a list of them; all by default. Raises `ConfigError` where none is left.
    """
    wanted = spec.get("dataset")
    names = [wanted] if isinstance(wanted, str) else wanted
    chosen = [p for p in populations if names is None or p.dataset in names]
    if not chosen:
        datasets = sorted({p.dataset for p in populations})
        what = f"no case has the data of {wanted!r}" if names else "the study has no populations"
        hint = nearest(str(names[0]), datasets) if names and datasets else "run the study first"
        raise ConfigError(what, where="figures.dataset", hint=hint)
    return [Panel(case_title(p, dimensions), p) for p in chosen]


def case_title(population: CasePopulation, dimensions: Mapping[str, str]) -> str:
    """The case of a population in words: "alpha 0.1"; a named case is its own title.

    >>> case = {"data.partition.alpha": 100.0, "case": "small"}
    >>> p = CasePopulation("", case, "", 0, "digits", {}, [], [], [], [], [], [])
    >>> case_title(p, {"data.partition.alpha": "alpha"})
    'alpha 100, small'
    """
    parts = [
        str(value) if key == "case" else f"{dimensions.get(key, key.rpartition('.')[2])} {_short(value)}"
        for key, value in population.case.items()
    ]
    return ", ".join(filter(None, [*parts, population.method])) or population.dataset


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else setting(value)


# Classes of clients


def population_picture(shown: Sequence[Panel], spec: Mapping[str, Any]) -> pictures.Picture:
    """A panel for each population: stacked bars (hsu2019, figure 1), squares (fedcv, figures 3 and 11), or the clients
    of each class (fedcv, figure 10)."""
    style = _style_of(spec)
    clients = int(spec.get("clients") or 0)
    samples = [_sample(panel.population, clients) for panel in shown]
    columns = int(spec.get("columns") or (1 if style == "classes" else len(shown) if len(shown) <= 5 else 4))
    rows = math.ceil(len(shown) / columns)
    tall = max(len(s.labels) for s in samples) if style == "matrix" else max(len(s.ids) for s in samples)
    height = 0.7 + (2.0 if style == "classes" else min(max(0.13 * tall, 1.4), _ROW)) * rows
    width = 6.4 if columns == 1 else max(0.6 + _PANEL * columns, 4.0)
    picture = pictures.new_picture(width, height)
    grid = picture.subplots(rows, columns, squeeze=False)
    for axes in grid.ravel()[len(shown) :]:
        axes.set_visible(False)
    for place, (axes, panel, sample) in enumerate(zip(grid.ravel(), shown, samples, strict=False)):
        first = place % columns == 0
        if style == "bars":
            _bars(axes, sample, first)
        elif style == "classes":
            _clients_of_classes(axes, sample)
        else:
            image = _squares(axes, sample, _largest(panel, shown), first)
            after = shown[place + 1] if place + 1 < len(shown) and (place + 1) % columns else None
            if after is None or after.population.dataset != panel.population.dataset:
                _scale_of(picture, axes, image, sample.unit)
        axes.set_title(short(panel.title, 44 if columns > 2 else 80), fontsize=8)
    return picture


def population_plots(shown: Sequence[Panel], spec: Mapping[str, Any]) -> list[Plot]:
    """The same for a page: one plot for each population."""
    matrix = _style_of(spec) == "matrix"
    plots = []
    for panel in shown:
        sample = _sample(panel.population, int(spec.get("clients") or 0))
        figure = plotly_figures.class_matrix(sample) if matrix else plotly_figures.class_bars(sample)
        about = (
            f"{'Heat map' if matrix else 'Stacked bars'} of the classes of {many(len(sample.ids), 'client')}."
        )
        legend = not matrix and len(sample.labels) <= len(TEN) * 2
        plots.append(Plot(figure, panel.title, about, shape="low", legend=legend))
    return plots


def _style_of(spec: Mapping[str, Any]) -> str:
    style = str(spec.get("style", "bars"))
    if style not in STYLES:
        raise ConfigError(
            f"unknown style '{style}' of a figure of populations",
            where="figures.style",
            hint=nearest(style, STYLES),
        )
    return style


def _sample(population: CasePopulation, clients: int) -> PartitionSample:
    at_most = clients or max(len(population.ids), 1)
    return sample_partition(population.partition, population.census, at_most, 300)


def _largest(panel: Panel, shown: Sequence[Panel]) -> int:
    """The largest count among the panels of the same data, so that their colours can be compared."""
    same = [p.population for p in shown if p.population.dataset == panel.population.dataset]
    return max((max(p.counts, default=1) for p in same), default=1)


def _bars(axes: Any, sample: PartitionSample, first: bool) -> None:
    """Horizontal bars of shares, one a client."""
    colors, shares = class_colors(len(sample.labels)), sample.shares()
    lefts, places = np.zeros(len(sample.ids)), np.arange(len(sample.ids))
    for share, color in zip(shares.T, colors, strict=True):
        some = share > 0
        axes.barh(places[some], share[some], 1.0, lefts[some], color=color, linewidth=0)
        lefts += share
    axes.set(xlim=(0, 1), ylim=(len(sample.ids) - 0.5, -0.5), xlabel="class distribution")
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_yticks([])
    if first:
        axes.set_ylabel("client")


def _squares(axes: Any, sample: PartitionSample, top: int, first: bool) -> Any:
    """A matrix of classes by clients: the darker, the more examples."""
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5 if sample.fine() and top > 1 else 1.0, 0, max(top, 1))
    image = axes.imshow(sample.counts.T, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    few = len(sample.ids) <= _NAMED
    axes.set_xticks(range(len(sample.ids)) if few else [], list(sample.ids) if few else [], fontsize=6)
    axes.set_xlabel("client" if few else f"{len(sample.ids)} clients")
    named = first and len(sample.labels) <= _NAMED
    names = [short(label, 14) for label in sample.labels] if named else []
    axes.set_yticks(range(len(names)), names, fontsize=6)
    if not named:
        axes.set_ylabel(f"{len(sample.labels)} classes" if first else "")
    return image


def _scale_of(picture: Any, axes: Any, image: Any, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=5, integer=True)
    bar = picture.colorbar(image, ax=axes, aspect=30, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6)
    bar.ax.set_title(unit, fontsize=6)


def _clients_of_classes(axes: Any, sample: PartitionSample) -> None:
    """A bar a class, the most frequent first, one colour a client."""
    order = np.argsort(-sample.counts.sum(axis=0), kind="stable")
    counts, colors = sample.counts[:, order], class_colors(len(sample.ids))
    bottoms = np.zeros(len(order))
    for row, color, name in zip(counts, colors, sample.ids, strict=True):
        axes.bar(np.arange(len(order)), row, 0.9, bottoms, color=color, linewidth=0, label=f" client {name}")
        bottoms += row
    names = [short(sample.labels[k], 14) for k in order]
    size = 6 if len(names) <= 40 else 4.5
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylabel=sample.unit)
    if len(sample.ids) <= len(TEN):
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1)


# Counts by rank


def distribution_figures(shown: Sequence[Panel], spec: Mapping[str, Any]) -> list[Figure]:
    """One figure for each of `counts`: a line for each population, its counts from the largest down.

    `counts` lists "classes" and "examples" of each client (hsu2020, figures 2b, 2c, 3, 10), and "class" and "test",
    the examples of each class (2a, 3). `log` is "both" by default, or "x", "y", "none". Zeros are left out of
    logarithmic axes. Populations with the same line in a figure of classes are drawn once.

    Raises `ConfigError` for other words.
    """
    asked = spec.get("counts", ["classes", "examples"])
    log = str(spec.get("log", "both"))
    if log not in ("both", "x", "y", "none"):
        raise ConfigError(f"unknown axes '{log}'", where="figures.log", hint="write both, x, y or none")
    figures = []
    for name in [asked] if isinstance(asked, str) else asked:
        if name not in COUNTS:
            raise ConfigError(
                f"unknown counts '{name}'", where="figures.counts", hint=nearest(str(name), COUNTS)
            )
        figures.append(_ranks(shown, name, log))
    return figures


def _ranks(shown: Sequence[Panel], name: str, log: str) -> Figure:
    lines: list[Series] = []
    drawn: set[tuple[str, tuple[float, ...]]] = set()
    longest, highest, empty = 1, 1.0, 0
    for panel in shown:
        counts = _counts(panel.population, name)
        positive = counts[counts > 0] if log in ("both", "y") else counts
        empty += len(counts) - len(positive)
        ranks, values = ranked(positive)
        per_class = name in ("class", "test")
        key = (panel.population.dataset, tuple(values))
        if per_class and key in drawn:
            continue  # partitions of the same data share them
        drawn.add(key)
        title = panel.title
        color = TEN[len(lines) % len(TEN)]
        dash = ("solid", "dash", "dot")[len(lines) // len(TEN) % 3]
        hover = f"{title}<br>number %{{x:,}}: %{{y:,}}<extra></extra>"
        lines.append(Series(ranks, values, title, color=color, dash=dash, hover=hover))
        longest, highest = max(longest, len(positive)), max(highest, float(counts.max(initial=0)))
    of_class = name in ("class", "test")
    thing = "class" if of_class else "client"
    log_x, log_y = log in ("both", "x"), log in ("both", "y")
    x_limits = (0.9, 1.12 * max(longest, 2)) if log_x else (0.0, 1.02 * longest)
    y_limits = (0.8, 1.25 * max(highest, 10)) if log_y else (0.0, 1.05 * highest)
    things = {"class": "classes", "client": "clients"}[thing]
    note = f"{empty:,} {things} without any are not shown" if empty else ""
    return Figure(
        f"{COUNTS[name].capitalize()}, by rank",
        f"{COUNTS[name].capitalize()} from the largest down, {many(len(lines), 'line')}.",
        Axis(f"{thing}, by rank", "count", log=log_x, limits=x_limits),
        Axis(COUNTS[name], "count", log=log_y, limits=y_limits),
        lines,
        note,
    )


def _counts(population: CasePopulation, name: str) -> NDArray[np.int64]:
    census = population.census
    if name == "classes":
        return census.classes_per_client()
    if name == "examples":
        return census.sizes
    return census.totals() if name == "class" else np.array(population.test, np.int64)


def emd_row(shown: Sequence[Panel], axis: Axis) -> Figure:
    """The clients of each population by their EMD, the row above the metric (hsu2020, figure 4).

    Args:
        axis: that of the metric's panel, which is made wide enough for all clients.
    """
    lines, ends = [], list(axis.limits or ())
    for number, panel in enumerate(shown):
        counts, edges = emd_counts(panel.population.census)
        filled = np.flatnonzero(counts)
        if not len(filled):
            continue
        counts, edges = counts[filled[0] : filled[-1] + 1], edges[filled[0] : filled[-1] + 2]
        ends += [edges[0] - 0.02, edges[-1] + 0.02]
        steps = np.repeat(edges, 2), np.concatenate([[0], np.repeat(counts, 2), [0]])
        hover = f"{panel.title}: %{{y:,}} clients<extra></extra>"
        line = Series(steps[0].tolist(), steps[1].tolist(), panel.title, "level", shade(number, len(shown)))
        lines.append(replace(line, width=1.5, hover=hover))
    wide = replace(axis, limits=(min(ends), max(ends)))
    about = f"Histograms of the clients' EMD, {many(len(lines), 'population')}."
    return Figure("Clients by EMD", about, wide, Axis("clients", "count"), lines)


def distribution_picture(shown: Sequence[Panel], spec: Mapping[str, Any]) -> pictures.Picture:
    """The figures of `distribution_figures` in a row, with one legend for all."""
    figures = distribution_figures(shown, spec)
    picture = pictures.new_picture(max(2.6 * len(figures), 3.4) + 1.2, 2.5)
    grid = np.ravel(picture.subplots(1, len(figures)))
    for axes, figure in zip(grid, figures, strict=True):
        pictures.draw_figure(axes, figure)
        if figure.note:
            axes.set_title(figure.note, fontsize=6, loc="left")
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    picture.legend(handles.values(), [short(name, 30) for name in handles], loc="outside right upper")
    return picture


def distribution_plots(shown: Sequence[Panel], spec: Mapping[str, Any]) -> list[Plot]:
    """The same for a page."""
    return [
        Plot.of(
            replace(
                figure,
                series=[replace(s, hover=s.hover or "%{x}: %{y}<extra></extra>") for s in figure.series],
            )
        )
        for figure in distribution_figures(shown, spec)
    ]
