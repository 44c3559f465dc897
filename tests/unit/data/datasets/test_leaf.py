import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.leaf import Converted, User, read_split, read_users, split_folders, whole_numbers
from tests.unit.data.datasets.small_files import leaf, write_leaf

PEOPLE = {"b": ([[1], [2], [3]], [7, 8, 9]), "a": ([[4]], [5])}


def convert(user: User) -> tuple[np.ndarray, np.ndarray]:
    return np.array(user.x), whole_numbers(user, 10)


def test_users_come_in_the_order_of_the_file_with_their_examples(tmp_path: Path) -> None:
    path = write_leaf(tmp_path, leaf(PEOPLE, hierarchies=["play"]))
    found = read_users(path, convert)
    assert [(name, x.tolist(), y.tolist()) for name, (x, y) in found.items()] == [
        ("b", [[1], [2], [3]], [7, 8, 9]),
        ("a", [[4]], [5]),
    ]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "order", [["user_data", "num_samples", "users"], ["users", "user_data", "num_samples"]]
)
def test_keys_may_come_in_any_order_and_with_blanks(
    tmp_path: Path, indent: int | None, order: list[str]
) -> None:
    content = leaf(PEOPLE)
    text = "\ufeff " + json.dumps({key: content[key] for key in order}, indent=indent) + " \n"
    assert list(read_users(write_leaf(tmp_path, text), convert)) == ["b", "a"]


def test_a_user_is_converted_before_the_next_one_is_parsed(tmp_path: Path) -> None:
    """The first user is converted before the break in the file is reached."""
    text = json.dumps(leaf(PEOPLE))
    path = write_leaf(tmp_path, text[: text.index('"a": {')] + "oh")
    seen = []

    def note(user: User) -> Converted:
        seen.append(user.y)
        return convert(user)

    with pytest.raises(DataError, match="not valid JSON"):
        read_users(path, note)
    assert seen == [[7, 8, 9]]


def test_a_split_is_read_over_all_files_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        write_leaf(
            tmp_path, leaf({f"w{number}": ([[number]] * 2, [1, 2])}), f"all_data_{number}_train_9.json"
        )
    (tmp_path / "readme.txt").write_text("not data")
    inputs, targets, names = read_split(tmp_path, convert)
    assert inputs.tolist() == [[0], [0], [9], [9], [10], [10]]
    assert targets.tolist() == [1, 2] * 3
    assert names.tolist() == ["w0", "w0", "w9", "w9", "w10", "w10"]
    assert names.dtype.kind == "U"


def test_the_empty_entries_that_leaf_leaves_behind_are_no_users(tmp_path: Path) -> None:
    """Splitting by sample keeps an entry, without examples, of users who have fewer than two."""
    content = leaf(PEOPLE)
    content["user_data"]["gone"] = {"x": [], "y": []}
    write_leaf(tmp_path, content)
    assert set(read_split(tmp_path, convert)[2]) == {"a", "b"}


def edited(change: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(leaf(PEOPLE)))
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (edited(lambda c: c.pop("users")), "the key 'users' is missing"),
        (edited(lambda c: c.pop("num_samples")), "the key 'num_samples' is missing"),
        (edited(lambda c: c.pop("user_data")), "the key 'user_data' is missing"),
        (edited(lambda c: c["num_samples"].__setitem__(0, 4)), "says 4 for the user 'b', who has 3 examples"),
        (edited(lambda c: c["num_samples"].pop()), "are not lists of one length"),
        (edited(lambda c: c["user_data"].pop("a")), "1 users have no data in 'user_data', the first is 'a'"),
        (
            edited(lambda c: (c["users"].pop(0), c["num_samples"].pop(0))),
            "1 users with data are not in 'users', the first is 'b'",
        ),
        (edited(lambda c: c["user_data"]["a"].pop("y")), "the user has no list 'y'"),
        (edited(lambda c: c["user_data"].__setitem__("a", 3)), "the user has no list 'x'"),
        (edited(lambda c: c["user_data"]["a"]["x"].append([1])), "has 2 inputs 'x' and 1 targets 'y'"),
        (edited(lambda c: c["user_data"]["b"]["y"].__setitem__(1, 10)), "example 1 has the label 10, and"),
        (edited(lambda c: c["user_data"]["b"]["y"].__setitem__(1, "8")), "example 1 has the label '8', and"),
        (edited(lambda c: c["user_data"]["b"]["y"].__setitem__(1, True)), "example 1 has the label True"),
        ({"users": [], "num_samples": [], "user_data": {}}, "the files have no examples"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, content: Any, what: str) -> None:
    path = write_leaf(tmp_path, content)
    with pytest.raises(DataError) as caught:
        read_split(tmp_path, convert)
    assert what in caught.value.what
    assert str(caught.value.where).startswith(str(path) if "no examples" not in what else str(tmp_path))
    assert "preprocess.sh" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "what", "place"),
    [
        ("", "Expecting value", "line 1, column 1"),
        ('{"users": [}', "Expecting value", "line 1, column 12"),
        ('{"users": ["a"]', "Expecting ',' delimiter", "line 1, column 16"),
        ('{"users": ["a"]\n"num_samples"', "Expecting ',' delimiter", "line 2, column 1"),
        ('{"users" ["a"]}', "Expecting ':' delimiter", "line 1, column 10"),
        ("{1: 2}", "Expecting property name enclosed in double quotes", "line 1, column 2"),
        ('{"users": ["a]}', "Unterminated string", "line 1, column 12"),
        (json.dumps(leaf(PEOPLE)) + "\n}", "Extra data", "line 2, column 1"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path: Path, text: str, what: str, place: str) -> None:
    path = write_leaf(tmp_path, text)
    with pytest.raises(DataError, match="not valid JSON") as caught:
        read_users(path, convert)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, {place}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "the key 'users' is missing"),
        ('{"users": [], "num_samples": [], "user_data": []}', "'user_data' is not an object"),
        ('{"users": ' + "[" * 200_000, "the file cannot be read: it is nested more than 200"),
    ],
)
def test_json_of_another_form_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = write_leaf(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_users(path, convert)
    assert caught.value.what.startswith(what)
    assert caught.value.where == str(path)
    assert "preprocess.sh" in str(caught.value.hint)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"users": ["\xe9"]}')
    with pytest.raises(DataError, match="not in UTF-8: byte 12 "):
        read_users(path, convert)


def test_a_user_may_be_in_one_place_only(tmp_path: Path) -> None:
    write_leaf(tmp_path, leaf(PEOPLE), "all_data_0.json")
    write_leaf(tmp_path, leaf({"a": ([[1]], [1])}), "all_data_1.json")
    with pytest.raises(DataError, match=r"the user 'a' is in all_data_0\.json too") as caught:
        read_split(tmp_path, convert)
    assert caught.value.where == str(tmp_path / "all_data_1.json")
    twice = '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [1], "y": [1]}, "a": {"x": [], "y": []}}}'
    with pytest.raises(DataError, match="the user 'a' has data twice"):
        read_users(write_leaf(tmp_path, twice), convert)


@pytest.mark.parametrize("place", ["femnist", "femnist/data", "leaf/data/femnist/data"])
def test_the_folders_are_found_where_people_put_them(tmp_path: Path, place: str) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / place / split, leaf(PEOPLE))
    assert split_folders(tmp_path, "femnist") == (tmp_path / place / "train", tmp_path / place / "test")


def test_missing_folders_and_files_are_an_error_that_says_how_to_make_them(tmp_path: Path) -> None:
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="FEMNIST not found in") as caught:
        split_folders(tmp_path, "femnist")
    assert "./preprocess.sh" in str(caught.value.hint)
    assert "FEDLENS_DATA" in str(caught.value.hint)
    with pytest.raises(DataError, match="the files have no examples"):
        read_split(tmp_path / "femnist" / "train", convert)
