"""The chosen settings of a cell, and their stars."""

import itertools
import random

import pytest

from fedlens.results.cells import at_edge, chosen_values, edges, tried_values
from fedlens.results.rows import Results, Row, StudyInfo


def _entry(role: str, lr: float, seed: int = 0, alpha: float = 0.1) -> Row:
    name = f"{role}-{alpha}-{lr}-{seed}"
    case = {"data.partition.alpha": alpha}
    return Row.planned(name, name, "fedavg", case, {"local.lr": lr}, role, seed)  # type: ignore[arg-type]


def _results(*entries: Row) -> Results:
    info = StudyInfo(
        name="s",
        title="",
        seeds=[0],
        metric=None,
        last=1,
        targets=[],
        baseline="fedavg",
        methods={"fedavg": "FedAvg"},
        dimensions={"data.partition.alpha": "alpha"},
        cases=[{"data.partition.alpha": 0.1}, {"data.partition.alpha": 10.0}],
        grids={"fedavg": {"local.lr": [0.1, 0.01, 0.03]}},
        entries=entries,
    )
    return Results(info, {})


def test_both_ends_of_a_grid_are_its_edge_in_any_order_and_nothing_between() -> None:
    for values in itertools.permutations([0.001, 0.01, 0.1, 1]):
        assert [at_edge(values, value) for value in (0.001, 0.01, 0.1, 1)] == [True, False, False, True]


def test_every_value_of_a_grid_of_two_is_at_its_edge() -> None:
    assert at_edge([0.7, 0.9], 0.7)
    assert at_edge([0.7, 0.9], 0.9)


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1], ["sgd", "adam"], [True, False], [], [[1, 2], [3, 4]]])
def test_a_grid_of_one_value_and_names_have_no_edge(values: list) -> None:
    assert not any(at_edge(values, value) for value in values)


def test_a_number_beside_a_name_has_no_edge_of_its_own() -> None:
    assert not at_edge(["auto", 4], 4)
    assert at_edge(["auto", 4, 8], 8)
    assert not at_edge(["auto", 4, 8], "auto")


def test_random_values_have_the_least_and_the_largest_at_the_edge() -> None:
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.uniform(-1, 1) for _ in range(rng.randint(2, 9))]
        starred = {value for value in values if at_edge(values, value)}
        assert starred == {min(values), max(values)}


def test_the_choice_of_a_cell_is_the_point_of_its_final_runs() -> None:
    results = _results(
        _entry("tune", 0.01),
        _entry("tune", 0.1),
        _entry("tune", 1.0, alpha=10.0),
        _entry("final", 0.1),
        _entry("final", 1.0, alpha=10.0),
    )
    assert chosen_values(results, "fedavg", {"data.partition.alpha": 0.1}) == {"local.lr": 0.1}
    assert chosen_values(results, "fedavg", {"data.partition.alpha": 10.0}) == {"local.lr": 1.0}
    assert chosen_values(results, "fedavg", {"data.partition.alpha": 5.0}) == {}


def test_a_value_that_widening_added_counts_in_its_own_cell_only() -> None:
    tuned = [_entry("tune", lr, alpha=alpha) for alpha in (0.1, 10.0) for lr in (0.01, 0.1)]
    results = _results(*tuned, _entry("tune", 1.0), _entry("final", 0.1), _entry("final", 0.1, alpha=10.0))
    widened, given = ("fedavg", {"data.partition.alpha": 0.1}), ("fedavg", {"data.partition.alpha": 10.0})
    assert tried_values(results, *widened) == {"local.lr": (0.01, 0.1, 1.0)}
    assert tried_values(results, *given) == {"local.lr": (0.01, 0.1)}
    assert (edges(results, *widened), edges(results, *given)) == (set(), {"local.lr"})


def test_without_tuning_runs_the_grid_of_the_file_is_what_was_tried() -> None:
    tried = tried_values(_results(), "fedavg", {"data.partition.alpha": 0.1})
    assert tried == {"local.lr": (0.01, 0.03, 0.1)}
