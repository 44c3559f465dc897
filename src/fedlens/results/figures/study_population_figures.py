"""Figures of the clients' data, without training: `populations` and `distributions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.format import many
from fedlens.results.data_json import CasePopulation, read_populations
from fedlens.results.figures.chart import (
    DASHES,
    TEN,
    Axis,
    Cells,
    Chart,
    Panel,
    Series,
    named_axis,
    shade,
    short,
    stacked_bars,
)
from fedlens.results.figures.partition_figures import (
    PartitionSample,
    client_name,
    emd_counts,
    rank_axes,
    ranked,
    sample_partition,
)
from fedlens.results.figures.study_panels import Columns
from fedlens.results.rows import Results
from fedlens.results.words import case_name

COUNTS = {
    "classes": "classes of the client",
    "examples": "examples of the client",
    "class": "training examples of the class",
    "test": "test examples of the class",
}
Populations: TypeAlias = list[tuple[str, CasePopulation]]  # each with its case in words
_GROUPS = 300  # of classes with a colour of their own
_CAPTIONS = {
    "bars": "Share of each class in the examples of each client",
    "matrix": "Number of examples of each class at each client",
    "classes": "Number of examples of each class, by the client that holds them",
}


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
    sampled = [f"At most {clients} clients of each case are shown."] if clients else []
    caption = f"{_CAPTIONS[style]}, at seed {shown[0][1].seed}."
    columns = columns or (1 if style == "classes" else len(shown) if len(shown) <= 5 else 4)
    make = {"bars": _bars, "matrix": _squares, "classes": _clients_of_classes}[style]
    panels = []
    for title, each in shown:
        at_most = clients or max(len(each.ids), 1)
        sample = sample_partition(each.partition, each.census, at_most, _GROUPS)
        panel = make(sample, _largest(each, shown))
        panels.append(replace(panel, title=short(title, 44 if columns > 2 else 80), note=""))
    return Chart("Classes of the clients", caption, panels, columns=columns, notes=sampled)


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
    caption = f"Counts from the largest down, one line a case, at seed {shown[0][1].seed}."
    panels = [_ranks(shown, name, log) for name in counts or ("classes", "examples")]
    return Chart("Counts by rank", caption, panels)


def shown_populations(
    study: Results, dataset: str | Sequence[str] | None, where: Mapping[str, Any] | None
) -> Populations:
    """The populations of the cases that a figure shows.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    if "populations" not in study.data:
        raise DataError(
            "data.json has no populations, which this figure shows",
            hint=f"run the study again: {study.info.command}",
        )
    names = [dataset] if isinstance(dataset, str) else dataset
    read = read_populations(study.data["populations"])
    chosen = [
        (", ".join(filter(None, [case_name(study.info, each.case), each.method])) or each.dataset, each)
        for each in read
        if all(_among(each.case.get(key), wanted) for key, wanted in (where or {}).items())
        and (names is None or each.dataset in names)
    ]
    if not chosen:
        datasets = sorted({each.dataset for each in read})
        what = f"no case has the data of {dataset!r}" if names else "the study has no populations"
        hint = nearest(str(names[0]), datasets) if names and datasets else "run the study first"
        raise ConfigError(what, where="figures.dataset", hint=hint)
    return chosen


def _among(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def _largest(each: CasePopulation, shown: Populations) -> int:
    """The largest count among the panels of the same data, so that their colours can be compared."""
    return max(max(other.counts, default=1) for _, other in shown if other.dataset == each.dataset)


def _bars(sample: PartitionSample, top: int) -> Panel:
    """Horizontal bars of shares, one a client (hsu2019, figure 1)."""
    series = stacked_bars(sample.shares().round(4), sample.labels, sample.ids, across=True)
    x = Axis("class distribution", "share", limits=(0, 1), ticks=(0, 0.5, 1))
    y = Axis("client", "hidden", limits=(len(sample.ids) - 0.5, -0.5))
    about = f"Stacked bars of the classes of {many(len(sample.ids), 'client')}."
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
    names = [sample.labels[k] for k in order]
    series = stacked_bars(sample.counts[:, order].T, [*map(client_name, sample.ids)], names)
    x = named_axis(Axis(limits=(-0.6, len(names) - 0.4), name_width=14), names)
    about = f"Stacked bars of the clients of {many(len(names), 'class', 'classes')}."
    return Panel("", about, x, Axis(sample.unit, "count"), series, stacked="up")


def _ranks(shown: Populations, name: str, log: str) -> Panel:
    """A line for each population, its counts from the largest down; those of classes that are the same once."""
    lines: list[Series] = []
    drawn: set[tuple[str, tuple[float, ...]]] = set()
    longest, highest, empty = 1, 1.0, 0
    of_class = name in ("class", "test")
    for title, each in shown:
        counts = _counts(each, name)
        positive = counts[counts > 0] if log in ("both", "y") else counts
        empty += len(counts) - len(positive)
        ranks, values = ranked(positive)
        key = (each.dataset, tuple(values))
        if of_class and key in drawn:
            continue  # partitions of the same data share them
        drawn.add(key)
        dash = DASHES[len(lines) // len(TEN) % 3]
        lines.append(Series(ranks, values, title, color=TEN[len(lines) % len(TEN)], dash=dash))
        longest, highest = max(longest, len(positive)), max(highest, float(counts.max(initial=0)))
    things = "classes" if of_class else "clients"
    x, y = rank_axes("class" if of_class else "client", COUNTS[name], longest, highest, log)
    return Panel(
        f"{COUNTS[name].capitalize()}, by rank",
        f"{COUNTS[name].capitalize()} from the largest down, {many(len(lines), 'line')}.",
        x,
        y,
        lines,
        f"{empty:,} {things} without any are not shown" if empty else "",
    )


def _counts(population: CasePopulation, name: str) -> NDArray[np.int64]:
    census = population.census
    if name == "classes":
        return census.classes_per_client()
    if name == "examples":
        return census.sizes
    return census.totals() if name == "class" else np.array(population.test, np.int64)


def emd_row(shown: Populations, axis: Axis) -> Panel:
    """The clients of each population by their EMD, the row above the metric (hsu2020, figure 4).

    Args:
        axis: that of the metric's panel, which is made wide enough for all clients.
    """
    lines, ends = [], list(axis.limits or ())
    for number, (title, each) in enumerate(shown):
        counts, edges = emd_counts(each.census)
        filled = np.flatnonzero(counts)
        if not len(filled):
            continue
        counts, edges = counts[filled[0] : filled[-1] + 1], edges[filled[0] : filled[-1] + 2]
        ends += [edges[0] - 0.02, edges[-1] + 0.02]
        steps = np.repeat(edges, 2), np.concatenate([[0], np.repeat(counts, 2), [0]])
        line = Series(steps[0].tolist(), steps[1].tolist(), title, "level", shade(number, len(shown)))
        lines.append(replace(line, width=1.5))
    wide = replace(axis, limits=(min(ends), max(ends)))
    about = f"Histograms of the clients' EMD, {many(len(lines), 'population')}."
    return Panel("Clients by EMD", about, wide, Axis("clients", "count"), lines)
