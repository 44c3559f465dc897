"""`natural` against a dictionary of lists."""

from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.partition.natural import natural
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table


def rows(p: Partition) -> dict[str, list[int]]:
    return {name: row.tolist() for name, row in zip(p.ids, p, strict=True)}


def table(values: Any, name: str = "client", **more: Any) -> Table:
    return Table.of(np.zeros(len(values), int), {name: np.asarray(values)}, **more)


def test_a_client_for_each_value_in_sorted_order() -> None:
    found = natural(table(["b", "a", "b", "C", "ä", "a"]), 0)
    assert list(rows(found).items()) == [("C", [3]), ("a", [1, 5]), ("b", [0, 2]), ("ä", [4])]


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ([10, 2, 2, 33, -1], ("-1", "2", "10", "33")),
        (np.array([10, 2, 2, 33], np.uint8), ("2", "10", "33")),
        ([10.5, 2.0, 2.0, 33.0], ("2.0", "10.5", "33.0")),
        (["10", "2", "2", "33"], ("10", "2", "33")),
        (np.array([10, 2, 2, 33], object), ("2", "10", "33")),
        (np.array(["b", "a", 7, "a"], object), ("7", "a", "b")),
        (np.array([b"z\xc3\xbc", b"a"]), ("a", "zü")),
        ([True, False, True], ("False", "True")),
        (np.array(["2017-05-02", "2017-05-01"], "M8[D]"), ("2017-05-01", "2017-05-02")),
        (["nan", "None", "0"], ("0", "None", "nan")),
    ],
)
def test_numbers_go_by_size_and_text_by_letters(values: Any, ids: tuple[str, ...]) -> None:
    assert natural(table(values), 0).ids == ids


def test_it_is_a_dictionary_of_lists() -> None:
    rng = np.random.default_rng(0)
    for dtype in (object, "U8"):
        values = np.array([f"user{i}" for i in rng.integers(0, 300, 2000)], dtype)
        labels = rng.integers(0, 9, 2000)
        expected: dict[str, list[int]] = {}
        for i, value in enumerate(values.tolist()):
            expected.setdefault(value, []).append(i)
        kept = {
            name: held
            for name, held in sorted(expected.items())
            if len(held) >= 6 and len(set(labels[held])) >= 5
        }
        found = natural(Table.of(labels, {"client": values}), 0, min_examples=6, min_classes=5)
        assert rows(found) == kept
        assert found.spec["dropped"] == {
            "clients": len(expected) - len(kept),
            "examples": 2000 - sum(map(len, kept.values())),
        }
        assert 0 < len(kept) < 290


def test_classes_of_an_example_with_several_are_counted_once_a_client() -> None:
    sets = Table.of_sets([[0, 1], [1], [0], [0], [2, 1, 0], []], columns={"city": np.array(list("aabbcc"))})
    assert natural(sets, 0, column="city", min_classes=2).ids == ("a", "c")
    assert natural(sets, 0, column="city").ids == ("a", "b", "c")


def test_some_clients_are_chosen_at_random_among_those_that_stay() -> None:
    values = np.repeat(np.arange(40), np.arange(1, 41))
    chosen = [natural(table(values), seed, min_examples=11, max_clients=10) for seed in range(40)]
    assert all(len(p) == 10 for p in chosen)
    assert len({p.ids for p in chosen}) > 35
    assert {int(name) for p in chosen for name in p.ids} == set(range(10, 40))
    assert all(list(map(int, p.ids)) == sorted(map(int, p.ids)) for p in chosen)
    for p in chosen:
        assert all((values[row] == int(name)).all() for name, row in zip(p.ids, p, strict=True))
    assert natural(table(values), 0, max_clients=10**6).ids == natural(table(values), 3).ids


@pytest.mark.parametrize(
    ("values", "missing", "first"),
    [
        (["a", "", "b", " "], 2, 1),
        (["a", "b", "\t"], 1, 2),
        ([1.0, 2.0, np.nan, np.nan, 3.0], 2, 2),
        (np.array(["a", None, "b"], object), 1, 1),
        (np.array(["a", float("nan"), "b", ""], object), 2, 1),
        (np.array([3, None, 4], object), 1, 1),
        (np.array([b"a", b"", b"b"]), 1, 1),
        (np.array(["2017-05-02", "NaT", "2017-05-01"], "M8[D]"), 1, 1),
    ],
)
def test_missing_values_are_counted_and_the_first_named(values: Any, missing: int, first: int) -> None:
    what = (
        f"{missing} of {len(values)} examples have no value .* 'client', the first of them example {first};"
    )
    with pytest.raises(DataError, match=what):
        natural(table(values), 0)


def test_an_example_is_named_by_its_place_in_the_training_split() -> None:
    part = table(["a", "b", "", "a", "b"], dataset="mine").take(np.array([4, 2, 0]))
    with pytest.raises(DataError, match=r"example 2 \(mine\)"):
        natural(part, 0)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (["a", "a"], "all 2 examples have the value 'a' in the column 'client', which makes 1 client;"),
        ([7], "all 1 examples have the value '7'"),
        ([], "there is no value in the column 'client', which makes 0 clients"),
    ],
)
def test_one_client_alone_is_an_error(values: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        natural(table(np.array(values)), 0)


def test_a_column_that_is_not_there_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no column 'client'.*did you mean 'clients'"):
        natural(table(["a", "b"], name="clients"), 0)
    with pytest.raises(ConfigError, match="no column 'client'"):
        natural(np.zeros(4, int), 0)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"min_examples": 4}, r"1 of the 3 clients in 'client' have 4 examples.*\(min_examples\)"),
        ({"min_examples": 99}, "0 of the 3 clients"),
        ({"min_classes": 2}, r"0 of the 3 clients.*2 classes.*\(min_classes\)"),
        ({"max_clients": 1}, "'max_clients' is 1"),
    ],
)
def test_filters_that_leave_too_few_are_an_error(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        natural(table(list("aaaabbc")), 0, **settings)


def test_the_recipe_is_in_the_spec_and_the_partition_pinned() -> None:
    values = [f"u{i * i % 101}" for i in range(500)]
    p = natural(table(values), 7, min_examples=6, max_clients=20)
    assert p.spec == {
        "name": "natural",
        "column": "client",
        "min_examples": 6,
        "min_classes": 0,
        "max_clients": 20,
        "seed": 7,
        "dropped": {"clients": 31, "examples": 500 - len(p.indices)},
    }
    assert p.digest[:16] == "36171e4038089a88"


def test_settings_are_checked_by_name() -> None:
    assert read_settings(natural, {}, "p")["column"] == "client"
    for wrong in ({"min_examples": 0}, {"max_clients": 1}, {"min_classes": -1}, {"column": 3}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(natural, wrong, "data.partition")
