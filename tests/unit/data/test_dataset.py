import numpy as np
import pytest
import torch

from fedlens.base.errors import DataError
from fedlens.data.dataset import Dataset, Examples, channel_moments


def examples(n: int = 4, shape: tuple[int, ...] = (1, 2, 2), label: int = 0) -> Examples:
    return Examples(np.zeros((n, *shape), np.uint8), np.full(n, label, np.int64))


def dataset(train: Examples, test: Examples, channels: int = 1) -> Dataset:
    moments = (0.0,) * channels, (1.0,) * channels
    return Dataset("x", train, test, ("a", "b"), *moments, licence="none", source="here")


def test_a_split_knows_its_length_and_shape() -> None:
    assert len(examples(4)) == 4
    assert dataset(examples(4, (1, 3, 5)), examples(2, (1, 3, 5))).input_shape == (1, 3, 5)


@pytest.mark.parametrize(
    ("inputs", "targets", "what"),
    [
        (np.zeros((2, 1, 2, 2), np.float32), np.zeros(2, np.int64), "float32"),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(2, np.int64), r"\[2, 2, 2\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2, np.int32), "int32"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(3, np.int64), "2 images and 3 labels"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(inputs: np.ndarray, targets: np.ndarray, what: str) -> None:
    with pytest.raises(DataError, match=what):
        Examples(inputs, targets)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_without_a_class_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=rf"label {label} of record 0 is not in 0 .. 1 \(x, test\)"):
        dataset(examples(), examples(label=label))


def test_splits_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="shapes"):
        dataset(examples(), examples(shape=(1, 3, 3)))


def test_moments_need_one_number_a_channel() -> None:
    with pytest.raises(DataError, match="channel"):
        dataset(examples(), examples(), channels=3)


def test_channel_moments_are_those_of_float64() -> None:
    images = np.random.default_rng(0).integers(0, 256, (9000, 3, 2, 2)).astype(np.uint8)
    mean, std = channel_moments(images)
    scaled = images.astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 2, 3)), rtol=1e-10)


def test_nothing_moves_unless_it_is_asked_for() -> None:
    plain = Examples(torch.arange(12).view(4, 3), torch.arange(4))
    taken, _ = plain.batch(torch.tensor([2, 0]))
    assert taken.tolist() == [[6, 7, 8], [0, 1, 2]]
    there = plain.on(torch.device("cpu"), 1000)
    assert torch.equal(there.batch(torch.tensor([2, 0]))[0], taken)
