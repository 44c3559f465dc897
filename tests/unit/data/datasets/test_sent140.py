from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.sent140 import sent140
from tests.unit.data.datasets.small_files import leaf, write_leaf


def tweet(text: str, user: str = "amy") -> list[str]:
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text, "training"]


TRAIN = {
    "amy": ([tweet("the Sun the sun THE moon"), tweet("bad, bad moon")], [1, 0]),
    "zoe": ([tweet("a", "zoe")], [0]),
}
# the 3, bad 2, moon 2, sun 2, "," 1, a 1
TEST = {"kim": ([tweet("the rain , sun", "kim"), tweet("...:-)", "kim")], [1, 0])}


def write(root: Path, train: Any = None, test: Any = None) -> Path:
    write_leaf(root / "sent140" / "test", test or leaf(TEST))
    return write_leaf(root / "sent140" / "train", train or leaf(TRAIN))


def test_the_most_frequent_words_have_the_smallest_ids(tmp_path: Path) -> None:
    write(tmp_path)
    data = sent140(tmp_path, False, 0, length=6)
    the, bad, moon, sun, comma, a = 2, 3, 4, 5, 6, 7
    assert data.train.inputs.tolist() == [
        [the, sun, the, sun, the, moon],
        [bad, comma, bad, moon, 0, 0],
        [a, 0, 0, 0, 0, 0],
    ]
    assert data.test.inputs.tolist() == [[the, 1, comma, sun, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert data.train.inputs.dtype == data.test.inputs.dtype == np.int32
    assert data.train.targets.tolist() == [1, 0, 0]
    assert data.train.columns["client"].tolist() == ["amy", "amy", "zoe"]
    assert data.test.columns["user"].tolist() == ["kim", "kim"]
    assert (data.kind, data.classes, data.mean) == ("language", ("negative", "positive"), ())
    assert data.notes == ()
    assert data.table().labels.tolist() == [1, 0, 0]


def test_a_small_vocabulary_leaves_words_out_and_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    data = sent140(tmp_path, False, 0, vocabulary=2, length=6)
    assert data.train.inputs.tolist()[:2] == [[2, 1, 2, 1, 2, 1], [3, 1, 3, 1, 0, 0]]
    assert data.test.inputs.tolist()[0] == [2, 1, 1, 1, 0, 0]
    assert data.notes == (
        "the 2 most frequent of 6 words are known, 45.5% of the words of the training tweets",
    )


def test_a_long_tweet_is_cut_but_all_of_its_words_count(tmp_path: Path) -> None:
    write(tmp_path, leaf({"u": ([tweet("b a a a")], [1])}))
    assert sent140(tmp_path, False, 0, length=1).train.inputs.tolist() == [[3]]


def test_the_usual_form_is_25_words(tmp_path: Path) -> None:
    write(tmp_path)
    assert sent140(tmp_path, False, 0).input_shape == (25,)


def test_the_polarity_of_the_original_files_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, leaf({"u": ([tweet("a"), tweet("b")], [4, 0])}))
    assert sent140(tmp_path, False, 0).train.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("x", tweet("a")[:4], "example 1 is not a list of id, date, query, user and text"),
        ("x", "a b c d e f", "example 1 is not a list of"),
        ("x", ["1", "d", "q", "u", 3], "example 1 is not a list of"),
        ("y", 2, "example 1 has the polarity 2, and 0, 1 or 4 is expected"),
        ("y", "4", "example 1 has the polarity '4'"),
        ("y", True, "example 1 has the polarity True"),
    ],
)
def test_a_tweet_of_another_form_is_refused(tmp_path: Path, key: str, value: Any, what: str) -> None:
    content = leaf(TRAIN)
    content["user_data"] = {**content["user_data"], "amy": {"x": list(TRAIN["amy"][0]), "y": [1, 0]}}
    content["user_data"]["amy"][key][1] = value
    path = write(tmp_path, content)
    with pytest.raises(DataError) as caught:
        sent140(tmp_path, False, 0)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, user 'amy'"
