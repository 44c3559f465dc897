"""Draws metrics of several runs over rounds on shared axes, for these pages.

python benchmarks/draw.py docs/figures/name.svg runs/a runs/b
python benchmarks/draw.py docs/figures/name.svg runs/a runs/b --metric test_accuracy
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

COLOURS = ("#2f5fd0", "#d1495b", "#5a9a3c", "#8a5aa8", "#c9862b", "#4a4a4a")
METRICS = ("test_accuracy", "test_loss")
MARKERS_UP_TO = 25  # points of a curve


def curves(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """The rounds in which a metric was measured, and its values."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["round"], line[metric]) for line in lines if line.get(metric) is not None]
    return [x for x, _ in points], [y for _, y in points]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Draw runs side by side; a curve is named after its directory."
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--metric", action="append", help=f"default: {' and '.join(METRICS)}")
    options = parser.parse_args()
    metrics = options.metric or METRICS
    mpl.rcParams.update(
        {"font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "fedlens", "svg.fonttype": "none"}
    )
    size = (9, 3.4) if len(metrics) > 1 else (6.4, 3.2)
    figure, panels = plt.subplots(1, len(metrics), figsize=size, layout="constrained", squeeze=False)
    for axis, metric in zip(panels[0], metrics, strict=True):
        for run, colour in zip(options.runs, COLOURS, strict=False):
            x, y = curves(run, metric)
            marker = "o" if len(x) <= MARKERS_UP_TO else ""
            axis.plot(x, y, label=run.name, color=colour, linewidth=1.8, marker=marker, markersize=3)
        axis.set_title(metric.replace("_", " "), loc="left", fontsize=11)
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if metric.endswith("_accuracy"):
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        if metric.endswith("_loss"):
            axis.set_yscale("log")
    panels[0, 0].legend(frameon=False)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
