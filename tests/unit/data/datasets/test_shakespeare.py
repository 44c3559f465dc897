from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.shakespeare import HALVES, shakespeare
from fedlens.data.datasets.text import LETTERS
from tests.unit.data.datasets.small_files import leaf, write_leaf

LINE = " " * 80 + "  To be, or not to be: that is the question.\n"
ROLE = "THE_TRAGEDY_OF_HAMLET_PRINCE_OF_DENMARK_HAMLET"


def slid(line: str) -> tuple[list[str], list[str]]:
    """A line as LEAF makes examples of it: windows of 80 characters, and the next one."""
    starts = range(len(line) - 80)
    return [line[at : at + 80] for at in starts], [line[at + 80] for at in starts]


def write(root: Path, train: Any, test: Any) -> Path:
    write_leaf(root / "shakespeare" / "data" / "test", test)
    return write_leaf(root / "shakespeare" / "data" / "train", train)


def test_texts_become_ids_and_roles_are_the_clients(tmp_path: Path) -> None:
    people = {ROLE: slid(LINE), "HAMLET_GHOST": slid(" " * 80 + "Adieu")}
    write(tmp_path, leaf(people, hierarchies=["HAMLET", "HAMLET"]), leaf({ROLE: slid(" " * 80 + "Ha")}))
    data = shakespeare(tmp_path, False, 0)
    assert (data.kind, data.input_shape, data.mean, data.std) == ("language", (80,), (), ())
    texts = [*people[ROLE][0], *people["HAMLET_GHOST"][0]]
    assert ["".join(LETTERS[i] for i in row) for row in data.train.inputs] == texts
    assert "".join(LETTERS[i] for i in data.train.targets) == LINE[80:] + "Adieu"
    assert (data.train.inputs.dtype, data.train.targets.dtype) == (np.int16, np.int64)
    assert data.train.columns["client"].tolist() == [ROLE] * (len(LINE) - 80) + ["HAMLET_GHOST"] * 5
    assert data.test.columns["role"].tolist() == [ROLE] * 2
    assert (data.classes[LETTERS.index("T")], data.classes[0]) == ("T", "newline")
    assert data.notes == ()
    np.testing.assert_array_equal(data.table().labels, data.train.targets)


def test_two_halves_have_no_role_in_common_and_all_roles_together(tmp_path: Path) -> None:
    text = slid(" " * 80 + "Ha")
    train = dict.fromkeys(("ROMEO", "MENENIUS", "JULIET", "PETRUCHIO"), text)
    write(tmp_path, leaf(train), leaf(dict.fromkeys(("PETRUCHIO", "JULIET"), text)))
    halves = [shakespeare(tmp_path, False, seed, roles=half) for seed, half in enumerate(HALVES)]
    roles = [sorted(set(data.train.columns["client"])) for data in halves]
    assert roles == [["MENENIUS", "PETRUCHIO"], ["JULIET", "ROMEO"]]
    assert [set(data.test.columns["role"]) for data in halves] == [{"PETRUCHIO"}, {"JULIET"}]
    assert sum(len(data.train) for data in halves) == len(shakespeare(tmp_path, False, 0).train)


def test_a_half_without_a_role_is_refused(tmp_path: Path) -> None:
    one = leaf({"ROMEO": slid(LINE)})
    path = write(tmp_path, one, one)
    with pytest.raises(DataError, match="none of the roles is in the first-half") as caught:
        shakespeare(tmp_path, False, 0, roles="first-half")
    assert caught.value.where == str(path.parent)


def test_unknown_characters_are_spaces_and_noted(tmp_path: Path) -> None:
    x, y = slid(" " * 80 + "ab")
    x[0] = "<_" + x[0][2:]
    y[1] = "é"
    write(tmp_path, leaf({"r": (x, y)}), leaf({"r": (["$" * 80], ["b"])}))
    data = shakespeare(tmp_path, False, 0)
    assert data.train.inputs[0].tolist() == [1] * 80
    assert data.train.targets.tolist() == [LETTERS.index("a"), 1]
    assert data.notes == ("read 83 characters that LEAF's vocabulary lacks as spaces",)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("x", "a" * 79, "example 1 has an input of 79 characters, and 80 are expected"),
        ("x", "a" * 81, "example 1 has an input of 81 characters"),
        ("x", ["a"], "example 1 has an input that is not text"),
        ("y", "ab", "example 1 has a target of 2 characters"),
        ("y", "", "example 1 has a target of 0 characters"),
        ("y", 3, "example 1 has a target that is not text"),
    ],
)
def test_an_example_of_another_form_is_refused(tmp_path: Path, key: str, value: Any, what: str) -> None:
    content = leaf({ROLE: slid(LINE)})
    content["user_data"][ROLE][key][1] = value
    path = write(tmp_path, content, leaf({ROLE: slid(LINE)}))
    with pytest.raises(DataError) as caught:
        shakespeare(tmp_path, False, 0)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, user '{ROLE}'"
