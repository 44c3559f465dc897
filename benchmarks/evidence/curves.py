"""The figures: one for each algorithm, with FedAvg beside it, and what made each of them, in index.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.evidence import studies, tables
from benchmarks.evidence.statistics import final, spread
from benchmarks.evidence.store import Line
from benchmarks.evidence.studies import SEEDS, Study

COLOURS = ("#2f5fd0", "#c9862b", "#5a9a3c", "#8a5aa8", "#d1495b")
GREY = "#8a8a8a"


@dataclass(frozen=True)
class Curve:
    """A figure: these methods of a study, a panel for each of its cases, over rounds or batches."""

    name: str
    study: Study
    methods: Sequence[str]
    over: Literal["rounds", "batches"] = "rounds"

    @property
    def caption(self) -> str:
        """What the figure shows, in one sentence."""
        others = [label for label in self.methods if label != self.study.baseline]
        who = " and ".join([*others, self.study.baseline]) if others else self.study.baseline
        return (
            f"Test accuracy of {who} on 10,000 Fashion-MNIST images over {self.over}: "
            "the mean of seeds 0, 1 and 2, and their range"
        )


def _compared(name: str, label: str) -> Curve:
    return Curve(name, studies.COMPARE, (label,))


CURVES = (
    Curve("fedavg", studies.HSU2019, ()),
    Curve("fedavgm", studies.HSU2019, ("FedAvgM",)),
    Curve("fedir", studies.FEDIR, ("FedIR",)),
    Curve("fedvc", studies.FEDVC, ("FedVC",), "batches"),
    Curve(
        "liadmm", studies.GHAEMI2022, ("LIADMM", "LIADMM, training", "LIADMM, training, absent clients kept")
    ),
    _compared("fedprox", "FedProx"),
    _compared("scaffold", "SCAFFOLD"),
    _compared("fednova", "FedNova"),
    _compared("feddyn", "FedDyn"),
    _compared("moon", "MOON"),
    _compared("fedadam", "FedAdam"),
    _compared("fedyogi", "FedYogi"),
    _compared("fedadagrad", "FedAdagrad"),
)


def draw_all(folder: Path, there: tables.Store) -> list[str]:
    """Draws every figure whose results are complete into `folder`/curves, and writes `folder`/index.json."""
    mpl.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"})
    mpl.rcParams["svg.hashsalt"] = "fedlens"
    (folder / "curves").mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for curve in CURVES:
        shown = [*curve.methods, curve.study.baseline]
        found = tables.finals(curve.study, there)
        if all((case, label) in found for case in curve.study.cases for label in shown):
            _draw(folder / "curves" / f"{curve.name}.svg", curve, found)
            index[curve.name] = _entry(curve, shown, there)
    found = tables.finals(studies.HSU2019, there)
    if len(found) == len(studies.HSU2019.cases) * len(studies.HSU2019.methods):
        _draw_falling(folder / "curves" / "hsu2019.svg", found)
    text = json.dumps({"curves": index}, indent=2) + "\n"
    (folder / "index.json").write_text(text, encoding="utf-8")
    return list(index)


def _entry(curve: Curve, shown: Sequence[str], there: tables.Store) -> dict[str, Any]:
    cells = [*studies.tuning_cells(curve.study), *studies.final_cells(curve.study, there)]
    digests = {cell.digest for cell in cells if cell.method in shown and cell.digest in there}
    return {
        "caption": curve.caption,
        "command": f"python -m benchmarks.evidence {curve.study.file}",
        "seeds": list(SEEDS),
        "cpu_seconds": round(tables.seconds(digests, there)),
    }


def _draw(path: Path, curve: Curve, found: dict[tuple[str, str], list[Line]]) -> None:
    cases = list(curve.study.cases)
    columns = 2
    rows = -(-len(cases) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 2.9 * columns, 0.4 + 2.9 * rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, case in zip(axes.flat, cases, strict=True):
        ends = [_band(axis, found[case, label], label, colour, curve) for label, colour in _coloured(curve)]
        axis.set_title(case, loc="left", fontsize=11)
        axis.set_xlabel("round" if curve.over == "rounds" else "batches of the busiest client")
        if curve.over == "batches":
            axis.set_xlim(0, min(ends))  # where one of them has no more results there is nothing to compare
        _plain(axis)
    for row in axes:
        row[0].set_ylabel("test accuracy")
    worst = min(
        final(line["curve"]) for case in cases for label, _ in _coloured(curve) for line in found[case, label]
    )
    axes[0][0].set_ylim(bottom=max(0.0, worst - 0.25))  # the ends are what differs, not the first few rounds
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        frameon=False,
        loc="outside lower center",
        ncols=2 if len(curve.methods) > 2 else len(curve.methods) + 1,
    )
    _save(figure, path)


def _coloured(curve: Curve) -> list[tuple[str, str]]:
    others = list(zip(curve.methods, COLOURS, strict=False))
    return [(curve.study.baseline, GREY if others else COLOURS[0]), *others]


def _band(axis: Axes, lines: Sequence[Line], label: str, colour: str, curve: Curve) -> float:
    """Mean and range of the seeds; gives where the line ends. Batches differ by seed, so their means are taken."""
    column = 0 if curve.over == "rounds" else 1
    rows = list(zip(*(line["curve"] for line in lines), strict=False))  # one that diverged ends early
    x = [sum(point[column] for point in row) / len(row) for row in rows]
    y = [spread([point[2] for point in row]) for row in rows]
    compared_with = label == curve.study.baseline and bool(curve.methods)
    # Dashed and on top, so that it is seen where another is equal to it.
    style: dict[str, Any] = {"linestyle": (0, (4, 2)), "zorder": 3} if compared_with else {}
    axis.plot(x, [s.mean for s in y], label=label, color=colour, linewidth=1.8, **style)
    axis.fill_between(x, [s.least for s in y], [s.largest for s in y], color=colour, alpha=0.18, linewidth=0)
    return float(x[-1])


def _draw_falling(path: Path, found: dict[tuple[str, str], list[Line]]) -> None:
    """Final accuracy over alpha (hsu2019 figures 2 and 5): mean and range of the seeds."""
    study = studies.HSU2019
    cases = list(study.cases)
    figure, axis = plt.subplots(figsize=(5.2, 3.1), layout="constrained")
    for shift, (method, colour) in enumerate(zip(study.methods, COLOURS, strict=False)):
        each = [spread([final(line["curve"]) for line in found[case, method.label]]) for case in cases]
        x = [k + 0.06 * (2 * shift - 1) for k in range(len(cases))]
        reach = [[s.mean - s.least for s in each], [s.largest - s.mean for s in each]]
        axis.errorbar(
            x, [s.mean for s in each], reach, label=method.label, color=colour, marker="o", markersize=4,
            linewidth=1.6, capsize=3,
        )  # fmt: skip
    axis.set_xticks(range(len(cases)), [case.removeprefix("alpha = ") for case in cases])
    axis.set_xlabel("alpha: clients differ more to the right")
    axis.set_ylabel("final test accuracy")
    axis.legend(frameon=False)
    _plain(axis)
    _save(figure, path)


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
