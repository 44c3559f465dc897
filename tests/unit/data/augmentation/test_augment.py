"""Augmentation against torchvision, image by image, and what every augmentation has to keep to."""

from __future__ import annotations

import pickle

import pytest
import torch
import torchvision.transforms.v2.functional as tv
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.data.augmentation import augment
from fedlens.data.augmentation.augmented import Chain, Step

COLOUR = (3, 32, 24)
GREY = (1, 28, 28)


def images(n: int = 64, shape: tuple[int, int, int] = COLOUR) -> Tensor:
    return torch.randint(0, 256, (n, *shape), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every(shape: tuple[int, int, int]) -> list[Step]:
    made: list[Step] = [
        augment.AUGMENTS.find(name)(shape) for name in augment.AUGMENTS if name != "grey" or shape[0] == 3
    ]
    return [*made, Chain(tuple(made))]


def augmented(step: Step, x: Tensor, drawn: torch.Generator) -> Tensor:
    """The images alone; the targets come back as they are."""
    targets = torch.arange(len(x))
    found, kept, *_ = step(x, targets, drawn)
    assert kept is targets
    return found


@pytest.mark.parametrize("shape", [COLOUR, GREY])
def test_each_keeps_shape_type_and_input_and_depends_on_the_seed_alone(shape: tuple[int, int, int]) -> None:
    x = images(16, shape)
    before = x.clone()
    for change in every(shape):
        out = augmented(change, x, generator())
        assert out.shape == x.shape
        assert out.dtype == torch.uint8
        assert out.is_contiguous()
        assert torch.equal(x, before)
        assert torch.equal(out, augmented(change, x, generator()))
        assert not torch.equal(out, augmented(change, x, generator(1)))
        assert torch.equal(augmented(pickle.loads(pickle.dumps(change)), x, generator()), out)


def test_grey_images_are_those_of_torchvision_and_as_many_as_asked_for() -> None:
    x = images(2000, COLOUR)
    out = augmented(augment.make_grey(COLOUR, p=0.3), x, generator())
    changed = (out != x).flatten(1).any(1)
    assert 0.25 < changed.float().mean() < 0.35
    expected = tv.rgb_to_grayscale(x, num_output_channels=3)
    assert (out[changed].int() - expected[changed].int()).abs().max() <= 1
    with pytest.raises(ConfigError, match="1 channels, and 'grey' needs 3"):
        augment.make_grey(GREY)


def test_crop_and_then_flip_is_what_one_pass_does() -> None:
    x = images()
    edges = torch.randint(0, 9, (2, len(x)), generator=generator())
    cropped = augmented(augment.Crop(4), x, generator())
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    for k in range(len(x)):
        top, left = edges[:, k].tolist()
        assert torch.equal(cropped[k], padded[k, :, top : top + 32, left : left + 24])
    one_pass = augmented(augment.PadCropFlip(), x, generator())
    same = (one_pass == cropped).flatten(1).all(1)
    mirrored = (one_pass == cropped.flip(3)).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert 10 < int(mirrored.sum()) < 54


def test_flip_mirrors_the_share_that_it_is_told() -> None:
    x = images(4000, (1, 2, 3))
    flipped = (augmented(augment.Flip(0.25), x, generator()) == x.flip(3)).flatten(1).all(1)
    unchanged = (augmented(augment.Flip(0.25), x, generator()) == x).flatten(1).all(1)
    assert bool((flipped | unchanged).all())
    assert abs(float((flipped & ~unchanged).float().mean()) - 0.25) < 0.03
    assert torch.equal(augmented(augment.Flip(1.0), x, generator()), x.flip(3))


@pytest.mark.parametrize(("p", "vertical"), [(0.5, 0.25), (0.0, 1.0), (1.0, 1.0)])
def test_a_vertical_flip_is_drawn_after_the_horizontal_one(p: float, vertical: float) -> None:
    x = images(200, (1, 4, 3))
    out, _, change = augment.make_flip((1, 4, 3), p=p, vertical=vertical)(x, None, generator())
    drawn = generator()
    across, down = (torch.rand(200, generator=drawn) < share for share in (p, vertical))
    for k in range(200):
        wanted = x[k].flip(2) if across[k] else x[k]
        assert torch.equal(out[k], wanted.flip(1) if down[k] else wanted)
    assert change is not None
    assert change.upended is not None
    assert torch.equal(change.upended, down)


def test_a_vertical_flip_that_is_true_is_as_likely_as_the_horizontal_one() -> None:
    assert augment.make_flip(COLOUR, p=0.3, vertical=True) == augment.Flip(0.3, 0.3)
    assert augment.make_flip(COLOUR, vertical=False) == augment.Flip(0.5)
    with pytest.raises(ConfigError, match=r"0 in both directions \(p\); set p or vertical above 0"):
        augment.make_flip(COLOUR, p=0.0, vertical=True)


@pytest.mark.parametrize("part", ["brightness", "contrast", "saturation", "hue"])
def test_each_part_of_colour_jitter_is_torchvisions(part: str) -> None:
    x = images(32)
    strengths = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0, part: 0.4}
    out = augmented(augment.ColourJitter(**strengths), x, generator())
    drawn = torch.rand(4, len(x), generator=generator())[list(strengths).index(part)]
    adjust = getattr(tv, f"adjust_{part}")
    for k in range(len(x)):
        by = 0.4 * (2 * float(drawn[k]) - 1) if part == "hue" else 0.6 + 0.8 * float(drawn[k])
        wanted = (adjust(x[k].float() / 255, by) * 255).round()
        assert float((out[k].float() - wanted).abs().max()) <= 1  # a value on the half may round either way
        assert float((out[k].float() != wanted).float().mean()) < 0.01


def test_colour_jitter_leaves_grey_images_grey_and_refuses_their_colours() -> None:
    made = augment.make_colour_jitter(GREY)
    assert (made.saturation, made.hue) == (0.0, 0.0)
    assert (augment.make_colour_jitter(COLOUR).saturation, augment.make_colour_jitter(COLOUR).hue) == (
        0.4,
        0.1,
    )
    with pytest.raises(ConfigError, match=r"images of 1 channel have no hue \(hue\); leave it out"):
        augment.make_colour_jitter(GREY, hue=0.1)


def test_random_resized_crop_is_torchvisions_for_the_same_windows() -> None:
    x = images(48)
    made = augment.RandomResizedCrop((0.08, 1.0), (3 / 4, 4 / 3))
    windows = made.windows(len(x), 32, 24, generator())
    out = augmented(made, x, generator())
    for k in range(len(x)):
        top, left, tall, wide = windows[k].int().tolist()
        wanted = tv.resized_crop(x[k].float(), top, left, tall, wide, [32, 24], antialias=False).round()
        assert float((out[k].float() - wanted).abs().max()) <= 1
        assert float((out[k].float() != wanted).float().mean()) < 0.01


def test_windows_lie_inside_and_have_the_areas_and_ratios_that_were_asked_for() -> None:
    made = augment.RandomResizedCrop((0.2, 0.6), (0.5, 2.0))
    top, left, tall, wide = made.windows(5000, 40, 60, generator()).unbind(1)
    assert bool(((top >= 0) & (left >= 0) & (top + tall <= 40) & (left + wide <= 60)).all())
    area, ratio = tall * wide / 2400, wide / tall
    assert 0.18 < float(area.min()) < 0.22
    assert 0.57 < float(area.max()) < 0.63
    assert 0.47 < float(ratio.min()) < 0.53
    assert 1.9 < float(ratio.max()) < 2.1
    assert len(set(top.tolist())) > 15
    small = (tall < 40) & (wide < 60)
    for edge in (top == 0, left == 0, top + tall == 40, left + wide == 60):
        assert bool((edge & small).any())


def test_where_every_window_fits_area_and_logarithm_of_the_ratio_are_uniform() -> None:
    made = augment.RandomResizedCrop((0.2, 0.6), (0.8, 1.25))
    _, _, tall, wide = made.windows(5000, 96, 96, generator()).unbind(1)
    area, ratio = (tall * wide / 96**2).sort().values, (wide / tall).log().sort().values
    assert float((area - torch.linspace(0.2, 0.6, 5000)).abs().max()) < 0.03
    assert float((ratio - torch.linspace(-0.2231, 0.2231, 5000)).abs().max()) < 0.03


def test_a_window_that_never_fits_is_the_largest_in_the_middle() -> None:
    made = augment.RandomResizedCrop((1.0, 1.0), (1.0, 1.0))
    assert made.windows(3, 10, 30, generator()).tolist() == [[0, 10, 10, 10]] * 3
    assert made.windows(1, 30, 10, generator()).tolist() == [[10, 0, 10, 10]]
    sliver = augment.RandomResizedCrop((1.0, 1.0), (0.01, 0.02))
    assert sliver.windows(1, 2, 100, generator()).tolist() == [[0, 49, 2, 1]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scale": (0.5, 0.2)}, r"the scale is \[0.5, 0.2\], but needs 0 < smallest <= largest <= 1"),
        ({"scale": (0.0, 1.0)}, "the scale is"),
        ({"ratio": (2.0, 1.0)}, "the ratio is"),
    ],
)
def test_bounds_that_are_not_in_order_are_refused(
    settings: dict[str, tuple[float, float]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        augment.make_random_resized_crop(COLOUR, **settings)
