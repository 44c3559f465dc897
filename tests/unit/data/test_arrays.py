"""A dataset from arrays, tensors and lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedlens
from fedlens.base.errors import DataError

LAST = np.arange(4 * 6 * 5 * 3).reshape(4, 6, 5, 3).astype(np.uint8)
FIRST = np.ascontiguousarray(LAST.transpose(0, 3, 1, 2))


def made(images: Any, labels: Any = (0, 1, 1, 0), **more: Any) -> Any:
    return fedlens.dataset(images, labels, images[:1], labels[:1], **more)


@pytest.mark.parametrize("images", [LAST, FIRST, torch.from_numpy(LAST), torch.from_numpy(FIRST)])
def test_both_layouts_give_the_same_images(images: Any) -> None:
    dataset = made(images)
    assert dataset.input_shape == (3, 6, 5)
    assert np.array_equal(dataset.train.inputs, FIRST)
    assert dataset.classes == ("0", "1")


def test_grey_images_get_a_channel() -> None:
    assert made(LAST[..., 0]).input_shape == (1, 6, 5)
    assert made(LAST[..., :1]).input_shape == (1, 6, 5)


def test_labels_may_be_names() -> None:
    names = ["dog", "cat", "cat", "dog"]
    assert made(LAST, names).train.targets.tolist() == [1, 0, 0, 1]
    assert made(LAST, names, classes=["dog", "cat"]).train.targets.tolist() == [0, 1, 1, 0]
    assert made(LAST, torch.tensor([2, 0, 1, 0])).classes == ("0", "1", "2")
    assert made(LAST, clients=["b", "a", "a", "c"]).train.columns["client"].tolist() == ["b", "a", "a", "c"]


@pytest.mark.parametrize(
    ("images", "labels", "more", "message"),
    [
        (
            LAST / 255,
            (0, 1, 1, 0),
            {},
            r"`images` are float64 from 0 to .*, but must be uint8.*\(255 \* images\)",
        ),
        (LAST[0, 0], (0, 1, 1, 0), {}, r"have the shape \[5, 3\], but must be"),
        (
            LAST[:, :3],
            (0, 1, 1, 0),
            {},
            r"either axis could be the channels \(fedlens.dataset\); set layout=",
        ),
        (LAST[..., :2], (0, 1, 1, 0), {}, "neither axis is 1, 3 or 4 channels"),
        (LAST, (0, 1, 1), {}, "there are 4 images and 3 labels"),
        (LAST, (0.5, 1, 1, 0), {}, "`labels` are float64, but must be whole numbers or names"),
        (LAST, (0, 1, 2, 0), {"classes": ["a", "b"]}, r"label 2 of record 2 is not in 0 \.\. 1"),
        (LAST, ["a", "b", "c", "a"], {"classes": ["a", "b"]}, "name a class 'c' that is not in `classes`"),
        (LAST, (0, 1, 1, 0), {"clients": ["a"]}, "the column 'client' has 1 values"),
    ],
)
def test_what_does_not_fit_is_a_sentence(images: Any, labels: Any, more: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(images, labels, **more)


@pytest.mark.parametrize(
    "labels",
    [
        [["cat", "dog"], [], {"dog"}, ("dog", "dog")],
        [["cat", "dog"], frozenset(), ["dog"], "dog"],
        np.array([["cat", "dog"], [], ["dog"], ["dog"]], dtype=object),
    ],
)
def test_an_image_may_have_several_names(labels: Any) -> None:
    dataset = made(LAST, labels)
    assert dataset.kind == "multi-label"
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.targets.tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]
    assert dataset.train.targets.dtype == np.uint8


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.uint8])
def test_a_table_of_zeros_and_ones_is_multi_label(kind: Any) -> None:
    labels = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]], kind)
    for given in (labels, torch.from_numpy(labels), list(labels), labels.tolist()):
        dataset = made(LAST, given)
        assert dataset.kind == "multi-label"
        assert dataset.classes == ("0", "1", "2")
        assert dataset.train.targets.tolist() == labels.tolist()


def test_a_test_set_may_be_without_any_label() -> None:
    dataset = fedlens.dataset(LAST, [["a"], ["b"], [], ["a", "b"]], LAST[:2], [[], []])
    assert dataset.test.targets.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("labels", "more", "message"),
    [
        (np.array([[3], [0], [1], [2]]), {}, r"one class an image, or one .*labels.ravel\(\)"),
        (np.array([[3], [0], [1], [2]]), {"classes": ["a"]}, r"a value 3; labels .* must be 0 or 1"),
        (np.eye(4, dtype=int) - 1, {}, "a value -1"),
        (np.eye(4, dtype=int), {"classes": ["a", "b"]}, r"\[4, 4\], but `classes` has 2 names"),
        (np.eye(4), {}, "`labels` are float64, but must be whole numbers or names"),
        ([[0, 1], [1], [0], [1]], {}, r"rows of different lengths .*of 0 and 1, or lists of names"),
        ([["a"], ["b", "x"], [], []], {"classes": ["a", "b"]}, "a class 'x' that is not in `classes`"),
    ],
)
def test_several_labels_that_do_not_fit_are_a_sentence(labels: Any, more: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(LAST, labels, **more)


def test_a_dataset_itself_is_no_setting() -> None:
    with pytest.raises(fedlens.base.errors.ConfigError, match="pass a function that returns it"):
        fedlens.Experiment(
            rounds=1,
            model="linear",
            local={"lr": 0.1},
            data={"dataset": made(LAST), "partition": {"name": "iid", "clients": 2}},
        )


def test_a_dataset_function_takes_any_of_its_arguments(tmp_path: Any) -> None:
    seen: list[Any] = []

    def by_seed(seed: int) -> Any:
        seen.append(seed)
        return made(np.repeat(LAST, 5, axis=0), [0, 1, 1, 0] * 5, seeded=True)

    settings: dict[str, Any] = {
        "rounds": 1,
        "model": "linear",
        "local": {"lr": 0.1},
        "seeds": {"data": 7},
        "engine": "inline",
        "data": {"dataset": by_seed, "partition": {"name": "iid", "clients": 2}},
    }
    fedlens.Experiment(**settings).run(tmp_path / "run", report=False)
    assert seen == [7]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            np.full((2, 8, 8), 16.0),
            "are float64 from 16 to 16, but .*for values from 0 to 16: \\(images \\* \\(255 / 16",
        ),
        (
            np.ones((2, 8, 8), np.float32),
            "are float32 from 1 to 1, but .*for values from 0 to 1: \\(255 \\* images",
        ),
        (np.full((2, 8, 8), 200), "are int64 from 200 to 200, but .*convert them: images.astype"),
        (np.full((2, 8, 8), -1.0), "are float64 from -1 to -1, but .*shift and scale them"),
    ],
)
def test_images_that_are_no_bytes_name_the_range_found(images: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(images, [0, 1])
