"""The partition of a run as a picture: who has how much of what."""

from __future__ import annotations

import numpy as np

from fedlens.report import figures, parts
from fedlens.report.format import count, number
from fedlens.report.read import Run

_LEGEND_AT_MOST = 24


def partition_section(run: Run) -> str:
    """Class bars as in figure 1 of hsu2019; for many clients a sample of them, a heat map and the sizes."""
    if run.sizes is None or not len(run.sizes):
        return ""
    counts = run.class_counts
    if counts is None:
        body = _facts(run) + (_sizes(run.sizes) if np.ptp(run.sizes) else "")
        return parts.card(body, "Who has what", "This run recorded sizes only, no classes.")
    body = _facts(run) + _bars(run, counts)
    if len(counts) > figures.BARS_AT_MOST:
        heat = _heat(run, counts)
        body += f'<div class="pair wide-left">{heat}{_sizes(run.sizes)}</div>' if np.ptp(run.sizes) else heat
    return parts.card(body, "Who has what")


def _facts(run: Run) -> str:
    sizes = run.sizes
    assert sizes is not None
    even = np.ptp(sizes) == 0
    said = [("Clients", count(len(sizes))), ("Examples", count(int(sizes.sum())))]
    if even:
        said.append(("Examples a client", count(int(sizes[0]))))
    else:
        low, middle, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        said.append(("Smallest, median, largest", f"{low:,}, {middle:,.0f}, {high:,}"))
    if run.class_counts is not None:
        held = (run.class_counts > 0).sum(axis=1)
        low, high = int(held.min()), int(held.max())
        said.append(("Classes a client", f"{low}" if low == high else f"{low} to {high}"))
        said.append(("Classes", count(run.class_counts.shape[1])))
    if (emd := run.emd()) is not None:
        said.append(("Mean EMD (0 alike, 2 apart)", number(round(emd, 3))))
    return parts.facts(said)


def _bars(run: Run, counts: np.ndarray) -> str:
    shown = figures.evenly(len(counts), figures.BARS_AT_MOST)
    figure = figures.class_bars(counts[shown], [run.client_ids[k] for k in shown], run.classes)
    title = "Classes of each client"
    if len(shown) < len(counts):
        title = f"Classes of {len(shown)} of {count(len(counts))} clients, evenly spread"
    about = f"Stacked bars: the examples of {len(shown)} clients by class."
    shares = parts.View(
        "shares",
        layout={
            "barnorm": "percent",
            "yaxis.tickformat": "",
            "yaxis.ticksuffix": " %",
            "yaxis.title.text": "",
        },
    )
    plain = parts.View(
        "examples",
        layout={
            "barnorm": "",
            "yaxis.tickformat": "~s",
            "yaxis.ticksuffix": "",
            "yaxis.title.text": "examples",
        },
    )
    views = (plain, shares) if np.ptp(counts.sum(axis=1)) else ()
    few = len(run.classes) <= _LEGEND_AT_MOST
    return parts.plot(figure, title, about, level=3, keys=few, views=views)


def _heat(run: Run, counts: np.ndarray) -> str:
    shown = figures.evenly(len(counts), figures.ROWS_AT_MOST)
    figure = figures.class_heat(counts[shown], [run.client_ids[k] for k in shown], run.classes)
    some = (
        f"{len(shown)} of {count(len(counts))} clients"
        if len(shown) < len(counts)
        else f"all {len(shown)} clients"
    )
    about = "A heat map: for each client the share of its examples in each class."
    return parts.plot(figure, f"Share of each class, {some}", about, level=3, shape="tall")


def _sizes(sizes: np.ndarray) -> str:
    about = f"A histogram of the clients' sizes, from {sizes.min():,} to {sizes.max():,} examples."
    return parts.plot(figures.histogram(sizes), "Sizes of the clients", about, level=3, shape="tall")
