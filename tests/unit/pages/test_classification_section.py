"""The section on a classifier's test data: figures from known sums, the bound on pictures, damaged files."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedlens.base.errors import RunDirectoryError
from fedlens.observers.final_evaluation import (
    PIXELS,
    WORST,
    FinalEvaluation,
    most_confident,
    remove_images,
    scaled_down,
)
from fedlens.pages.run_page import write_report
from fedlens.results.figures.classification_figures import (
    Calibration,
    ClassResults,
    ConfusionMatrix,
    class_accuracies,
    clustered_order,
    confused_pairs,
    confusion_map,
)
from fedlens.results.figures.pictures import draw_evaluation
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import make_run

EVIL = "</script><script>alert(1)</script><b>"


def evaluation(
    classes: int, n: int = 400, seed: int = 0, images: NDArray[np.uint8] | None = None
) -> FinalEvaluation:
    """Made of random probabilities, counted one example after the other."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, n)
    logits = rng.normal(0, 1, (n, classes)) + 2.0 * np.eye(classes)[truth]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    confusion = np.zeros((classes, classes), np.int64)
    counts, correct, confidence = np.zeros(15, np.int64), np.zeros(15, np.int64), np.zeros(15)
    wrong = []
    for k in range(n):
        answer, largest = int(probabilities[k].argmax()), float(probabilities[k].max())
        place = min(int(largest * 15), 14)
        confusion[truth[k], answer] += 1
        counts[place] += 1
        confidence[place] += largest
        correct[place] += answer == truth[k]
        wrong += [(k, int(truth[k]), answer, largest)] if answer != truth[k] else []
    names = ("index", "truth", "answer", "confidence")
    rows = {name: np.array([row[i] for row in wrong]) for i, name in enumerate(names)}
    sums = {"confusion": confusion, "bin_count": counts, "bin_correct": correct, "bin_confidence": confidence}
    classes_named = tuple(f"class {k}" for k in range(classes))
    return FinalEvaluation(30, "classification", classes_named, (1, 8, 8), sums, most_confident(rows), images)


def images_of(mistakes: int, shape: tuple[int, int, int] = (3, 12, 10)) -> NDArray[np.uint8]:
    rng = np.random.default_rng(1)
    return np.stack(
        [scaled_down(rng.integers(0, 256, shape, np.uint8), PIXELS // WORST) for _ in range(mistakes)]
    )


def page_of(root: Path, given: FinalEvaluation | bytes | None, **more: Any) -> Page:
    run = make_run(root, **more)
    if isinstance(given, FinalEvaluation):
        given.write(run / "evaluation.npz")
    elif given is not None:
        (run / "evaluation.npz").write_bytes(given)
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    return read_page(html)


def pictures_of(page: Page) -> list[bytes]:
    urls = [value or "" for name, value in page.attributes if name == "src"]
    return [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]


def test_the_confusion_matrix_is_on_the_page_in_the_order_of_the_classes(tmp_path: Path) -> None:
    given = evaluation(10)
    page = page_of(tmp_path, given)
    (heat,) = [trace for trace in page.traces() if trace["type"] == "heatmap"]
    confusion = given.sums["confusion"]
    assert heat["text"] == [[f"{count:,}" for count in row] for row in confusion.tolist()]
    assert np.allclose(heat["z"], confusion / confusion.sum(axis=1, keepdims=True), atol=5e-4)
    assert heat["y"][3] == f"class 3 ({confusion[3].sum()} images)"
    assert heat["x"] == list(given.classes)


def test_classes_confused_with_each_other_become_neighbours_above_30_classes() -> None:
    rng = np.random.default_rng(0)
    place = rng.permutation(40)  # classes of one block of four are confused, wherever they are in the list
    block = place // 4
    confusion = np.where(block[:, None] == block, 3, 0) + np.diag(np.full(40, 20))
    drawn = ConfusionMatrix.of(confusion)
    order = [members[0] for members in drawn.members]
    assert sorted(order) == list(range(40))
    assert len([k for k in range(39) if block[order[k]] != block[order[k + 1]]]) == 9
    assert drawn.counts.tolist() == confusion[np.ix_(order, order)].tolist()
    assert not ConfusionMatrix.of(confusion[:30, :30]).clustered


def test_a_thousand_classes_share_cells_and_lose_no_image() -> None:
    rng = np.random.default_rng(0)
    confusion = np.zeros((1000, 1000), np.int64)
    np.add.at(confusion, tuple(rng.integers(0, 1000, (2, 5000))), 1)
    heat = confusion_map(ClassResults.of([f"c{k}" for k in range(1000)], {"confusion": confusion}))
    drawn = ConfusionMatrix.of(confusion)
    assert heat is not None
    assert heat.cells.values.shape == (200, 200)
    assert drawn.counts.sum() == 5000
    assert sorted(k for members in drawn.members for k in members) == list(range(1000))
    rows, columns = drawn.members[7], drawn.members[11]
    assert drawn.counts[7, 11] == confusion[np.ix_(rows, columns)].sum()
    assert "5 classes a cell" in heat.title


@pytest.mark.parametrize("confusion", [np.zeros((40, 40), np.int64), np.eye(40, dtype=np.int64)])
def test_without_a_confusion_the_classes_keep_their_order(confusion: NDArray[np.int64]) -> None:
    assert clustered_order(confusion) == list(range(40))
    assert confused_pairs(confusion, 5) == []


def test_the_most_confused_pairs_are_listed_where_cells_have_no_counts(tmp_path: Path) -> None:
    given = evaluation(40)
    confusion = given.sums["confusion"].copy()
    confusion[4, 9] = 99
    words = page_of(tmp_path, replace(given, sums={**given.sums, "confusion": confusion})).words
    share = f"{99 / confusion[4].sum():.1%}".replace("%", " %")
    assert f"class 4 class 9 99 {share}" in words
    assert words.index("class 4 class 9 99") < words.index("Classes, the least accurate first")


def test_the_accuracy_of_each_class_is_its_diagonal_share(tmp_path: Path) -> None:
    given = evaluation(10)
    confusion = given.sums["confusion"]
    page = page_of(tmp_path, given)
    expected = confusion.diagonal() / confusion.sum(axis=1)
    (bars,) = [trace for trace in page.traces() if trace["type"] == "bar" and trace["x"][0] == 1]
    assert bars["y"] == pytest.approx(sorted(expected))
    lowest = int(expected.argmin())
    others = np.where(np.arange(10) == lowest, 0, confusion[lowest])
    value = f"{expected[lowest]:.1%}".replace("%", " %")
    row = f"class {lowest} {value} {confusion[lowest].sum()} class {others.argmax()} ({others.max()})"
    assert f"most frequent wrong answer {row}" in page.words


def test_a_class_without_test_images_is_named_and_left_out(tmp_path: Path) -> None:
    given = evaluation(4)
    confusion = given.sums["confusion"].copy()
    confusion[2] = 0
    sums = {**given.sums, "confusion": confusion}
    assert np.isnan(ClassResults.of(given.classes, sums).accuracy[2])
    assert len(class_accuracies(ClassResults.of(given.classes, sums)).series[0].x) == 3
    assert "1 class without test images: class 2." in page_of(tmp_path, replace(given, sums=sums)).words


def test_beyond_the_confusion_matrix_each_class_still_has_its_accuracy(tmp_path: Path) -> None:
    sums = {name: value for name, value in evaluation(4).sums.items() if name != "confusion"}
    sums |= {"class_examples": np.array([4, 2, 0, 1]), "class_correct": np.array([1, 2, 0, 0])}
    given = replace(evaluation(4), sums=sums)
    words = page_of(tmp_path, given).words
    assert "The confusion matrix is recorded up to 1,000 classes." in words
    assert "class 3 0.0 % 1 – class 0 25.0 % 4 – class 1 100.0 % 2 –" in words


def test_the_reliability_diagram_shows_each_bin_and_the_error_by_its_definition(tmp_path: Path) -> None:
    given = evaluation(10, 300)
    counts, correct = given.sums["bin_count"], given.sums["bin_correct"]
    confidence = given.sums["bin_confidence"]
    some = counts > 0
    gaps = np.abs(correct[some] / counts[some] - confidence[some] / counts[some])
    error = float((counts[some] / 300 * gaps).sum())
    assert Calibration.of(given.sums).error == pytest.approx(error)
    page = page_of(tmp_path, given)
    assert f"expected calibration error {error:.1%}".replace("%", " %") in page.words
    bars = page.trace("accuracy", figure=4)
    assert bars["y"] == pytest.approx(np.where(some, correct / np.maximum(counts, 1), 0.0))
    assert len(bars["x"]) == 15


def test_the_mistakes_are_shown_with_truth_answer_and_image(tmp_path: Path) -> None:
    given = evaluation(10)
    given = replace(given, images=images_of(WORST))
    page = page_of(tmp_path, given)
    shown = pictures_of(page)
    assert len(shown) == WORST
    for png, pixels in zip(shown, given.images if given.images is not None else [], strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), pixels.transpose(1, 2, 0))
    first = {name: values[0] for name, values in given.mistakes.items()}
    confidence = f"{first['confidence']:.1%}".replace("%", " %")
    assert f"class {first['answer']} {confidence} true: class {first['truth']}" in page.words
    assert "record.images = false leaves them out" in page.words


@pytest.mark.parametrize(
    "shape", [(3, 1000, 1500), (1, 2000, 2000), (3, 2, 70_000), (4, 400, 300), (3, 224, 224)]
)
def test_pictures_of_any_size_take_at_most_2_mb_of_the_page(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    bare = page_of(tmp_path / "bare", evaluation(10))
    given = replace(evaluation(10), images=images_of(WORST, shape))
    page = page_of(tmp_path / "pictures", given)
    urls = [value or "" for name, value in page.attributes if name == "src"]
    assert len(urls) == WORST
    assert not pictures_of(bare)
    assert sum(map(len, urls)) <= 2_000_000
    with Image.open(io.BytesIO(pictures_of(page)[0])) as picture:
        assert picture.width <= shape[2]
        assert picture.height <= shape[1]


def test_settings_that_leave_images_out_leave_them_out_of_a_page_made_later(tmp_path: Path) -> None:
    given = replace(evaluation(10), images=images_of(WORST))
    page = page_of(tmp_path, given, config={"record": {"images": False}})
    assert pictures_of(page) == []
    assert "The images are left out (record.images = false)" in page.words
    assert "position in the test data" in page.words


def test_examples_that_are_no_images_are_listed_by_position(tmp_path: Path) -> None:
    words = page_of(tmp_path, replace(evaluation(4), input_shape=(25,))).words
    assert "The examples are not images" in words


def test_a_perfect_model_has_no_mistakes(tmp_path: Path) -> None:
    given = evaluation(4)
    none = {name: values[:0] for name, values in given.mistakes.items()}
    assert "The model gave no wrong answer." in page_of(tmp_path, replace(given, mistakes=none)).words


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "The run directory has no evaluation.npz, because an older version of fedlens wrote it."),
        ({"summary": {"status": "interrupted"}}, "in the last round, which this run has not reached."),
        ({"summary": {}}, "in the last round, which this run has not reached."),
        (
            {"metrics": [{"round": 0, "validation_accuracy": 0.1, "elapsed": 1.0}]},
            "Each client has a model of its own, so there is no global model",
        ),
    ],
)
def test_a_run_without_the_file_says_why(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    assert said in page_of(tmp_path, None, **more).words


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def about(**changed: Any) -> NDArray[np.uint8]:
    fields = {"format": "fedlens-evaluation-1", "round": 3, "kind": "classification", "classes": ["a", "b"]}
    return np.frombuffer(json.dumps(fields | {"input_shape": [1, 8, 8]} | changed).encode(), np.uint8)


BINS = {f"sums.bin_{name}": np.zeros(15, np.int64) for name in ("count", "correct", "confidence")}
WHOLE: dict[str, Any] = {"about": about(), "sums.confusion": np.eye(2, dtype=np.int64), **BINS}
ONE = {
    "mistakes.index": np.array([3]),
    "mistakes.truth": np.array([0]),
    "mistakes.confidence": np.array([0.5]),
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no npz file",
        npz(**WHOLE)[:-40],
        npz(**{**WHOLE, "about": np.array([1, 2], np.uint8)}),
        npz(**{**WHOLE, "about": about(format="another")}),
        npz(**{**WHOLE, "about": about(classes=3)}),
        npz(**{**WHOLE, "about": about(round=None)}),
        npz(**{name: array for name, array in WHOLE.items() if name != "about"}),
        npz(**{**WHOLE, "sums.confusion": np.eye(3, dtype=np.int64)}),
        npz(**{**WHOLE, "sums.confusion": np.full((2, 2), np.nan)}),
        npz(**{**WHOLE, "sums.confusion": np.array([["a"]])}),
        npz(**{name: array for name, array in WHOLE.items() if name != "sums.confusion"}),
        npz(**{**WHOLE, "sums.bin_count": np.zeros(3, np.int64)}),
        npz(**WHOLE, **ONE),
        npz(**WHOLE, **ONE, **{"mistakes.answer": np.array([7])}),
        npz(**WHOLE, **ONE, **{"mistakes.answer": np.array([1, 1])}),
        npz(**WHOLE, **ONE, **{"mistakes.answer": np.array([1])}, images=np.zeros((2, 1, 8, 8), np.uint8)),
        npz(**WHOLE, **ONE, **{"mistakes.answer": np.array([1])}, images=np.zeros((1, 5, 8, 8), np.uint8)),
        npz(**WHOLE, images=np.zeros((1, 1, 8, 8), np.uint8)),
    ],
)
def test_a_damaged_file_costs_the_section_alone(tmp_path: Path, content: bytes) -> None:
    words = page_of(tmp_path, content).words
    assert "This section is missing: evaluation.npz is corrupt: " in words
    assert "Final accuracy 84.6 %" in words


def test_an_array_that_unpacks_to_far_more_is_not_unpacked(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **{**WHOLE, "images": np.zeros(2**28, np.uint8)})
    (tmp_path / "evaluation.npz").write_bytes(file.getvalue())
    with pytest.raises(RunDirectoryError, match=r"corrupt: its arrays are too large"):
        FinalEvaluation.read(tmp_path / "evaluation.npz")


def test_any_flipped_byte_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    replace(evaluation(3, 40), images=None).write(path)
    content, right = path.read_bytes(), FinalEvaluation.read(path)
    for at in range(0, len(content), 41):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        try:
            read = FinalEvaluation.read(path)
        except RunDirectoryError:
            continue
        assert {name: value.tolist() for name, value in read.sums.items()} == {
            name: value.tolist() for name, value in right.sums.items()
        }


def test_names_of_classes_are_text_and_not_markup(tmp_path: Path) -> None:
    given = evaluation(4)
    page = page_of(
        tmp_path,
        replace(given, classes=(EVIL, *given.classes[1:]), images=images_of(len(given.mistakes["index"]))),
    )
    assert page.words.count(EVIL) >= 2
    assert all("alert(1)" not in script for script in page.scripts)


def test_another_task_has_no_such_section(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(evaluation(4), kind="language"))
    assert "Test data in detail" not in page.words


def test_images_are_removed_from_a_file_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    given = replace(evaluation(10), images=images_of(WORST))
    given.write(path)
    remove_images(path)
    read = FinalEvaluation.read(path)
    assert read.images is None
    assert np.array_equal(read.sums["confusion"], given.sums["confusion"])
    assert np.array_equal(read.mistakes["confidence"], given.mistakes["confidence"])
    path.write_bytes(b"damaged, and perhaps with images")
    remove_images(path)
    assert not path.exists()


@pytest.mark.parametrize("classes", [10, 40])
def test_the_figures_are_drawn_for_papers_too(tmp_path: Path, classes: int) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    run = make_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="has not recorded its last evaluation"):
        draw_evaluation(run, tmp_path)
    evaluation(classes).write(run / "evaluation.npz")
    files: Sequence[Path] = draw_evaluation(run, tmp_path / "out", ["png"])
    assert sorted(path.name for path in files) == ["class-accuracy.png", "confusion.png", "reliability.png"]
    for path in files:
        with Image.open(path) as image:
            assert image.width >= 600


@pytest.mark.parametrize("classes", [10, 40, 230])
def test_plotly_accepts_the_figures_of_the_section(tmp_path: Path, classes: int) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    for figure in page_of(tmp_path, evaluation(classes)).figures:
        go.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", json.dumps(figure))))
