"""A partition function of the user's own: its clients, and the error for a client that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import DataError
from fedlens.data.partition.partition import Partition
from fedlens.settings.make_partition import make_partition

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "one_kind_each.py"


def test_the_example_names_its_clients(tmp_path: Path) -> None:
    made = make_partition("digits", f"{EXAMPLE}:one_kind_each", ["most=5"], root=tmp_path).partition
    assert (made.ids[:2], made.sizes().tolist()) == (("only 0", "only 1"), [5] * 10)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (
            "3",
            "`owners` has client 9, but `clients` has 3, numbered from 0 (mine.py, line 4); pass the number",
        ),
        (
            "table.classes[:4]",
            "`owners` has client 9, but `clients` has 4, numbered from 0 (mine.py, line 4)",
        ),
        (
            "range(10)",
            "not a valid partition: the ids are not all strings, or not all different (mine.py, line 4)",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_the_file(clients: Any, message: str, tmp_path: Path) -> None:
    lines = ["from fedlens.data.partition.partition import Partition", "", ""]
    lines += ["def mine(table, seed):", f"    return Partition.of_owners(table.labels, clients={clients})"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        make_partition("digits", f"{tmp_path}/mine.py:mine", root=tmp_path)
    assert str(refused.value).startswith(message)


def test_an_example_may_belong_to_nobody() -> None:
    assert Partition.of_owners([0, -1, 1], clients=["a", "b"]).sizes().tolist() == [1, 1]
