"""The test data in detail of segmentation and detection: numbers counted by hand, absent classes, many clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import jaccard_score

from fedlens.base.format import heading, is_share, label
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.pages.detection_section import BoxResults, precision_recall
from fedlens.pages.run_page import write_report
from fedlens.pages.segmentation_section import OverlapResults
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import line, make_run

CONFUSION = np.array([[6, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [0, 4, 0, 0]])


def segmentation(classes: int = 4, confusion: np.ndarray = CONFUSION) -> FinalEvaluation:
    names = tuple(f"class {k}" for k in range(classes))
    sums = {"confusion": confusion, "loss": np.array(3.5), "pixels": np.array(int(confusion.sum()))}
    return FinalEvaluation(30, "segmentation", names, (3, 8, 8), sums)


def detection(classes: int = 3, absent: int = 0) -> FinalEvaluation:
    rng = np.random.default_rng(0)
    truths = rng.integers(1, 50, classes)
    truths[:absent] = 0
    average = np.sort(rng.uniform(0, 1, (classes, 10)), axis=1)[:, ::-1] * (truths > 0)[:, None]
    precision = np.sort(rng.uniform(0, 1, (classes, 101)), axis=1)[:, ::-1] * (truths > 0)[:, None]
    names = tuple(f"class {k}" for k in range(classes))
    sums = {"truths": truths, "average_precision": average, "precision": precision, "examples": np.array(9)}
    return FinalEvaluation(30, "detection", names, (3, 8, 8), sums)


def page_of(root: Path, given: FinalEvaluation, **more: Any) -> Page:
    run = make_run(root, **more)
    given.write(run / "evaluation.npz")
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    return read_page(html)


def test_iou_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    truth, answer = rng.integers(0, 5, (2, 4000))
    confusion = np.zeros((6, 6), np.int64)
    np.add.at(confusion, (truth, answer), 1)
    results = OverlapResults.of([str(k) for k in range(6)], {"confusion": confusion})
    assert results.iou[:5] == pytest.approx(jaccard_score(truth, answer, average=None))
    assert np.isnan(results.iou[5])
    assert results.mean_iou == pytest.approx(jaccard_score(truth, answer, average="macro"))


def test_the_classes_are_listed_from_the_lowest_iou_on(tmp_path: Path) -> None:
    words = page_of(tmp_path, segmentation()).words
    # class 3: 0 of 4 + 0; class 1: 3 of 10; class 0: 6 of 9; class 2 has no pixel.
    table = words[words.index("most frequent wrong answer") :]
    assert table.startswith(
        "most frequent wrong answer class 3 0.0 % 0.0 % 25.0 % class 1 (100.0 %) "
        "class 1 30.0 % 75.0 % 25.0 % class 0 (25.0 %) class 0 66.7 % 75.0 % 50.0 % class 1 (25.0 %)"
    )
    assert "The mean leaves out 1 class without a pixel in the truth or the predictions: class 2." in words
    assert "on 16 pixels that have a true class" in words


def test_the_confusion_of_pixels_is_drawn_by_row(tmp_path: Path) -> None:
    page = page_of(tmp_path, segmentation())
    (heat,) = [trace for trace in page.traces() if trace["type"] == "heatmap"]
    assert heat["z"][0] == [0.75, 0.25, 0, 0]
    assert heat["y"][0] == "class 0 (8 pixels)"
    (bars,) = [trace for trace in page.traces() if trace["type"] == "bar" and trace["x"][0] == 1]
    assert bars["y"] == pytest.approx([0.0, 0.3, 6 / 9])


@pytest.mark.parametrize("classes", [1, 80])
def test_one_class_and_80_are_shown(tmp_path: Path, classes: int) -> None:
    confusion = np.random.default_rng(0).integers(0, 9, (classes, classes))
    page = page_of(tmp_path, segmentation(classes, confusion))
    assert f"class {classes - 1}" in page.words
    mean = OverlapResults.of(range(classes), {"confusion": confusion}).mean_iou  # type: ignore[arg-type]
    assert f"IoU of each class, sorted; mean {100 * mean:.1f} %" in page.words


def with_clients(clients: int, classes: int = 4) -> FinalEvaluation:
    rng = np.random.default_rng(0)
    right = rng.integers(1, 9, (clients, classes))
    sums = {"class_right": right, "class_pixels": right + 1, "class_predicted": right + 2}
    for values in sums.values():
        values[0, 1] = 0  # the first client has nothing of class 1
    names = tuple(f"client {k}" for k in range(clients))
    given = segmentation(classes, np.ones((classes, classes), np.int64))
    return replace(given, clients=names, of_clients=sums)


def test_iou_of_each_class_at_each_client_is_a_table(tmp_path: Path) -> None:
    given = with_clients(3)
    page = page_of(tmp_path, given)
    right = given.of_clients["class_right"]
    table = page.words[page.words.index("client mean class 0 class 1 class 2 class 3") :]
    iou = right / (right + 3)
    means = [np.delete(iou[0], 1).mean(), iou[1].mean(), iou[2].mean()]
    cells = [f"{100 * means[0]:.1f} {100 * iou[0, 0]:.1f} – {100 * iou[0, 2]:.1f} {100 * iou[0, 3]:.1f}"]
    cells += [" ".join(f"{100 * v:.1f}" for v in [means[k], *iou[k]]) for k in (1, 2)]
    rows = [f"client {k} {cells[k]}" for k in np.argsort(means)]
    assert table.startswith(" ".join(["client mean class 0 class 1 class 2 class 3", *rows]))


def test_of_many_clients_the_worst_are_shown(tmp_path: Path) -> None:
    words = page_of(tmp_path, with_clients(60, 50)).words
    assert (
        "Shown: the 40 of 60 clients with the lowest mean and the 40 of 50 classes with the most pixels."
        in words
    )


def test_a_run_without_measured_clients_has_no_such_table(tmp_path: Path) -> None:
    assert "at each client" not in page_of(tmp_path, segmentation()).words


def test_average_precision_is_listed_from_the_lowest_on(tmp_path: Path) -> None:
    given = detection()
    page = page_of(tmp_path, given)
    average, truths = given.sums["average_precision"], given.sums["truths"]
    order = np.argsort(average.mean(axis=1))
    rows = [
        f"class {k} {100 * average[k].mean():.1f} % {100 * average[k, 0]:.1f} % {truths[k]}" for k in order
    ]
    assert f"true boxes {' '.join(rows)}" in page.words
    curves = [trace for trace in page.traces() if trace.get("name", "").startswith("class ")]
    assert [trace["name"].split(" (")[0] for trace in curves] == [f"class {k}" for k in order]
    assert curves[0]["y"] == pytest.approx(given.sums["precision"][order[0]], abs=1e-4)
    assert curves[0]["x"][:3] == [0.0, 0.01, 0.02]


def test_a_class_without_a_true_box_is_named_and_left_out(tmp_path: Path) -> None:
    page = page_of(tmp_path, detection(3, absent=1))
    assert "The mean leaves out 1 class without a true box: class 0." in page.words
    assert "class 0 (" not in page.words
    results = BoxResults.of(("a", "b", "c"), detection(3, absent=1).sums)
    assert results.mean == pytest.approx(results.average_precision[1:].mean())


def test_without_any_true_box_the_page_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path, detection(2, absent=2))
    assert "on 0 true boxes" in page.words
    assert "2 classes without a true box: class 0, class 1." in page.words


def test_of_80_classes_the_mean_and_the_ends_have_a_curve() -> None:
    figure = precision_recall(BoxResults.of([f"c{k}" for k in range(80)], detection(80).sums))
    assert len(figure.series) == 9
    assert figure.series[0].name.startswith("mean (")
    assert "4 lowest and 4 highest of 80 classes" in figure.note


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (segmentation(), "confusion", np.zeros((3, 3), np.int64)),
        (segmentation(), "confusion", np.zeros((4, 4))),
        (detection(), "precision", np.zeros((3, 100))),
        (detection(), "truths", np.array([1, -1, 2])),
        (detection(), "average_precision", np.full((3, 10), np.nan)),
    ],
)
def test_measurements_that_do_not_fit_leave_a_sentence(
    tmp_path: Path, given: FinalEvaluation, name: str, value: np.ndarray
) -> None:
    words = page_of(tmp_path, replace(given, sums={**given.sums, name: value})).words
    assert "This section is missing: evaluation.npz is corrupt: " in words


def test_a_detector_has_no_loss_on_its_page(tmp_path: Path) -> None:
    rows = [
        line(at, test_loss=..., test_accuracy=..., test_map50=0.1 * at, test_map=0.05 * at) for at in range(5)
    ]
    best = {"round": 4, "metric": "test_map50", "value": 0.4, "chosen_on": "test"}
    page = page_of(tmp_path, detection(), metrics=rows, rounds=4, summary={"best": best})
    assert "Final mAP at IoU 0.5 40.0 % on test, after round 4" in page.words
    assert "Best mAP at IoU 0.5 40.0 %" in page.words
    titles = [title for title in ("mAP at IoU 0.5", "mAP", "Loss") if title in page.words]
    assert titles == ["mAP at IoU 0.5", "mAP", "Loss"]  # the loss that the clients saw


def test_metrics_have_the_names_of_the_field() -> None:
    assert [label(name) for name in ("mean_iou", "map50", "frequency_iou")] == [
        "mean IoU",
        "mAP at IoU 0.5",
        "frequency-weighted IoU",
    ]
    assert heading("f1_micro") == "Micro F1"
    assert all(map(is_share, ("mean_iou", "map", "map50", "frequency_iou")))
