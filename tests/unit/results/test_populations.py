"""The populations of a study, their figures, and the partition of a run made without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedlens
from fedlens.base.errors import ConfigError, DataError, RunDirectoryError
from fedlens.data.partition.partition import Partition
from fedlens.results.data_json import CasePopulation, population_values, read_populations
from fedlens.results.figures import picture
from fedlens.results.figures.chart import Panel
from fedlens.results.figures.study_figures import study_figure
from fedlens.results.rows import Results, needs_populations, needs_runs, read_data, write_data
from fedlens.studies.study_data import run_partition
from tests.unit.results.study_curves_fake import by_alpha

pytest.importorskip("matplotlib")

ALPHA = "data.partition.alpha"


def _settings(**data: object) -> dict[str, object]:
    partition = {"name": "dirichlet-classwise", "clients": 5, "alpha": 0.5}
    return {
        "rounds": 1, "seed": 3, "model": "linear", "engine": "inline", "local": {"lr": 0.1, "batch_size": 32},
        "data": {"dataset": "digits", "partition": partition, **data},
    }  # fmt: skip


def _population(alpha: float, owners: list[int], labels: list[int], dataset: str = "three") -> CasePopulation:
    partition = Partition.of_owners(owners, max(owners) + 1, dataset=dataset).counted(labels)
    return CasePopulation.of(partition, {ALPHA: alpha}, test=np.array([2, 0]))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"validation": 0.2},
        {"validation": 0.2, "validation_from": "client"},
        {"reassign": True},
    ],
    ids=["all", "validation", "validation of clients", "reassigned"],
)
def test_the_partition_is_the_one_that_the_run_trains_on(data: dict[str, object], tmp_path: Path) -> None:
    made, _ = run_partition(_settings(**data), root=tmp_path)
    fedlens.Experiment(**_settings(**data)).run(tmp_path / "run")
    trained = Partition.load(tmp_path / "run" / "partition.npz")
    assert made.digest == trained.digest
    assert made.census.dense().tolist() == trained.census.dense().tolist()


def test_test_examples_are_counted_by_class(tmp_path: Path) -> None:
    _, counts = run_partition(_settings(), root=tmp_path)
    assert counts.sum() == 360
    assert (counts > 20).all()


def test_a_population_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    partition, _ = run_partition(_settings(), root=tmp_path)
    write_data(tmp_path, {"populations": population_values([CasePopulation.of(partition, {ALPHA: 0.5})])})
    (again,) = read_populations(read_data(tmp_path)["populations"])
    assert again.census.dense().tolist() == partition.census.dense().tolist()
    assert again.partition.sizes().tolist() == partition.sizes().tolist()
    assert again.census.emd() == partition.census.emd()
    assert again.spec["name"] == "dirichlet-classwise"


def test_an_infinite_alpha_is_written_as_text(tmp_path: Path) -> None:
    partition = Partition.of_owners([0, 1], 2, spec={"alpha": float("inf")}).counted([0, 1])
    assert "inf" in json.dumps(population_values([CasePopulation.of(partition, {})]), allow_nan=False)


def test_damaged_data_are_refused(tmp_path: Path) -> None:
    assert read_data(tmp_path) == {}
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"data\.json is corrupt"):
        read_data(tmp_path)
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(RunDirectoryError, match=r"data\.json is corrupt"):
        read_data(tmp_path)
    with pytest.raises(DataError, match="populations are corrupt"):
        read_populations([{"case": {}}])


def test_results_without_data_json_have_no_data() -> None:
    assert Results.__dataclass_fields__["data"].default_factory() == {}


def test_a_study_of_data_alone_needs_no_runs() -> None:
    data, curves = [{"kind": "distributions"}], [{"kind": "curves"}]
    assert not needs_runs(data, [{"kind": "datasets"}])
    assert needs_runs([*data, *curves], [])
    assert needs_runs(data, [{"kind": "summary"}])
    assert needs_runs([], [{"kind": "efficiency"}])
    assert needs_populations([*data, *curves], [])
    assert not needs_populations(curves, [{"kind": "efficiency", "runs": False}])


def _study(*populations: CasePopulation) -> Results:
    return replace(by_alpha(), data={"populations": population_values(populations)})


def _panels(spec: dict[str, object], *populations: CasePopulation) -> Sequence[Panel]:
    return study_figure(_study(*populations), spec).panels


def test_cases_are_chosen_by_dataset_and_named_by_their_dimensions() -> None:
    shown = [_population(0.1, [0, 1], [0, 1], "a"), _population(100.0, [0, 1], [0, 1], "b")]
    spec: dict[str, object] = {"kind": "populations"}
    assert [panel.title for panel in _panels(spec, *shown)] == ["alpha 0.1", "alpha 100"]
    assert len(_panels({**spec, "dataset": "b"}, *shown)) == 1
    with pytest.raises(ConfigError, match="no case has the data of 'c'"):
        _panels({**spec, "dataset": "c"}, *shown)
    with pytest.raises(ConfigError, match="no populations"):
        _panels(spec)


def test_the_number_of_clients_shown_is_an_upper_limit_of_each_case() -> None:
    shown = [_population(0.1, [0, 1, 2], [0, 1, 1]), _population(1.0, [0, 0, 0], [0, 1, 1])]
    chart = study_figure(_study(*shown), {"kind": "populations", "clients": 2})
    assert list(chart.notes) == ["At most 2 clients of each case are shown."]


def test_the_lines_of_a_distribution_are_the_counts_from_the_largest_down() -> None:
    one = _population(0.1, [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 0, 1])
    asked = {"kind": "distributions", "counts": ["classes", "examples", "class", "test"], "log": "none"}
    classes, examples, of_class, test = _panels(asked, one)
    assert list(classes.series[0].y) == [2, 2, 1]
    assert list(examples.series[0].y) == [3, 2, 1]
    assert list(of_class.series[0].y) == [3, 3]
    assert list(test.series[0].y) == [2, 0]
    [logarithmic] = _panels({"kind": "distributions", "counts": ["test"]}, one)
    assert list(logarithmic.series[0].y) == [2]
    assert "not shown" in logarithmic.note


def test_classes_of_the_same_data_are_one_line() -> None:
    two = [_population(0.1, [0, 0, 1], [0, 1, 1]), _population(1.0, [0, 1, 1], [0, 1, 1])]
    examples, of_class = _panels({"kind": "distributions", "counts": ["examples", "class"]}, *two)
    assert (len(examples.series), len(of_class.series)) == (2, 1)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("populations", "style", "bar"),
        ("distributions", "counts", ["example"]),
        ("distributions", "log", "z"),
    ],
)
def test_wrong_words_of_a_data_figure_are_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        study_figure(_study(_population(0.1, [0, 1], [0, 1])), {"kind": kind, key: value})


@pytest.mark.parametrize("style", ["bars", "matrix", "classes"])
def test_populations_are_drawn(style: str, tmp_path: Path) -> None:
    one = _population(0.1, [0, 0, 1, 1, 2], [0, 1, 1, 1, 0])
    other = _population(1.0, [0, 1, 1, 1, 2], [0, 1, 1, 1, 0])
    chart = study_figure(_study(one, other), {"kind": "populations", "style": style})
    with picture.style():
        titles = [axes.get_title(loc="left") for axes in picture.chart_picture(chart).axes]
    assert [title for title in titles if title] == ["alpha 0.1", "alpha 1"]
    assert picture.draw_chart(chart, tmp_path / "p.svg").stat().st_size > 1000


def test_a_bar_has_the_share_of_each_class_and_a_square_its_count() -> None:
    one = _population(0.1, [0, 0, 0, 0, 1], [0, 1, 1, 1, 0])
    charts = [study_figure(_study(one), {"kind": "populations", "style": s}) for s in ("bars", "matrix")]
    with picture.style():
        bars, squares = (picture.chart_picture(chart).axes[0] for chart in charts)
    widths = sorted(round(patch.get_width(), 6) for patch in bars.patches)
    assert widths == [0.25, 0.75, 1.0]
    assert squares.images[0].get_array().tolist() == [[1, 1], [3, 0]]  # classes by clients


def test_distributions_are_drawn(tmp_path: Path) -> None:
    chart = study_figure(_study(_population(0.1, [0, 0, 1], [0, 1, 1])), {"kind": "distributions"})
    assert picture.draw_chart(chart, tmp_path / "p.svg").stat().st_size > 1000
    assert len(chart.panels) == 2
