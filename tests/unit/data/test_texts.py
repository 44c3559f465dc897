"""Datasets of texts: the vocabulary, tokens and targets out of range, and arrays of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.penn_treebank import penn_treebank
from fedlens.data.datasets.sent140 import sent140
from fedlens.data.datasets.shakespeare import shakespeare
from tests.unit.data.datasets.small_files import leaf, write_leaf
from tests.unit.data.datasets.test_sent140 import write as write_tweets

TOKENS = np.array([[0, 3, 2], [1, 1, 4]], np.int16)


def texts(
    tokens: Any = TOKENS,
    targets: Any = (0, 1),
    classes: tuple[str, ...] = ("a", "b"),
    vocabulary: int | None = None,
) -> Dataset:
    split = Examples(np.asarray(tokens), np.asarray(targets, np.int64))
    return Dataset("own", split, split, classes, (), (), "none", "made up", vocabulary=vocabulary)


def test_the_vocabulary_is_not_the_number_of_classes(tmp_path: Path) -> None:
    write_tweets(tmp_path)
    tweets = sent140(tmp_path, False, 0, vocabulary=3)
    assert (tweets.vocabulary, len(tweets.classes)) == (5, 2)
    for split in ("train", "test"):
        write_leaf(tmp_path / "shakespeare" / split, leaf({"HAMLET": ([" " * 80], ["T"])}))
        name = {"train": "ptb.train.txt", "test": "ptb.test.txt"}[split]
        (tmp_path / "PennTreebank").mkdir(exist_ok=True)
        (tmp_path / "PennTreebank" / name).write_text("a few words", "utf-8")
    assert shakespeare(tmp_path, False, 0).vocabulary == 80
    assert penn_treebank(tmp_path, False, 0, length=4, stride=1).vocabulary == 80


def test_without_one_the_vocabulary_ends_at_the_largest_token() -> None:
    assert texts().vocabulary == texts().info.vocabulary == 5
    assert texts(vocabulary=9).info.vocabulary == 9
    assert texts(np.zeros((2, 3), np.int32)).vocabulary == 1


def test_images_have_no_vocabulary() -> None:
    pictures = Examples(np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1]))
    info = Dataset("own", pictures, pictures, ("a", "b"), (0.0,), (1.0,), "none", "made up").info
    assert (info.vocabulary, info.target_shape, info.gaps) == (None, (), False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocabulary": 4}, r"token 4 of text 1, position 2 is not in 0 \.\. 3, the vocabulary of 4"),
        ({"tokens": TOKENS - 1}, r"token -1 of text 0, position 0 is not in 0 \.\."),
        ({"targets": (0, 2)}, r"target 2 of text 1 is not in -1 \.\. 1, 2 classes"),
        ({"targets": (-2, 0)}, r"target -2 of text 0 is not in -1 \.\. 1"),
        ({"targets": [[0, 1, -1], [0, 5, 0]]}, r"target 5 of text 1, position 1 is not in -1 \.\. 1"),
    ],
)
def test_a_token_or_target_out_of_range_is_refused_with_its_position(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"{message}.*\(own, train\)"):
        texts(**changed)


def test_targets_of_another_type_are_refused() -> None:
    with pytest.raises(DataError, match=r"the targets are int32 \[2\], but must be int64 \[n\] or \[n, T\]"):
        Examples(TOKENS, np.zeros(2, np.int32))


def test_the_form_of_the_targets_is_known() -> None:
    assert (texts().info.target_shape, texts().info.gaps) == ((), False)
    last = texts(targets=(-1, 1))
    assert (last.info.target_shape, last.info.gaps) == ((), True)
    each = texts(targets=[[0, 1, 0], [0, 1, 1]])
    assert (each.info.target_shape, each.info.gaps) == ((3,), False)


def test_a_text_without_a_target_has_no_class_in_the_table() -> None:
    table = texts(targets=(-1, 1)).table()
    assert (table.marks.tolist(), table.offsets.tolist()) == ([1], [0, 0, 1])


def made(tokens: Any, labels: Any, **more: Any) -> Dataset:
    return dataset(tokens, labels, tokens, labels, **more)


def test_arrays_of_whole_numbers_are_texts() -> None:
    data = made([[0, 3], [5, 1]], ["good", "bad"], clients=["x", "y"])
    assert (data.kind, data.vocabulary, data.classes) == ("language", 6, ("bad", "good"))
    assert data.train.columns["client"].tolist() == ["x", "y"]
    assert made(np.array([[0, 3]], np.uint8), [0], vocabulary=4).kind == "language"


def test_with_labels_by_position_each_token_is_a_class() -> None:
    data = made([[0, 3], [2, 1]], [[3, -1], [1, 0]], vocabulary=5)
    assert data.classes == ("0", "1", "2", "3", "4")
    assert data.train.targets.tolist() == [[3, -1], [1, 0]]


@pytest.mark.parametrize(
    ("tokens", "labels", "more", "message"),
    [
        (np.zeros((2, 9), np.uint8), [0, 1], {}, r"must be \[n, H, W, C\]"),
        (
            np.zeros((2, 9)),
            [0, 1],
            {"vocabulary": 3},
            r"are float64 \[2, 9\], but texts must be whole numbers \[n, T\]",
        ),
        ([[0, 3], [1, 2]], [0, 1], {"vocabulary": 3}, "token 3 of text 0, position 1"),
        ([[0, 3], [1, 2]], [[0.5, 1.0], [0.0, 1.0]], {}, r"must be whole numbers \[n, T\], -1 for none"),
        ([[0, 3], [1, 2]], [0, 1, 1], {}, "there are 2 texts and 3 targets"),
    ],
)
def test_what_does_not_fit_texts_is_a_sentence(
    tokens: Any, labels: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        made(tokens, labels, **more)
