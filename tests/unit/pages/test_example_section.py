"""The section with example predictions: pixels of masks, boxes and labels, and pages that stay small."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedlens.observers.example_predictions import PIXELS, ExamplePredictions
from fedlens.observers.final_evaluation import scaled_down
from fedlens.pages.run_page import write_report
from fedlens.vision.mask_colors import mask_colors
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import make_run

EVIL = "</script><script>alert(1)</script><b>"
ROUNDS = {"first": 0, "best": 3, "last": 5}


def images_of(n: int, height: int, width: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 3, height, width), np.uint8)
    return np.stack([scaled_down(image, PIXELS // n) for image in images])


def of_masks(
    classes: int,
    n: int = 2,
    height: int = 12,
    width: int = 16,
    rounds: Mapping[str, int] = ROUNDS,
    noise: bool = False,
) -> ExamplePredictions:
    """The truth has stripes of classes, and a first row without a class; each round has fewer wrong columns."""
    images = images_of(n, height, width)
    h, w = images.shape[2:]
    truth = np.broadcast_to((np.arange(w) * classes // w).astype(np.uint8), (n, h, w)).copy()
    answers = {}
    for stage, wrong in zip(ROUNDS, (1.0, 0.5, 0.25), strict=True):
        answer = truth.copy()
        columns = int(wrong * w)
        answer[:, :, :columns] = (answer[:, :, :columns] + 1) % classes
        if noise:
            answer = np.random.default_rng(1).integers(0, classes, truth.shape, np.uint8)
        answers[stage] = {"class": answer}
    truth[:, 0] = 255
    names = tuple(f"class {k}" for k in range(classes))
    kept = {stage: answers[stage] for stage in rounds}
    return ExamplePredictions("masks", names, np.arange(n), images, {"class": truth}, kept, rounds)


def of_boxes(
    classes: int, found: int, n: int = 2, true: int = 3, rounds: Mapping[str, int] = ROUNDS
) -> ExamplePredictions:
    """Random boxes; the last has the score 0.1, so it is not drawn."""
    rng = np.random.default_rng(0)
    images = images_of(n, 96, 128)

    def boxes(each: int) -> dict[str, NDArray[Any]]:
        corners = rng.uniform(0, 1, (n * each, 2)) * np.array([90, 60])
        sizes = rng.uniform(8, 36, (n * each, 2))
        return {
            "boxes": np.concatenate([corners, corners + sizes], 1).astype(np.float32),
            "labels": rng.integers(0, classes, n * each),
            "image": np.repeat(np.arange(n), each),
        }

    answers = {}
    for stage in rounds:
        scores = np.concatenate([np.linspace(0.99, 0.3, found)[: found - 1], np.full(min(1, found), 0.1)] * n)
        answers[stage] = {**boxes(found), "scores": scores.astype(np.float32)}
    names = tuple(f"class {k}" for k in range(classes))
    return ExamplePredictions("boxes", names, np.arange(n) * 7, images, boxes(true), answers, rounds)


def html_of(root: Path, given: ExamplePredictions | bytes, **more: Any) -> str:
    run = make_run(root, **more)
    if isinstance(given, bytes):
        (run / "examples.npz").write_bytes(given)
    else:
        given.write(run / "examples.npz")
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    return html


def page_of(root: Path, given: ExamplePredictions | bytes, **more: Any) -> Page:
    return read_page(html_of(root, given, **more))


def pictures_of(page: Page) -> list[Image.Image]:
    urls = [value or "" for name, value in page.attributes if name == "src"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def descriptions_of(page: Page) -> list[str]:
    return [value or "" for name, value in page.attributes if name == "alt"]


def test_a_mask_row_has_image_answers_truth_and_differences(tmp_path: Path) -> None:
    given = of_masks(4)
    page = page_of(tmp_path, given)
    shown = pictures_of(page)
    assert len(shown) == 2 * 8
    image, *answers = (np.asarray(picture.convert("RGB")) for picture in shown[:4])
    assert np.array_equal(image, given.images[0].transpose(1, 2, 0))
    colors = mask_colors(4)
    for answer, stage in zip(answers, ROUNDS, strict=True):
        assert np.array_equal(answer, colors[given.answers[stage]["class"][0]])
    truth, *differences = (np.asarray(picture.convert("RGB")) for picture in shown[4:8])
    assert np.array_equal(truth[1:], colors[given.truth["class"][0, 1:]])
    assert len(np.unique(truth[0].reshape(-1, 3), axis=0)) == 2  # the stripes of pixels without a class
    for difference, stage in zip(differences, ROUNDS, strict=True):
        wrong = given.answers[stage]["class"][0, 1:] != given.truth["class"][0, 1:]
        colours = difference[1:].reshape(-1, 3)
        assert len(np.unique(colours[wrong.ravel()], axis=0)) == 1
        assert len(np.unique(colours[~wrong.ravel()], axis=0)) == (0 if wrong.all() else 1)


def test_captions_say_round_and_difference(tmp_path: Path) -> None:
    page = page_of(tmp_path, of_masks(4))
    assert "Test image 0 image Round 0, before training Round 3, best Round 5, last truth" in page.words
    assert (
        "100.0 % of the pixels differ 50.0 % of the pixels differ 25.0 % of the pixels differ" in page.words
    )
    assert descriptions_of(page)[1].startswith(
        "Round 0, before training, predicted: class 0 25.0 %, class 1 25.0 %"
    )
    assert "no true class" in page.words


@pytest.mark.parametrize(
    ("rounds", "titles"),
    [
        ({"first": 0, "best": 5, "last": 5}, ["Round 0, before training", "Round 5, best and last"]),
        ({"first": 0, "best": 0, "last": 5}, ["Round 0, before training and best", "Round 5, last"]),
        ({"first": 0}, ["Round 0, before training"]),
        ({"best": 2, "last": 5}, ["Round 2, best", "Round 5, last"]),
    ],
)
@pytest.mark.parametrize("kind", ["masks", "boxes"])
def test_a_round_is_shown_once(tmp_path: Path, kind: str, rounds: dict[str, int], titles: list[str]) -> None:
    given = of_masks(3, rounds=rounds) if kind == "masks" else of_boxes(3, 4, rounds=rounds)
    page = page_of(tmp_path, given)
    for title in titles:
        assert page.words.count(title) == 2, title
    assert page.words.count(", best") <= 2 + 1


def test_masks_of_one_class_and_of_80_are_shown(tmp_path: Path) -> None:
    one = page_of(tmp_path / "one", of_masks(1))
    assert "0.0 % of the pixels differ" in one.words
    many = page_of(tmp_path / "many", of_masks(80, width=160))
    assert "class 39" in many.words
    assert "and 40 more classes" in many.words


def test_an_image_without_a_true_class_has_no_share(tmp_path: Path) -> None:
    given = of_masks(3)
    truth = np.full_like(given.truth["class"], 255)
    page = page_of(tmp_path, replace(given, truth={"class": truth}))
    assert "no pixel has a true class" in page.words
    assert "True classes: none" in descriptions_of(page)


@pytest.mark.parametrize("noise", [False, True])
def test_eight_large_images_take_at_most_2_megabytes(tmp_path: Path, noise: bool) -> None:
    given = of_masks(80, n=8, height=400, width=500, noise=noise)
    without = len(write_report(make_run(tmp_path / "without")).read_bytes())
    assert len(html_of(tmp_path / "with", given)) - without < 2_100_000


def test_boxes_are_drawn_over_the_image_with_class_and_score(tmp_path: Path) -> None:
    given = of_boxes(3, 4)
    page = page_of(tmp_path, given)
    assert page.tags.count("svg") == 2 * 3
    assert page.tags.count("image") == 2  # the other pictures of a test image use it again
    texts = [f"class {given.answers['last']['labels'][k]} 0.99" for k in (0, 4)]
    for text in texts:
        assert text in page.words
    assert "0.10" not in page.words
    assert "Round 5, last: 3 boxes, 3 true boxes" in page.words
    rects = page.attributes.count(("class", "found")), page.attributes.count(("class", "true"))
    assert rects == (2 * 3 * 3, 2 * 3 * 3)
    colors = ["#{:02x}{:02x}{:02x}".format(*color) for color in mask_colors(3).tolist()]
    assert {value for name, value in page.attributes if name == "stroke"} <= set(colors)
    labels = [value or "" for name, value in page.attributes if name == "aria-label"]
    assert any(
        label.startswith("Test image 7, Round 5, last: 3 boxes, 3 true boxes. Predicted: ")
        for label in labels
    )


def test_the_box_of_the_highest_score_is_drawn_last(tmp_path: Path) -> None:
    page = page_of(tmp_path, of_boxes(3, 5, n=1, rounds={"last": 5}))
    scores = [
        word
        for word in page.words.split("Round 5, last: ")[0].split()
        if word.startswith("0.") and len(word) == 4
    ]
    assert scores[-4:] == sorted(scores[-4:])


def test_the_score_from_which_boxes_are_drawn_is_that_of_the_task(tmp_path: Path) -> None:
    page = page_of(tmp_path, of_boxes(3, 4), config={"task": {"name": "detection", "shown_score": 0.05}})
    assert "with a score of 0.05 or more" in page.words
    assert "Round 5, last: 4 boxes" in page.words


def test_an_image_without_answer_and_one_with_200_boxes_are_shown(tmp_path: Path) -> None:
    none = page_of(tmp_path / "none", of_boxes(3, 0, true=0))
    assert "Round 5, last: no box, no true box" in none.words
    full = page_of(tmp_path / "full", of_boxes(80, 200, n=8))
    assert "Round 5, last: 199 boxes, 3 true boxes" in full.words
    assert full.tags.count("text") == 8 * 3 * 25
    assert "and 40 more classes" in full.words


def test_names_of_classes_are_only_text(tmp_path: Path) -> None:
    for given in (of_masks(2), of_boxes(2, 3)):
        page = page_of(tmp_path / given.annotates, replace(given, classes=(EVIL, "other")))
        assert EVIL in page.text or EVIL[:14] in page.text
        assert not any("alert" in script for script in page.scripts)


def test_record_images_false_leaves_the_examples_out(tmp_path: Path) -> None:
    page = page_of(tmp_path, of_masks(3), config={"record": {"images": False}})
    assert "Example predictions" not in page.words
    assert pictures_of(page) == []


def test_a_damaged_file_leaves_a_sentence_on_the_page(tmp_path: Path) -> None:
    words = page_of(tmp_path, b"PK damaged").words
    assert "Example predictions This section is missing: examples.npz is corrupt" in words


def test_a_run_without_examples_has_no_such_section(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    assert "Example predictions" not in html
