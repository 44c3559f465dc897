"""Figures of the clients' data, without training: `populations` and `distributions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.format import many, setting
from fedlens.report.downsample import PartitionSample, ranked, sample_partition
from fedlens.report.partition_figures import emd_counts
from fedlens.report.study_panels import Columns
from fedlens.results.chart import Axis, Cells, Chart, Panel, Series, named_axis, short
from fedlens.results.palette import TEN, class_colors, shade
from fedlens.results.populations import CasePopulation, read_populations
from fedlens.results.rows import Results

COUNTS = {
    "classes": "classes of the client",
    "examples": "examples of the client",
    "class": "training examples of the class",
    "test": "test examples of the class",
}
_GROUPS = 300  # of classes with a colour of their own
_CAPTIONS = {
    "bars": "Share of each class in the examples of each client.",
    "matrix": "Number of examples of each class at each client.",
    "classes": "Number of examples of each class, by the client that holds them.",
}


@dataclass(frozen=True)
class NamedPopulation:
    """One population of a figure, and its title."""

    title: str
    population: CasePopulation


def named_populations(
    populations: Sequence[CasePopulation], dimensions: Mapping[str, str], dataset: str | Sequence[str] | None
) -> list[NamedPopulation]:
    """The populations that a figure or a table shows, each with the name of its case.

    `dataset` is a name or a list of them; all by default. Raises `ConfigError` where none is left.
    """
    names = [dataset] if isinstance(dataset, str) else dataset
    chosen = [p for p in populations if names is None or p.dataset in names]
    if not chosen:
        datasets = sorted({p.dataset for p in populations})
        what = f"no case has the data of {dataset!r}" if names else "the study has no populations"
        hint = nearest(str(names[0]), datasets) if names and datasets else "run the study first"
        raise ConfigError(what, where="figures.dataset", hint=hint)
    return [NamedPopulation(case_title(p, dimensions), p) for p in chosen]


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


def populations_figure(
    study: Results,
    *,
    style: Literal["bars", "matrix", "classes"] = "bars",
    where: dict[str, Any] | None = None,
    dataset: str | list[str] | None = None,
    clients: int | None = None,
    columns: Columns | None = None,
) -> Chart:
    """The classes of each client, one panel a case.

    Args:
        style: "bars" is hsu2019, figure 1; "matrix" fedcv, figures 3 and 11; "classes" fedcv, figure 10.
        where: the cases that are shown, by dimension: a value or a list of values.
        dataset: the data that are shown; all by default.
        clients: how many clients are shown, evenly spread over the sizes; all by default.
        columns: of panels beside each other.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    shown = shown_populations(study, dataset, where)
    sampled = f" {clients} clients of each case are shown." if clients else ""
    caption = f"{_CAPTIONS[style]}{sampled} Seed {shown[0].population.seed}."
    columns = columns or (1 if style == "classes" else len(shown) if len(shown) <= 5 else 4)
    make = {"bars": _bars, "matrix": _squares, "classes": _clients_of_classes}[style]
    panels = []
    for each in shown:
        at_most = clients or max(len(each.population.ids), 1)
        sample = sample_partition(each.population.partition, each.population.census, at_most, _GROUPS)
        panel = make(sample, _largest(each, shown))
        panels.append(replace(panel, title=short(each.title, 44 if columns > 2 else 80), note=""))
    return Chart("Classes of the clients", caption, panels, columns=columns)


def distributions_figure(
    study: Results,
    *,
    counts: list[Literal["classes", "examples", "class", "test"]] | None = None,
    where: dict[str, Any] | None = None,
    dataset: str | list[str] | None = None,
    log: Literal["both", "x", "y", "none"] = "both",
) -> Chart:
    """Counts from the largest down, one line a case (hsu2020, figures 2, 3 and 10).

    Args:
        counts: a panel each: "classes" and "examples" of a client, "class" and "test" for the training and the test
            examples of a class.
        where, dataset: as for `populations_figure`.
        log: which axes are logarithmic. Zeros are left out of a logarithmic axis, and counted in a note.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    shown = shown_populations(study, dataset, where)
    caption = f"Counts from the largest down, one line a case. Seed {shown[0].population.seed}."
    panels = [_ranks(shown, name, log) for name in counts or ("classes", "examples")]
    return Chart("Counts by rank", caption, panels)


def shown_populations(
    study: Results, dataset: str | Sequence[str] | None, where: Mapping[str, Any] | None
) -> list[NamedPopulation]:
    """The populations of the cases that a figure shows.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    if "populations" not in study.data:
        raise DataError(
            "data.json has no populations, which this figure shows",
            hint=f"run the study again: {study.info.command}",
        )
    populations = [
        each
        for each in read_populations(study.data["populations"])
        if all(_among(each.case.get(key), wanted) for key, wanted in (where or {}).items())
    ]
    return named_populations(populations, study.info.dimensions, dataset)


def _among(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def _largest(each: NamedPopulation, shown: Sequence[NamedPopulation]) -> int:
    """The largest count among the panels of the same data, so that their colours can be compared."""
    same = [p.population for p in shown if p.population.dataset == each.population.dataset]
    return max((max(p.counts, default=1) for p in same), default=1)


def _bars(sample: PartitionSample, top: int) -> Panel:
    """Horizontal bars of shares, one a client (hsu2019, figure 1)."""
    places = list(range(len(sample.ids)))
    series = [
        Series(shares.round(4).tolist(), places, short(label, 60), "bar", color, texts=sample.ids)
        for shares, label, color in zip(
            sample.shares().T, sample.labels, class_colors(len(sample.labels)), strict=True
        )
    ]
    x = Axis("class distribution", "share", limits=(0, 1), ticks=(0, 0.5, 1))
    y = Axis("client", "hidden", limits=(len(places) - 0.5, -0.5))
    about = f"Stacked bars of the classes of {many(len(places), 'client')}."
    return Panel("", about, x, y, series, stacked="across")


def _squares(sample: PartitionSample, top: int) -> Panel:
    """A matrix of classes by clients: the darker, the more examples (fedcv, figures 3 and 11)."""
    clients, classes = len(sample.ids), len(sample.labels)
    middle = 0.25 if sample.fine() and top > 1 else 0.5
    cells = Cells(
        sample.counts.T.astype(float),
        sample.labels,
        sample.ids,
        sample.unit,
        (0, max(top, 1)),
        "count",
        middle,
    )
    x = named_axis(Axis("client"), sample.ids, f"{clients} clients")
    y = named_axis(Axis(name_width=14), sample.labels, f"{classes} classes")
    about = f"Heat map of the classes of {many(clients, 'client')}."
    return Panel("", about, x, y, cells=cells)


def _clients_of_classes(sample: PartitionSample, top: int) -> Panel:
    """A bar a class, the most frequent first, one colour a client (fedcv, figure 10)."""
    order = np.argsort(-sample.counts.sum(axis=0), kind="stable")
    names, places = [sample.labels[k] for k in order], list(range(len(order)))
    series = [
        Series(
            places, counts.tolist(), f"client {name}" if name.isdecimal() else name, "bar", color, texts=names
        )
        for counts, name, color in zip(
            sample.counts[:, order], sample.ids, class_colors(len(sample.ids)), strict=True
        )
    ]
    x = named_axis(Axis(limits=(-0.6, len(names) - 0.4), name_width=14), names)
    about = f"Stacked bars of the clients of {many(len(names), 'class', 'classes')}."
    return Panel("", about, x, Axis(sample.unit, "count"), series, stacked="up")


def _ranks(shown: Sequence[NamedPopulation], name: str, log: str) -> Panel:
    """A line for each population, its counts from the largest down; those of classes that are the same once."""
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
        lines.append(Series(ranks, values, title, color=color, dash=dash))
        longest, highest = max(longest, len(positive)), max(highest, float(counts.max(initial=0)))
    of_class = name in ("class", "test")
    thing = "class" if of_class else "client"
    log_x, log_y = log in ("both", "x"), log in ("both", "y")
    x_limits = (0.9, 1.12 * max(longest, 2)) if log_x else (0.0, 1.02 * longest)
    y_limits = (0.8, 1.25 * max(highest, 10)) if log_y else (0.0, 1.05 * highest)
    things = {"class": "classes", "client": "clients"}[thing]
    note = f"{empty:,} {things} without any are not shown" if empty else ""
    return Panel(
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


def emd_row(shown: Sequence[NamedPopulation], axis: Axis) -> Panel:
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
        line = Series(steps[0].tolist(), steps[1].tolist(), panel.title, "level", shade(number, len(shown)))
        lines.append(replace(line, width=1.5))
    wide = replace(axis, limits=(min(ends), max(ends)))
    about = f"Histograms of the clients' EMD, {many(len(lines), 'population')}."
    return Panel("Clients by EMD", about, wide, Axis("clients", "count"), lines)
