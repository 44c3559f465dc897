import pytest
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.data.augmentation.augment import PadCropFlip
from fedlens.data.normalize import moments, normalize

NONE = None  # targets, which these augmentations return as they are
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(n: int = 6, channels: int = 3, side: int = 32) -> Tensor:
    return torch.randint(
        0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


@pytest.mark.parametrize("n", [5, 700], ids=["at once", "in pieces"])
def test_normalize_is_the_stated_arithmetic_bit_for_bit(n: int) -> None:
    scale = torch.tensor([1 / (255 * s) for s in STD], dtype=torch.float64).float().view(3, 1, 1)
    shift = (
        torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)], dtype=torch.float64)
        .float()
        .view(3, 1, 1)
    )
    x = images(n)
    assert torch.equal(normalize(x, MEAN, STD), x.float() * scale + shift)


def test_normalize_is_the_usual_formula() -> None:
    x = images()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(
        normalize(x, MEAN, STD).double(), (x.double() / 255 - mean) / std, rtol=0, atol=1e-6
    )


def test_normalize_leaves_its_input_and_its_format() -> None:
    x = images()
    before = x.clone()
    assert normalize(x, MEAN, STD).dtype == torch.float32
    assert torch.equal(x, before)
    floats = x.float()
    normalize(floats, MEAN, STD)
    assert torch.equal(floats, before.float())
    last = x.to(memory_format=torch.channels_last)
    assert normalize(last, MEAN, STD).is_contiguous(memory_format=torch.channels_last)


def test_normalize_after_inference_mode_takes_part_in_gradients() -> None:
    with torch.inference_mode():
        normalize(images(1, 1, 2), (0.123,), (0.456,))
    x = torch.rand(1, 1, 2, 2, requires_grad=True)
    normalize(x, (0.123,), (0.456,)).sum().backward()
    assert x.grad is not None


def by_hand(x: Tensor, generator: torch.Generator, pad: int) -> Tensor:
    """The same, image by image."""
    n, _, height, width = x.shape
    edges = torch.randint(0, 2 * pad + 1, (2, n), generator=generator)
    flips = torch.randint(0, 2, (n,), generator=generator)
    out = torch.empty_like(x)
    for i in range(n):
        padded = torch.nn.functional.pad(x[i], (pad, pad, pad, pad))
        top, left = edges[:, i].tolist()
        cut = padded[:, top : top + height, left : left + width]
        out[i] = cut.flip(2) if flips[i] else cut
    return out


@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_pad_crop_flip_is_that_image_by_image(pad: int, dtype: torch.dtype) -> None:
    x = images(n=40)[:, :, :12, :20].to(dtype)
    before = x.clone()
    ours = PadCropFlip(pad)(x, NONE, torch.Generator().manual_seed(5)).images
    assert torch.equal(ours, by_hand(x, torch.Generator().manual_seed(5), pad))
    assert ours.dtype == dtype
    assert torch.equal(x, before)


def test_pad_crop_flip_takes_channels_last_and_no_images() -> None:
    x = images().to(memory_format=torch.channels_last)
    a, b = (PadCropFlip()(y, NONE, torch.Generator().manual_seed(1)).images for y in (x, x.contiguous()))
    assert torch.equal(a, b)
    assert PadCropFlip()(images(0), NONE, torch.Generator()).images.shape == (0, 3, 32, 32)


def test_all_moves_and_flips_occur_equally_often() -> None:
    x = torch.zeros(9000, 1, 5, 5, dtype=torch.uint8)
    x[:, 0, 2, 1] = 1  # off the middle line, so that a flip shows
    moved = PadCropFlip(pad=1)(x, NONE, torch.Generator().manual_seed(0)).images
    counts = moved.sum(dim=(0, 1), dtype=torch.int64)
    assert counts[0].sum() == counts[4].sum() == 0
    # Left edge 0 to 2 puts the dot in column 2, 1, 0, or flipped in 2, 3, 4: column 2 twice as often.
    expected = torch.tensor([1 / 6, 1 / 6, 2 / 6, 1 / 6, 1 / 6]) * 3000
    assert (counts[1:4] - expected).abs().max() < 150


def test_moments_are_those_of_the_data_or_of_the_named_normalization() -> None:
    own = (MEAN, STD)
    assert moments("standard", *own) == own
    assert moments("unit", *own) == ((0.0,) * 3, (1.0,) * 3)
    assert moments("half", *own) == ((0.5,) * 3, (0.5,) * 3)
    assert moments("imagenet", *own) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert moments("half", (0.1,), (0.3,)) == ((0.5,), (0.5,))
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert normalize(white, *moments("half", *own)).flatten().tolist() == [1, 1, 1]


def test_grey_images_get_the_mean_of_imagenets_channels() -> None:
    (mean,), (std,) = moments("imagenet", (0.1,), (0.3,))
    assert mean == pytest.approx((0.485 + 0.456 + 0.406) / 3, abs=1e-12)
    assert std == pytest.approx((0.229 + 0.224 + 0.225) / 3, abs=1e-12)


def test_a_normalization_that_the_inputs_do_not_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the images have 4 \(data.normalize\); set data.normalize = \"standard\""
    ):
        moments("imagenet", (0.5,) * 4, (0.2,) * 4)
    assert moments("half", (0.5,) * 4, (0.2,) * 4) == ((0.5,) * 4, (0.5,) * 4)
    for name in ("unit", "half", "imagenet"):
        with pytest.raises(ConfigError, match=f"text cannot be normalized as '{name}'"):
            moments(name, (), ())
    assert moments("standard", (), ()) == ((), ())


def test_tokens_of_text_are_not_changed() -> None:
    tokens = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert normalize(tokens, (), ()) is tokens
