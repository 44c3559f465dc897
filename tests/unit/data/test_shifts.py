"""`shifted` against each step written down literally, and against batches that are cut in other ways."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.base.errors import DataError
from fedlens.core.random import Rng
from fedlens.data import shifts
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.datasets.digits import digits
from fedlens.data.federated import federate
from fedlens.data.normalize import normalize
from fedlens.data.partition.feature import NEUTRAL, feature
from fedlens.data.shifts import _normal, shifted

RANDOM = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (41, 3, 13, 9), dtype=torch.uint8, generator=RANDOM)
POSITIONS = torch.randperm(100_000, generator=RANDOM)[:41]


def drawn(neutral: float = 0.3) -> dict[str, Tensor]:
    """Numbers for 41 images, each neutral with this probability."""
    ranges = {
        "rotation": (-180, 180),
        "blur": (0.1, 2.5),
        "brightness": (0.5, 1.5),
        "contrast": (0.5, 1.5),
        "noise": (0, 0.2),
    }
    own = torch.Generator().manual_seed(1)
    by = {}
    for name, (low, high) in ranges.items():
        values = low + (high - low) * torch.rand(41, generator=own)
        by[name] = torch.where(torch.rand(41, generator=own) < neutral, NEUTRAL[name], values)
    return by


def one(image: Tensor, position: int = 0, **by: float) -> Tensor:
    """What becomes of one image, uint8 [C, H, W]."""
    own = {name: torch.tensor([value]) for name, value in by.items()}
    return shifted(image.unsqueeze(0), own, torch.tensor([position]))[0]


def literal_rotation(x: np.ndarray, degrees: float) -> np.ndarray:
    """Each pixel from four neighbours, one after the other."""
    _, h, w = x.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    out = np.zeros_like(x)
    for i in range(h):
        for j in range(w):
            up, right = (h - 1) / 2 - i, j - (w - 1) / 2
            # Turning back by the angle, with the axes as in a drawing: right, and up.
            from_right, from_up = cos * right + sin * up, -sin * right + cos * up
            y, z = (h - 1) / 2 - from_up, from_right + (w - 1) / 2
            for a in (math.floor(y), math.floor(y) + 1):
                for b in (math.floor(z), math.floor(z) + 1):
                    if 0 <= a < h and 0 <= b < w:
                        out[:, i, j] += (1 - abs(y - a)) * (1 - abs(z - b)) * x[:, a, b]
    return out


def literal_blur(x: np.ndarray, sigma: float) -> np.ndarray:
    radius = math.ceil(3 * sigma)
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    for axis in (1, 2):
        pad = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        x = np.apply_along_axis(
            lambda row: np.convolve(row, kernel, mode="valid"), axis, np.pad(x, pad, mode="edge")
        )
    return x


def literal(image: Tensor, position: int, by: dict[str, float]) -> np.ndarray:
    """The docstring in float64."""
    x = image.numpy().astype(np.float64)
    m = x.mean()
    x = literal_rotation(x, by["rotation"])
    if by["blur"]:
        x = literal_blur(x, by["blur"])
    x = x * by["brightness"]
    m = m * by["brightness"]
    x = m + by["contrast"] * (x - m)
    z = _normal(torch.tensor([position]), x.size).numpy().reshape(x.shape)
    x = x + 255 * by["noise"] * z
    return np.clip(np.rint(x), 0, 255)


@pytest.mark.parametrize("only", [*NEUTRAL, None])
def test_it_is_the_docstring_word_for_word(only: str | None) -> None:
    by = {name: values for name, values in drawn(0.1).items() if only in (name, None)}
    found = shifted(IMAGES, by, POSITIONS)
    for k in range(41):
        numbers = NEUTRAL | {name: float(values[k]) for name, values in by.items()}
        wanted = literal(IMAGES[k], int(POSITIONS[k]), numbers)
        gap = np.abs(found[k].numpy().astype(int) - wanted)
        # Where the float64 result lies at a half, float32 may round to the other side.
        assert gap.max() <= 1
        assert (gap > 0).mean() < 0.02


@pytest.mark.parametrize("block", [1, 10**9])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_bits_do_not_depend_on_how_the_batch_is_cut(
    size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = drawn()
    whole = shifted(IMAGES, by, POSITIONS)
    monkeypatch.setattr(shifts, "_BLOCK", block)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(size))
    for at in order.split(size):  # type: ignore[no-untyped-call]
        part = shifted(IMAGES[at], {name: values[at] for name, values in by.items()}, POSITIONS[at])
        assert torch.equal(part, whole[at])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    whole = shifted(IMAGES, drawn(), POSITIONS)
    try:
        torch.set_num_threads(1)
        assert torch.equal(shifted(IMAGES, drawn(), POSITIONS), whole)
    finally:
        torch.set_num_threads(before)


def test_neutral_numbers_give_the_images_back_bit_for_bit() -> None:
    by = {name: torch.full((41,), value) for name, value in NEUTRAL.items()}
    same = shifted(IMAGES, by, POSITIONS)
    assert torch.equal(same, IMAGES)
    assert same.data_ptr() != IMAGES.data_ptr()
    some = torch.arange(41) % 3 == 0
    mixed = {name: torch.where(some, NEUTRAL[name], values) for name, values in drawn(0).items()}
    found = shifted(IMAGES, mixed, POSITIONS)
    assert torch.equal(found[some], IMAGES[some])
    changed = (found != IMAGES).flatten(1).any(1)
    assert torch.equal(changed, ~some)


def test_a_step_that_no_image_needs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("it was not skipped")

    for step in ("_rotated", "_blurred", "_normal"):
        monkeypatch.setattr(shifts, step, fail)
    by = {name: torch.full((41,), value) for name, value in NEUTRAL.items()}
    by["brightness"] = torch.full((41,), 1.5)
    assert not torch.equal(shifted(IMAGES, by, POSITIONS), IMAGES)


def test_the_input_is_left_as_it_was() -> None:
    images, by, positions = IMAGES.clone(), drawn(), POSITIONS.clone()
    given = {name: values.clone() for name, values in by.items()}
    shifted(images, given, positions)
    assert torch.equal(images, IMAGES)
    assert torch.equal(positions, POSITIONS)
    assert all(torch.equal(given[name], by[name]) for name in by)


def test_brightness_and_contrast_by_hand() -> None:
    image = torch.tensor([[[10, 20], [30, 180]]], dtype=torch.uint8)  # mean 60
    assert one(image, brightness=1.5).flatten().tolist() == [15, 30, 45, 255]
    assert one(image, contrast=0.5).flatten().tolist() == [35, 40, 45, 120]
    assert one(image, contrast=2.0).flatten().tolist() == [0, 0, 0, 255]
    # 0.5 x is 5, 10, 15, 90 with the mean 30; half as far from it: 17.5 and 22.5 are rounded to the even number.
    assert one(image, brightness=0.5, contrast=0.5).flatten().tolist() == [18, 20, 22, 60]


def test_rotation_by_quarter_turns_is_counter_clockwise_and_exact() -> None:
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8, generator=RANDOM)
    for quarter in (1, 2, 3, -1):
        turned = one(image, rotation=90.0 * quarter)
        assert torch.equal(turned, torch.rot90(image, quarter, dims=(1, 2)))
    assert torch.equal(one(image, rotation=360.0), image)
    half = torch.randint(0, 256, (1, 5, 4), dtype=torch.uint8, generator=RANDOM)
    assert torch.equal(one(half, rotation=180.0), half.flip(1, 2))


def test_rotation_brings_black_in_from_outside() -> None:
    white = torch.full((1, 9, 9), 255, dtype=torch.uint8)
    turned = one(white, rotation=45.0)[0]
    assert turned[[0, 0, 8, 8], [0, 8, 0, 8]].tolist() == [0, 0, 0, 0]
    assert (turned[2:7, 2:7] == 255).all()


def test_blur_by_hand() -> None:
    point = torch.zeros(1, 9, 9, dtype=torch.uint8)
    point[0, 4, 4] = 255
    e = math.exp(-0.5 / 0.36), math.exp(-2 / 0.36)  # sigma 0.6, so that the radius is 2
    total = 1 + 2 * sum(e)
    middle = one(point, blur=0.6)[0]
    assert middle[4, 2:7].tolist() == [round(255 * a / total**2) for a in (e[1], e[0], 1, e[0], e[1])]
    assert middle[3, 3] == round(255 * e[0] ** 2 / total**2)
    even = torch.full((2, 7, 5), 93, dtype=torch.uint8)
    assert torch.equal(one(even, blur=3.0), even)


def test_noise_is_standard_normal_and_of_every_position_and_place_its_own() -> None:
    z = _normal(torch.arange(400), 3072).double()
    n = z.numel()
    assert abs(z.mean()) < 4 / n**0.5
    assert abs((z**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 0.05
    ordered = z.flatten()[:200_000].sort().values
    wanted = torch.special.ndtri((torch.arange(200_000).double() + 0.5) / 200_000)
    assert (ordered - wanted)[1000:-1000].abs().max() < 0.05
    for lag in (1, 2, 32, 1024):
        assert abs((z[:, lag:] * z[:, :-lag]).mean()) < 5 / n**0.5
    for lag in (1, 2, 3):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / n**0.5
    assert (z.mean(0) * 400**0.5).abs().max() < 5
    assert (z.mean(1) * 3072**0.5).abs().max() < 5


def test_noise_is_pinned() -> None:
    z = _normal(torch.tensor([0, 1, 2, 10**12]), 5)
    assert hashlib.sha256(z.numpy().astype("<f4").tobytes()).hexdigest()[:16] == "70d054f8c6bd3442"
    grey = torch.full((1, 1, 4), 128, dtype=torch.uint8)
    assert one(grey, position=7, noise=0.1).flatten().tolist() == [151, 118, 128, 128]


def test_noise_has_the_deviation_that_was_asked_for_and_stays_with_the_example() -> None:
    grey = torch.full((3, 64, 64), 128, dtype=torch.uint8)
    weak, strong = one(grey, 5, noise=0.02).double(), one(grey, 5, noise=0.04).double()
    assert abs(float(weak.std()) - 5.1) < 0.2
    assert abs(float(strong.std()) - 10.2) < 0.3
    assert np.corrcoef(weak.flatten(), strong.flatten())[0, 1] > 0.99
    other = one(grey, 6, noise=0.02).double()
    assert abs(np.corrcoef(weak.flatten(), other.flatten())[0, 1]) < 0.05


def test_no_images_are_no_error_and_no_features_change_nothing() -> None:
    none = torch.zeros(0, 3, 4, 4, dtype=torch.uint8)
    nothing = {name: torch.zeros(0) for name in NEUTRAL}
    assert shifted(none, nothing, torch.zeros(0, dtype=torch.int64)).shape == (0, 3, 4, 4)
    assert torch.equal(shifted(IMAGES, {}, POSITIONS), IMAGES)


def test_what_is_no_image_or_no_feature_is_an_error() -> None:
    tokens = torch.zeros(2, 80, dtype=torch.int64)
    with pytest.raises(DataError, match=r"blur are for images, and the examples are torch.int64 \[2, 80\]"):
        shifted(tokens, {"blur": torch.ones(2)}, torch.arange(2))
    with pytest.raises(DataError, match=r"the examples are torch.float32 \[41, 3, 13, 9\]"):
        shifted(IMAGES.float(), {"blur": torch.ones(41)}, POSITIONS)
    with pytest.raises(DataError, match=r"no feature 'blurr'.*did you mean 'blur'"):
        shifted(IMAGES, {"blurr": torch.ones(41)}, POSITIONS)


def test_each_client_sees_its_images_in_its_own_way_everywhere() -> None:
    """In one go, in batches, as held-out examples, and as part of all training examples."""
    whole = digits(Path(), False, 0)
    holders, partition = federate(
        whole, lambda table: feature(table, 0, clients=5, blur=1.0), validation=0.2, scope="client"
    )
    data = holders.dataset
    seen, held = [], []
    for client in range(5):
        own = {name: torch.tensor(values[client]).float() for name, values in partition.features.items()}
        holding = holders.data_of(client)
        for found, indices, into in (
            (holding, holders.client_indices(client), seen),
            (holding.validation, holders.client_held_out(client), held),
        ):
            assert found is not None
            assert indices is not None
            images = data.train.batch(indices)[0]
            by = {name: value.expand(len(images)) for name, value in own.items()}
            wanted = normalize(shifted(images, by, indices), data.mean, data.std)
            assert not torch.equal(wanted, normalize(images, data.mean, data.std))
            assert torch.equal(found.stretch(0, len(images))[0], wanted)
            into.append(wanted)
        batches = replace(holding, augment=Chain(())).batches(7, Rng((0,)))
        shown, labels = next(batches)
        matches = (seen[-1].unsqueeze(1) == shown).flatten(2).all(2)
        assert matches.any(0).all()
        assert len(labels) == 7
    assert torch.equal(holders.data_of("@train").stretch(0, 10**6)[0], torch.cat(seen))
    assert torch.equal(holders.data_of("@validation").stretch(3, 200)[0], torch.cat(held)[3:200])
    plain = normalize(data.test.inputs, data.mean, data.std)
    assert torch.equal(holders.data_of("@test").stretch(0, 10**6)[0], plain)
