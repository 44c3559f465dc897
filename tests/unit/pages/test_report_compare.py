from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import RunDirectoryError
from fedlens.pages.compare import compare, write_comparison
from fedlens.results.comparison import readable
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, line, make_run


def reaching(tmp_path: Path, accuracy: float, algorithm: str = "fedavg", **more: Any) -> Path:
    """A run that ends at `accuracy` after a round that was better."""
    rows = [line(0), line(1, test_accuracy=accuracy + 0.1), line(2, test_accuracy=accuracy)]
    return make_run(tmp_path, algorithm=algorithm, metrics=rows, **{"name": algorithm, **more})


def comparison(runs: list[Path], tmp_path: Path) -> Page:
    html = write_comparison(runs, tmp_path / "pages" / "c.html").read_text(encoding="utf-8")
    assert_self_contained(html)
    return read_page(html)


def test_a_row_says_what_a_run_was_and_what_it_cost(tmp_path: Path) -> None:
    partition = {"name": "dirichlet", "clients": 100, "alpha": 0.1, "seed": 3}
    run = reaching(tmp_path, 0.6, config={"data": {"dataset": "digits", "partition": partition}})
    (row,) = compare([run])
    expected = {
        "run": "fedavg",
        "algorithm": "fedavg",
        "partition": "dirichlet alpha=0.1",
        "dataset": "digits",
    }
    assert expected.items() <= row.items()
    assert (row["rounds"], row["accuracy"], row["best_accuracy"], row["best_round"]) == (2, 0.6, 0.7, 1)
    assert (row["emd"], row["seconds"], row["bytes"]) == (1.6, 3.0, 720_000)
    assert row["relative_accuracy"] is None


def test_a_run_with_warnings_is_marked(tmp_path: Path) -> None:
    warning = {
        "since": 1,
        "until": 2,
        "sentence": "3 of 4 clients sent values that are not finite.",
        "try": "Less.",
    }
    runs = [reaching(tmp_path, 0.6, summary={"warnings": [warning]}), reaching(tmp_path, 0.8, "centralized")]
    assert [row["warnings"] for row in compare(runs)] == [1, 0]
    html = write_comparison(runs, tmp_path / "c.html").read_text(encoding="utf-8")
    assert html.count('<span class="badge interrupted">1 warning</span>') == 1
    assert "fedavg: 1 warning on the page of the run." in read_page(html).words


def test_relative_accuracy_is_federated_over_centralized(tmp_path: Path) -> None:
    rows = compare([reaching(tmp_path, 0.6), reaching(tmp_path, 0.8, "centralized")])
    assert [row["relative_accuracy"] for row in rows] == pytest.approx([0.75, 1.0])


def test_several_centralized_runs_are_averaged(tmp_path: Path) -> None:
    bounds = [reaching(tmp_path, value, "centralized", run_id=str(value)) for value in (0.7, 0.9)]
    assert compare([reaching(tmp_path, 0.4), *bounds])[0]["relative_accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "config",
    [{"data": {"dataset": "mnist", "partition": "iid"}}, {"model": {"name": "linear"}}],
    ids=["dataset", "model"],
)
def test_another_dataset_or_model_is_no_bound(tmp_path: Path, config: dict[str, Any]) -> None:
    bound = reaching(tmp_path, 0.8, "centralized", config=config)
    rows = compare([reaching(tmp_path, 0.6), bound])
    assert [row["relative_accuracy"] for row in rows] == [None, 1.0]


def test_a_bound_of_zero_or_without_a_value_is_none(tmp_path: Path) -> None:
    bound = make_run(tmp_path, name="c", algorithm="centralized", metrics=[line(0, test_accuracy=0.0)])
    unknown = make_run(tmp_path, name="d", algorithm="centralized", metrics=[line(0, test_accuracy=None)])
    assert compare([reaching(tmp_path, 0.6), bound])[0]["relative_accuracy"] is None
    assert compare([reaching(tmp_path / "x", 0.6), unknown])[0]["relative_accuracy"] is None


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path, run_id=run_id, rounds=1) for run_id in ("r1", "r2"))
    other = make_run(tmp_path, name="other", rounds=1)
    copy = make_run(tmp_path / "elsewhere", run_id="r1", rounds=1)
    names = [row["run"] for row in compare([a, b, other, copy])]
    assert names == ["digits (r1) #1", "digits (r2)", "other", "digits (r1) #2"]


def test_tasks_with_different_metrics_stand_side_by_side(tmp_path: Path) -> None:
    rows = [{"round": at, "test_loss": 1.0, "test_miou": at / 10} for at in range(4)]
    other = make_run(tmp_path, name="segments", metrics=rows, summary={"best": None, "dataset": "cityscapes"})
    runs = [reaching(tmp_path, 0.6), other]
    found = compare(runs)
    assert [(row["metric"], row["final"], row["accuracy"]) for row in found] == [
        ("accuracy", 0.6, 0.6),
        ("miou", 0.3, None),
    ]
    assert readable(found)[1]["final"] == "30.0 % miou"
    page = comparison(runs, tmp_path)
    assert [len(figure["data"]) for figure in page.figures] == [1, 1, 2]


def test_a_running_run_takes_part(tmp_path: Path) -> None:
    running = make_run(tmp_path, name="now", metrics=[line(0), line(1)], summary={}, counts=class_counts())
    started = make_run(tmp_path, name="just", metrics=[], summary={})
    rows = compare([running, started])
    assert [row["status"] for row in rows] == ["running", "running"]
    assert rows[0]["seconds"] == 1.5
    assert rows[0]["emd"] is not None
    assert (rows[1]["final"], rows[1]["seconds"], rows[1]["bytes"]) == (None, None, None)
    assert "now" in comparison([running, started], tmp_path).words


def test_the_page_has_all_curves_on_one_axis_and_the_table(tmp_path: Path) -> None:
    runs = [
        reaching(tmp_path, 0.6),
        reaching(tmp_path, 0.7, "fedprox"),
        reaching(tmp_path, 0.8, "centralized"),
    ]
    page = comparison(runs, tmp_path)
    accuracy = page.figures[0]["data"]
    assert [trace["name"] for trace in accuracy] == ["fedavg", "fedprox", "centralized"]
    assert [trace["y"][-1] for trace in accuracy] == [0.6, 0.7, 0.8]
    assert [trace["line"]["dash"] for trace in accuracy] == ["solid", "solid", "dash"]
    assert "3 runs compared" in page.words
    assert "75.0 %" in page.words
    assert "87.5 %" in page.words
    assert page.text.count("\nfedavg\n") >= 2


def test_curves_can_be_seen_over_time_and_bytes(tmp_path: Path) -> None:
    page = comparison([reaching(tmp_path, 0.6)], tmp_path)
    views = [value for name, value in page.attributes if name == "data-data"]
    assert views[:3] == ['{"x":[[0,1,2]]}', '{"x":[[0,1.5,3.0]]}', '{"x":[[0,360000,720000]]}']


def test_the_marks_of_few_rounds_are_not_those_of_time_and_bytes(tmp_path: Path) -> None:
    page = comparison([reaching(tmp_path, 0.6)], tmp_path)
    assert page.figures[0]["layout"]["xaxis"]["tickvals"] == [0, 1, 2]
    views = [json.loads(value or "") for name, value in page.attributes if name == "data-layout"]
    assert [view["xaxis"].get("tickvals") for view in views[:3]] == [[0, 1, 2], None, None]


def test_more_runs_than_colours_differ_in_dash(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name=f"run {k}", rounds=1) for k in range(12)]
    lines = [trace["line"] for trace in comparison(runs, tmp_path).figures[0]["data"]]
    assert len({(line["color"], line["dash"]) for line in lines}) == 12


def test_names_do_not_become_markup(tmp_path: Path) -> None:
    name = "<script>alert(1)</script><b>"
    run = make_run(
        tmp_path, name="x", rounds=1, summary={"name": name, "algorithm": name}, config={"name": name}
    )
    page = comparison([run], tmp_path)
    assert not [script for script in page.scripts if "alert(1)" in script]
    assert name in page.words


def test_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        compare([tmp_path])
    with pytest.raises(RunDirectoryError):
        write_comparison([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
