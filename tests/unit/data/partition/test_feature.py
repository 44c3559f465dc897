import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.feature import NEUTRAL, feature
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [40, 0, 25, 11, 35]))
SETTINGS = {"brightness": 0.2, "contrast": 0.4, "blur": 1.5, "rotation": 30.0, "noise": 0.1}


def test_the_labels_are_split_as_evenly_as_whole_numbers_allow() -> None:
    counts = feature(LABELS, 0, clients=7).class_counts(LABELS)
    assert counts.sum(axis=0).tolist() == [40, 0, 25, 11, 35]
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1


def test_who_gets_one_more_depends_on_the_seed() -> None:
    more = {int(feature(np.zeros(9, int), seed, clients=4).sizes().argmax()) for seed in range(60)}
    assert more == {0, 1, 2, 3}


def test_numbers_are_uniform_in_their_ranges() -> None:
    p = feature(np.zeros(4000, int), 3, clients=4000, **SETTINGS)
    ranges = {
        "brightness": (0.8, 1.2),
        "contrast": (0.6, 1.4),
        "blur": (0.0, 1.5),
        "rotation": (-30.0, 30.0),
        "noise": (0.0, 0.1),
    }
    assert set(p.features) == set(ranges) == set(NEUTRAL)
    for name, (low, high) in ranges.items():
        values = np.sort((p.features[name] - low) / (high - low))
        assert values[0] >= 0
        assert values[-1] <= 1
        assert np.abs(values - (np.arange(4000) + 0.5) / 4000).max() < 0.03, name
    together = np.corrcoef([p.features[name] for name in sorted(ranges)])
    assert np.abs(together - np.eye(5)).max() < 0.07


def test_a_setting_of_zero_is_no_feature_and_changes_nothing_else() -> None:
    p = feature(LABELS, 5, clients=7, **SETTINGS)
    for name in SETTINGS:
        q = feature(LABELS, 5, clients=7, **{**SETTINGS, name: 0.0})
        assert set(q.features) == set(SETTINGS) - {name}
        assert all(q.features[other].tolist() == p.features[other].tolist() for other in q.features)
        np.testing.assert_array_equal(q.indices, p.indices)
        assert q.digest != p.digest


def test_examples_without_a_single_label_are_dealt_at_random() -> None:
    table = Table.of_sets([[0, 2], [], [1]] * 31)
    p = feature(table, 0, clients=6, rotation=0)
    assert np.sort(p.sizes()).tolist() == [15, 15, 15, 16, 16, 16]
    assert sorted(p.indices.tolist()) == list(range(93))
    assert p.indices.tolist() != sorted(p.indices.tolist())
    with pytest.raises(ConfigError, match=r"not their masks or boxes.*rotation.*set rotation = 0"):
        feature(table, 0, clients=6)


def test_one_client_has_everything_and_numbers_of_its_own() -> None:
    p = feature(LABELS, 0, clients=1)
    assert p[0].tolist() == list(range(111))
    assert all(len(values) == 1 for values in p.features.values())


def test_the_partition_is_pinned() -> None:
    p = feature(LABELS, 7, clients=7)
    assert p.digest[:16] == "33d8d04d6c82ed1f"
    assert p.spec == {
        "name": "feature",
        "clients": 7,
        "brightness": 0.3,
        "contrast": 0.3,
        "blur": 0.7,
        "rotation": 15.0,
        "noise": 0.05,
        "seed": 7,
    }


def test_numbers_are_saved(tmp_path: object) -> None:
    p = feature(LABELS, 0, clients=7)
    p.save(f"{tmp_path}/p.npz")
    q = Partition.load(f"{tmp_path}/p.npz")
    assert q.digest == p.digest
    assert {name: values.tolist() for name, values in q.features.items()} == {
        name: values.tolist() for name, values in p.features.items()
    }


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (dict.fromkeys(SETTINGS, 0.0), "would see the same images.*above 0, or use iid"),
        ({"brightness": 1.5}, r"'brightness' is 1.5, but must be at most 1 \(brightness\)"),
        ({"blur": -1.0}, "'blur' is -1.0"),
        ({"noise": float("nan")}, "'noise' is nan"),
        ({"rotation": 181.0}, "at most 180"),
        ({"clients": 112}, "112 clients are more than the 111 examples"),
    ],
)
def test_what_cannot_be_done_is_an_error(settings: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        feature(LABELS, 0, **{"clients": 4, **settings})  # type: ignore[arg-type]


def test_settings_are_checked_by_name() -> None:
    for name in SETTINGS:
        with pytest.raises(ConfigError, match=rf"data.partition.{name}"):
            read_settings(feature, {"clients": 2, name: -0.1}, "data.partition")
