"""The populations of a study, their figures, and the partition of a run made without training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedlens
from fedlens.base.errors import ConfigError, DataError, RunDirectoryError
from fedlens.data.partition.partition import Partition
from fedlens.report import pictures
from fedlens.report import study_population_figures as figures
from fedlens.results.populations import (
    CasePopulation,
    needs_populations,
    needs_runs,
    population_values,
    read_populations,
)
from fedlens.results.rows import Results, read_data, write_data
from fedlens.studies.study_data import run_partition

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


def test_cases_are_chosen_by_dataset_and_named_by_their_dimensions() -> None:
    shown = [_population(0.1, [0, 1], [0, 1], "a"), _population(100.0, [0, 1], [0, 1], "b")]
    titles = [panel.title for panel in figures.panels(shown, {ALPHA: "alpha"}, {})]
    assert titles == ["alpha 0.1", "alpha 100"]
    assert [p.title for p in figures.panels(shown, {}, {"dataset": "b"})] == ["alpha 100"]
    with pytest.raises(ConfigError, match="no case has the data of 'c'"):
        figures.panels(shown, {}, {"dataset": "c"})
    with pytest.raises(ConfigError, match="no populations"):
        figures.panels([], {}, {})


def test_the_lines_of_a_distribution_are_the_counts_from_the_largest_down() -> None:
    shown = figures.panels([_population(0.1, [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 0, 1])], {}, {})
    asked = {"counts": ["classes", "examples", "class", "test"], "log": "none"}
    classes, examples, of_class, test = figures.distribution_figures(shown, asked)
    assert list(classes.series[0].y) == [2, 2, 1]
    assert list(examples.series[0].y) == [3, 2, 1]
    assert list(of_class.series[0].y) == [3, 3]
    assert list(test.series[0].y) == [2, 0]
    logarithmic = figures.distribution_figures(shown, {"counts": "test"})[0]
    assert list(logarithmic.series[0].y) == [2]
    assert "not shown" in logarithmic.note


def test_classes_of_the_same_data_are_one_line() -> None:
    two = [_population(0.1, [0, 0, 1], [0, 1, 1]), _population(1.0, [0, 1, 1], [0, 1, 1])]
    examples, of_class = figures.distribution_figures(
        figures.panels(two, {}, {}), {"counts": ["examples", "class"]}
    )
    assert (len(examples.series), len(of_class.series)) == (2, 1)


def test_wrong_words_of_a_data_figure_are_refused() -> None:
    shown = figures.panels([_population(0.1, [0, 1], [0, 1])], {}, {})
    with pytest.raises(ConfigError, match=r"unknown style 'bar'.*bars"):
        figures.population_plots(shown, {"style": "bar"})
    with pytest.raises(ConfigError, match="unknown counts 'example'"):
        figures.distribution_figures(shown, {"counts": "example"})
    with pytest.raises(ConfigError, match="unknown axes 'z'"):
        figures.distribution_figures(shown, {"log": "z"})


@pytest.mark.parametrize("style", figures.STYLES)
def test_populations_are_drawn(style: str, tmp_path: Path) -> None:
    one = _population(0.1, [0, 0, 1, 1, 2], [0, 1, 1, 1, 0])
    other = _population(1.0, [0, 1, 1, 1, 2], [0, 1, 1, 1, 0])
    shown = figures.panels([one, other], {}, {})
    with pictures.style():
        picture = figures.population_picture(shown, {"style": style})
        assert [a.get_title() for a in picture.axes if a.get_title().startswith("alpha")] == [
            "alpha 0.1",
            "alpha 1",
        ]
        pictures.save(picture, tmp_path / "p.svg")
    assert len(figures.population_plots(shown, {"style": style})) == 2


def test_a_bar_has_the_share_of_each_class_and_a_square_its_count(tmp_path: Path) -> None:
    shown = figures.panels([_population(0.1, [0, 0, 0, 0, 1], [0, 1, 1, 1, 0])], {}, {})
    with pictures.style():
        bars = figures.population_picture(shown, {"style": "bars"}).axes[0]
        squares = figures.population_picture(shown, {"style": "matrix"}).axes[0]
    widths = sorted(round(patch.get_width(), 6) for patch in bars.patches)
    assert widths == [0.25, 0.75, 1.0]
    assert squares.images[0].get_array().tolist() == [[1, 1], [3, 0]]  # classes by clients


def test_distributions_are_drawn(tmp_path: Path) -> None:
    shown = figures.panels([_population(0.1, [0, 0, 1], [0, 1, 1])], {}, {})
    with pictures.style():
        pictures.save(figures.distribution_picture(shown, {}), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").stat().st_size > 1000
    assert len(figures.distribution_plots(shown, {})) == 2
