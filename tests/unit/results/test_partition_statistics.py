from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fedlens.cli.display.output import print_json
from fedlens.data.partition.partition import Partition
from fedlens.results.partition_statistics import describe, imbalance, quantiles, readable
from tests.unit.results.fake_run import class_counts, make_partition


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7, 7, 7], (1.0, 0.0, 0.0)),
        ([0, 0, 12], (3.0, math.sqrt(2), 2 / 3)),
        # Differences of 1, 2, 1, 3, 2, 3 among six ordered pairs and back: 2 * 12 / (2 * 16 * 2.5) in all.
        ([1, 2, 3, 4], (1.6, math.sqrt(1.25) / 2.5, 0.25)),
        ([5], (1.0, 0.0, 0.0)),
    ],
)
def test_imbalance_by_hand(sizes: list[int], expected: tuple[float, ...]) -> None:
    assert tuple(imbalance(sizes).values()) == pytest.approx(expected)
    assert tuple(imbalance(sizes[::-1]).values()) == pytest.approx(expected)


def test_gini_is_its_definition() -> None:
    sizes = np.random.default_rng(0).integers(0, 100, 37).astype(float)
    differences = np.abs(sizes[:, None] - sizes[None, :]).sum()
    assert imbalance(sizes)["gini"] == pytest.approx(differences / (2 * 37**2 * sizes.mean()))


def test_nobody_has_anything() -> None:
    assert all(math.isnan(value) for value in imbalance([0, 0]).values())
    assert all(math.isnan(value) for value in imbalance([]).values())


def test_quantiles_leave_out_what_is_not_known() -> None:
    assert quantiles(np.array([3.0, math.nan, 1.0])) == {
        "min": 1,
        "25%": 1.5,
        "median": 2,
        "75%": 2.5,
        "max": 3,
    }
    assert all(math.isnan(value) for value in quantiles(np.array([math.nan])).values())


def test_describe_by_hand() -> None:
    told = describe(make_partition(np.array([[3, 1], [0, 0], [0, 4]]), ids=("a", "b", "c")))
    assert (told["clients"], told["examples"], told["sizes"]) == (3, 8, [4, 0, 4])
    assert told["classes_per_client"] == [2, 0, 1]
    # p = (3/8, 5/8): |3/4 - 3/8| twice, and |0 - 3/8| + |1 - 5/8|.
    assert told["client_emds"][0] == pytest.approx(0.75)
    assert math.isnan(told["client_emds"][1])
    assert told["emd"] == pytest.approx(0.75)
    assert (told["dataset"], told["spec"], len(told["digest"])) == ("digits", {"name": "own"}, 64)


def test_without_a_census_the_classes_are_none() -> None:
    told = describe(Partition.of_owners([0, 1, 1], 2))
    assert [told[key] for key in ("classes_per_client", "emd", "client_emds")] == [None] * 3


def test_json_has_neither_nan_nor_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "mix", "alpha": math.inf, "prior": [1.0, math.inf], "inner": {"alpha": math.inf}}
    print_json(describe(make_partition(np.array([[2, 0], [0, 0]]), spec=spec)))
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert told["client_emds"] == [0.0, None]
    assert told["spec"] == {"name": "mix", "alpha": "inf", "prior": [1.0, "inf"], "inner": {"alpha": "inf"}}
    assert told["imbalance"]["largest_over_mean"] == 2.0


def test_a_person_reads_the_same() -> None:
    rows = dict(
        readable(
            make_partition(
                class_counts(30, even=False), spec={"name": "own", "alpha": 0.5, "sizes": list(range(50))}
            )
        )
    )
    assert rows["Recipe"] == "own"
    assert rows["Settings"].startswith("alpha 0.5, sizes 0, 1, ")
    assert rows["Settings"].endswith("19, ... (50 in all)")
    assert rows["Clients"] == "30"
    assert rows["Examples per client"].startswith("min ")
    assert rows["Classes"] == "10"
    assert "Feature blur" not in rows


def test_features_are_told() -> None:
    features = {"blur": np.array([0.5, 1.5])}
    p = make_partition(np.array([[1], [1]]), features=features)
    assert describe(p)["features"] == {"blur": [0.5, 1.5]}
    assert dict(readable(p))["Feature blur"] == "min 0.5, 25% 0.75, median 1, 75% 1.25, max 1.5"
