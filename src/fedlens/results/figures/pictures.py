"""Draws partitions and the results of classifiers into files for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlens.base.errors import DataError, RunDirectoryError
from fedlens.data.partition.partition import Partition
from fedlens.results.figures import classification_figures as classification
from fedlens.results.figures import partition_figures as data
from fedlens.results.figures.chart import Chart, Panel
from fedlens.results.figures.partition_figures import PartitionSample
from fedlens.results.figures.picture import draw_chart
from fedlens.results.run import Run

_ANOTHER = "or choose another directory with --out"


def draw(
    partition: Partition, out: Path, formats: Sequence[str] = ("png", "pdf"), places: Panel | None = None
) -> list[Path]:
    """Draws every picture of a partition into the directory `out`, and returns the files.

    The pictures are `ranks` (Hsu et al. 2020, figures 2b, 2c and 3); if the classes were counted, also `class-bars`
    (Hsu et al. 2019, figure 1), `matrix` (FedCV, figures 3, 10 and 11) and `emd` (Hsu et al. 2020, figure 4, top
    row); `features` if clients have feature shifts; and `map` with the `places` of `partition_map.places_map` (Hsu et
    al. 2020, figure 1). The same partition gives the same bytes.

    Raises `ConfigError` if matplotlib is not installed, `DataError` if there are no clients, and
    `RunFailed` if a file cannot be written.
    """
    if not len(partition):
        raise DataError("the partition has no clients to draw")
    return _draw_all(pictures(partition, places), out, formats)


def draw_evaluation(run_dir: Path, out: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Draws how a run's classifier did on the test data into the directory `out`, and returns the files.

    The pictures are `class-accuracy`, `reliability` (the reliability diagram) and, up to 1,000 classes, `confusion`.

    Raises `ConfigError` if matplotlib is not installed, and `RunDirectoryError` if `run_dir` is not a run directory,
    the run has not recorded its last evaluation, it is not of a classifier, or a file cannot be written.
    """
    evaluation = Run.open(run_dir).evaluation
    if evaluation is None or evaluation.kind != classification.KIND:
        what = "has not recorded its last evaluation" if evaluation is None else f"is for {evaluation.kind}"
        raise RunDirectoryError(f"the run {what}, so there is no classifier to draw", where=str(run_dir))
    results = classification.ClassResults.of(evaluation.classes, evaluation.sums)
    shown = {
        "class-accuracy": classification.class_accuracies(results),
        "reliability": classification.reliability(classification.Calibration.of(evaluation.sums)),
        "confusion": classification.confusion_map(results),
    }
    charts = {name: Chart(panel.title, panel.about, [panel]) for name, panel in shown.items() if panel}
    return _draw_all(charts, out, formats)


def pictures(partition: Partition, places: Panel | None = None) -> dict[str, Chart]:
    """The pictures of a partition by name."""
    census = partition.census
    charts = {"ranks": Chart("Ranks", "", data.rank_curves(partition))}
    if census is not None:
        bars, matrix = data.bar_sample(partition, census), data.matrix_sample(partition, census)
        sizes = [data.size_bars(bars)] if bars.lopsided() else []
        charts |= {
            "class-bars": Chart("Classes", "", [*sizes, _excerpt(data.class_bars(bars, 0), bars)], columns=1),
            "matrix": Chart("Matrix", "", [_excerpt(data.class_matrix(matrix), matrix)]),
            "emd": Chart("EMD", "", [data.emd_histogram(census)]),
        }
    if partition.features:
        charts["features"] = Chart("Features", "", data.feature_strips(partition), columns=1)
    if places is not None:
        charts["map"] = Chart("Places", "", [places])
    return dict(sorted(charts.items()))


def _excerpt(panel: Panel, sample: PartitionSample) -> Panel:
    """The panel with the clients and classes that it shows as its note, in place of a title."""
    return replace(panel, title="", note=sample.excerpt())


def _draw_all(charts: Mapping[str, Chart], out: Path, formats: Sequence[str]) -> list[Path]:
    return [
        draw_chart(chart, out / f"{name}.{suffix}", _ANOTHER)
        for name, chart in charts.items()
        for suffix in formats
    ]
