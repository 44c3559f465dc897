import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.dataset import channel_moments
from fedlens.data.datasets.synthetic import synthetic


def test_shapes_counts_and_moments_are_as_asked() -> None:
    data = synthetic(Path(), False, 3, shape=(3, 9, 16), classes=7, train=100, test=50)
    assert data.train.inputs.shape == (100, 3, 9, 16)
    assert data.test.inputs.shape == (50, 3, 9, 16)
    assert np.ptp(np.bincount(data.train.targets, minlength=7)) <= 1
    assert (data.mean, data.std) == channel_moments(data.train.inputs)


def test_the_same_seed_gives_the_same_images_everywhere() -> None:
    data = synthetic(Path(), False, 0, train=200, test=100)
    found = hashlib.sha256(data.train.inputs.tobytes() + data.test.targets.tobytes()).hexdigest()
    assert found[:16] == "9c78fa17a7e2507c"


def test_the_source_states_the_seed() -> None:
    assert synthetic(Path(), False, 5, train=20, test=10).source == "fedlens, synthetic, seed 5"


def test_another_seed_gives_other_images() -> None:
    one, other = (synthetic(Path(), False, seed, train=50, test=50) for seed in (0, 1))
    assert (one.train.inputs != other.train.inputs).mean() > 0.5


def test_nearest_mean_learns_it_and_noise_makes_it_harder() -> None:
    scores = []
    for noise in (0.1, 1.0):
        data = synthetic(Path(), False, 0, shape=(1, 8, 8), train=1000, test=500, noise=noise)
        train, test = (
            split.inputs.reshape(len(split), -1).astype(float) for split in (data.train, data.test)
        )
        means = np.stack([train[data.train.targets == c].mean(axis=0) for c in range(10)])
        nearest = ((test[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
        scores.append((nearest == data.test.targets).mean())
    assert scores[0] > 0.98
    assert 0.15 < scores[1] < 0.9


def test_without_noise_images_of_a_class_are_equal() -> None:
    data = synthetic(Path(), False, 0, shape=(1, 8, 8), classes=2, train=10, test=2, noise=0)
    for label in (0, 1):
        assert (np.ptp(data.train.inputs[data.train.targets == label], axis=0) == 0).all()
    assert data.std[0] > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", 1),
        ("train", 0),
        ("noise", -0.1),
        ("noise", float("nan")),
        ("shape", [1, 0, 8]),
        ("shape", [8, 8]),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"data.dataset.{key}"):
        read_settings(synthetic, {key: value}, "data.dataset")


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed"):
        synthetic(Path(), False, -1)
