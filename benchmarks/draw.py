"""Draws the accuracy and loss of several runs on one pair of axes, for the results page.

python benchmarks/draw.py docs/figures/name.svg runs/a runs/b
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#2f5fd0", "#d1495b", "#5a9a3c", "#8a5aa8", "#c9862b", "#4a4a4a")


def curves(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """The rounds in which a metric was measured, and its values."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["round"], line[metric]) for line in lines if line.get(metric) is not None]
    return [x for x, _ in points], [y for _, y in points]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw runs side by side.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    asked = parser.parse_args()
    mpl.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "fedlens"})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, metric, title in zip(
        axes, ("test_accuracy", "test_loss"), ("test accuracy", "test loss"), strict=True
    ):
        for run, colour in zip(asked.runs, COLOURS, strict=False):
            axis.plot(
                *curves(run, metric), label=run.name, color=colour, linewidth=1.8, marker="o", markersize=3
            )
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False)
    asked.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(asked.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
