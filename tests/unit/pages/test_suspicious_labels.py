"""The list of labels to check: which images several models agree on, and in which order."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlens.observers.held_out_predictions import HeldOutPredictions
from fedlens.pages.suspicious_labels import CLIENTS, label_card, suspicious_labels, write_labels


def predictions(p: list[list[float]], labels: list[int], sizes: list[int]) -> HeldOutPredictions:
    probabilities = np.array(p, np.float32)
    top = np.argsort(-probabilities, axis=1, kind="stable")
    return HeldOutPredictions(
        round=3,
        classes=("cat", "dog", "fox"),
        clients=tuple(f"c{k}" for k in range(len(sizes))),
        offsets=np.cumsum([0, *sizes]),
        index=np.arange(len(labels)) + 100,
        label=np.array(labels),
        confidence=probabilities[range(len(labels)), labels],
        top=top,
        scores=np.take_along_axis(probabilities, top, 1),
        files=tuple(f"{k}.png" for k in range(len(labels))),
    )


CAT, DOG, WRONG = [0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.0, 1.0, 0.0]
# Two clients. The labels of images 1 and 4 are contradicted, 4 more than 1.
ONE = predictions([CAT, [0.1, 0.9, 0.0], DOG, CAT, WRONG, DOG], [0, 0, 1, 0, 0, 1], [3, 3])
NONE = predictions([CAT, CAT, DOG, CAT, CAT, DOG], [0, 0, 1, 0, 0, 1], [3, 3])


def files(runs: list[HeldOutPredictions], **more: list[str]) -> dict[str, list[str]]:
    return {each.client: [image.file for image in each.images] for each in suspicious_labels(runs, **more)}


def test_one_model_lists_what_it_contradicts_and_several_what_most_of_them_do() -> None:
    assert files([ONE]) == {"c0": ["1.png"], "c1": ["4.png"]}
    assert files([ONE, NONE]) == {}
    (first, _) = suspicious_labels([ONE, ONE, NONE])
    image = first.images[0]
    assert (image.models, first.models, first.found, first.held_out) == (2, 3, 1, 3)
    assert (image.label, image.suggested, image.index) == ("cat", "dog", 100 + int(image.file[0]))
    assert first.head()[-1] == "models that agree"
    assert first.rows()[0][-1] == "2 of 3"
    assert [
        len(row) for row in (suspicious_labels([ONE])[0].head(), suspicious_labels([ONE])[0].rows()[0])
    ] == [4, 4]
    assert suspicious_labels([]) == []


def test_the_largest_margin_comes_first_and_named_clients_before_all_others() -> None:
    both = predictions([[0.15, 0.85, 0.0], WRONG, CAT, CAT, CAT, DOG], [0, 0, 0, 0, 0, 1], [5, 1])
    assert files([both]) == {"c0": ["1.png", "0.png"]}
    assert list(files([ONE], first=["c1"])) == ["c1", "c0"]
    assert list(files([ONE], first=["c0"])) == ["c0", "c1"]


def test_runs_that_hold_out_other_images_are_not_asked() -> None:
    (first, _) = suspicious_labels([ONE, replace(NONE, index=NONE.index + 1)])
    assert first.models == 1


def test_at_most_ten_clients_are_listed() -> None:
    many = predictions([CAT, WRONG] * 12 + [DOG], [0, 0] * 12 + [1], [2] * 12 + [1])
    assert len(suspicious_labels([many])) == 12
    card = label_card(suspicious_labels([many]))
    assert len(card["clients"]) == CLIENTS
    assert "labels_to_check.csv beside this page lists 12 such images of 12 clients." in " ".join(
        card["lead"]
    )


def test_a_page_shows_twelve_images_of_a_client_and_the_file_all_of_them(tmp_path: Path) -> None:
    named = replace(
        predictions([WRONG] * 15 + [CAT] * 15 + [DOG], [0] * 30 + [1], [31]),
        clients=("=1+2",), files=("a\x1b.png", *(f"{k}.png" for k in range(1, 31))),
    )  # fmt: skip
    listed = suspicious_labels([named])
    assert len(listed[0].as_row()["images"]) == 15
    (shown,) = label_card(listed)["clients"]
    assert len(shown.images) == 12
    path = tmp_path / "labels_to_check.csv"
    write_labels(path, [each.as_row() for each in listed])
    head, first, *others = csv.reader(path.read_text("utf-8").splitlines())
    assert head[:4] == ["client", "file", "training image", "label"]
    assert first == ["'=1+2", "a\\x1b.png", "100", "cat", "dog", "0.0", "1", "1"]
    assert len(others) == 14
    write_labels(path, [])
    assert not path.exists()


def test_the_card_says_what_it_is_and_has_no_image_unasked() -> None:
    assert "the models contradict" in label_card(suspicious_labels([ONE, ONE]))["lead"][0]
    card = label_card(suspicious_labels([ONE]))
    assert "the model contradicts" in " ".join(card["lead"])
    assert "The model did not train on these images" in " ".join(card["lead"])
    assert "many of these labels may be right" in " ".join(card["lead"])
    assert "This page contains" not in " ".join(card["lead"])
    pictured = replace(ONE, pictured=np.array([1]), images=np.zeros((1, 1, 8, 8), np.uint8))
    assert (
        "This page contains these images of the clients"
        in label_card(suspicious_labels([pictured], pictures=True))["lead"][-1]
    )
    assert not any(each.pictured for each in suspicious_labels([pictured]))
    assert label_card([])["clients"] == []
