"""Images of fractals: which codes they show, what changes from drawing to drawing, and batches of them."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from fedlens.base.errors import ConfigError
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import Flip
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.datasets import fractals as reader
from fedlens.data.datasets.fractals import fractals
from fedlens.data.fractals.code_sampling import sample_codes
from fedlens.data.fractals.codes import FractalCodes, singular_values
from fedlens.data.fractals.drawings import Look
from fedlens.data.fractals.images import FractalImages, FractalStyle

QUICK = FractalStyle(iterations=100)


@cache
def few_codes() -> FractalCodes:
    return sample_codes(50, seed=0)


def images(count: int = 2000, **style: object) -> FractalImages:
    return FractalImages(few_codes(), replace(QUICK, **style), np.arange(count), seed=0)  # type: ignore[arg-type]


def test_an_image_has_different_codes_chosen_uniformly() -> None:
    sets, counts = images().code_sets(np.arange(2000))
    assert set(counts.tolist()) == {2, 3, 4, 5}
    assert chisquare(np.bincount(counts)[2:]).pvalue > 0.001
    assert all(len(set(row)) == 5 for row in sets.tolist())
    used = sets[np.arange(5) < counts[:, None]]
    assert chisquare(np.bincount(used, minlength=50)).pvalue > 0.001
    # Also the last of the codes of an image, which is chosen among those that are left.
    assert chisquare(np.bincount(sets[:, 4], minlength=50)).pvalue > 0.001


def test_the_views_of_a_pair_have_the_same_codes_in_other_places() -> None:
    pair = images().views(np.arange(20))
    assert pair.shape == (20, 2, 3, 32, 32)
    assert all((view[0] != view[1]).any() for view in pair)
    numbers = np.array([7, 7])
    first = images().drawings(numbers, np.array([1, 2], np.uint64))
    a, b = (first.maps[first.offsets[i] : first.offsets[i + 1]] for i in range(2))
    shown, counts = images().code_sets(numbers[:1])
    plain = few_codes().maps[shown[0, : counts[0]]]
    for drawn in (a, b):
        changed = (drawn != plain).any(axis=2)
        assert (changed.sum(axis=1) == 1).all()  # one map of each code
        factors = (drawn / np.where(plain == 0, 1, plain))[changed][:, 0]
        assert ((factors >= 0.8) & (factors <= 1.1)).all()
    assert (first.boxes[: counts[0]] != first.boxes[counts[0] :]).any(axis=1).all()


def test_the_jitter_never_makes_a_map_expand() -> None:
    drawings = images(jitter=(2.0, 2.0)).drawings(np.arange(2000), np.arange(2000, dtype=np.uint64))
    assert singular_values(drawings.maps).max() < 1


def test_boxes_lie_within_the_image_and_have_the_sizes_asked_for() -> None:
    boxes = images(scale=(0.25, 0.5)).drawings(np.arange(2000), np.arange(2000, dtype=np.uint64)).boxes
    assert (boxes[:, 0] + boxes[:, 2] <= 32).all()
    assert (boxes[:, 1] + boxes[:, 3] <= 32).all()
    assert {int(side) for side in boxes[:, 2]} == set(range(8, 17))
    assert set(boxes[:, 0].tolist()) == set(range(25))


def test_training_draws_anew_and_everything_else_does_not() -> None:
    source, index = images(), np.arange(4)
    generator = torch.Generator().manual_seed(0)
    first, second = source.draw(index, generator), source.draw(index, generator)
    assert (first != second).any()
    np.testing.assert_array_equal(source.draw(index, torch.Generator().manual_seed(0)), first)
    np.testing.assert_array_equal(source.views(index), source.views(index))
    np.testing.assert_array_equal(source.take(index), source.views(index)[:, 0])
    np.testing.assert_array_equal(
        source.subset(np.array([3, 1])).take(np.array([1])), source.take(index[1:2])
    )


def test_each_setting_and_the_codes_are_in_the_fingerprint() -> None:
    others = {
        "size": 16,
        "channels": 1,
        "iterations": 50,
        "fractals": (1, 2),
        "look": Look.DENSITY,
        "background": True,
        "scale": (0.1, 0.2),
        "jitter": (1.0, 1.0),
        "pairs": False,
    }
    assert set(others) == {field.name for field in fields(FractalStyle)}
    prints = {images(**{name: value}).fingerprint() for name, value in others.items()}
    prints |= {images().fingerprint(), images(3).fingerprint(), replace(images(), seed=1).fingerprint()}
    prints |= {replace(images(), codes=sample_codes(50, seed=1)).fingerprint()}
    prints |= {replace(images(), single=True).fingerprint()}
    assert len(prints) == len(others) + 5


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("augment", [None, Chain((Flip(p=0.5),))])
@pytest.mark.parametrize("pairs", [False, True])
def test_batches_are_the_same_with_and_without_reading_ahead(
    views: int, augment: Chain | None, pairs: bool
) -> None:
    data = fractals(Path(), False, 0, train=10, test=2, codes=10, iterations=50, pairs=pairs)

    def batches(prefetch: int) -> list[torch.Tensor]:
        one = ClientDataset(
            data.train.tensors(),
            torch.arange(8),
            data.mean,
            data.std,
            augment,
            prefetch=prefetch,
            views=views,
        )
        read = one.batches(4, Rng((0,)))
        found = [next(read)[0] for _ in range(5)]
        del read
        return found

    plain, ahead = batches(0), batches(2)
    assert all(torch.equal(one, other) for one, other in zip(plain, ahead, strict=True))
    shape = (4, 2, 3, 32, 32) if views == 2 else (4, 3, 32, 32)
    assert plain[0].shape == shape
    assert plain[0].dtype == torch.float32
    if views == 2:
        same = torch.equal(plain[0][:, 0], plain[0][:, 1])
        assert same is (not pairs and augment is None)


def test_the_second_epoch_shows_the_same_codes_drawn_anew() -> None:
    data = fractals(Path(), False, 0, train=4, test=2, codes=10, iterations=50)
    one = ClientDataset(data.train.tensors(), torch.arange(4), data.mean, data.std, views=2)
    read = one.batches(4, Rng((0,)))
    first, second = next(read)[0], next(read)[0]
    assert one.held(4) == 0
    assert not torch.equal(first, second)
    still = one.stretch(0, 4)[0]
    assert still.shape == (4, 2, 3, 32, 32)
    assert torch.equal(still, one.stretch(0, 4)[0])


def test_images_that_are_drawn_anew_are_not_read_for_several_clients_at_once() -> None:
    data = fractals(Path(), False, 0, labels="one", train=8, test=2, codes=4, iterations=50)
    train = data.train.tensors()
    holders = [ClientDataset(train, torch.arange(4) + 4 * k, data.mean, data.std) for k in range(2)]
    assert holders[0].group(holders[1:]) is None


def test_labels_are_the_codes_that_an_image_shows() -> None:
    one = fractals(Path(), False, 0, labels="one", train=30, test=4, codes=12, iterations=50)
    assert one.kind == "classification"
    assert one.train.targets.tolist() == [i % 12 for i in range(30)]
    several = fractals(Path(), False, 0, labels="several", train=30, test=4, codes=12, iterations=50)
    assert several.kind == "multi-label"
    sets, counts = several.train.inputs.code_sets(np.arange(30))
    for row, codes, count in zip(several.train.targets, sets, counts, strict=True):
        assert np.flatnonzero(row).tolist() == sorted(codes[:count])
    assert len(several.classes) == 12


def test_test_images_show_other_codes_than_training_images() -> None:
    data = fractals(Path(), False, 0, train=10, test=10, codes=1000, iterations=50)
    assert set(data.train.inputs.numbers) & set(data.test.inputs.numbers) == set()


def test_points_grow_with_the_image_and_the_moments_are_those_of_the_images() -> None:
    small = fractals(Path(), False, 0, train=50, test=2, codes=20)
    large = fractals(Path(), False, 0, train=2, test=1, codes=20, size=64)
    assert (small.train.inputs.style.iterations, large.train.inputs.style.iterations) == (1_000, 100_000)
    every = small.train.inputs.take(np.arange(50)) / 255
    np.testing.assert_allclose(small.mean, every.mean(axis=(0, 2, 3)), atol=1e-9)
    np.testing.assert_allclose(small.std, every.std(axis=(0, 2, 3)), atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"fractals": (2, 5), "codes": 3}, "fractals", "needs as many codes"),
        ({"fractals": (3, 2)}, "fractals", "smallest first"),
        ({"labels": "one", "fractals": (2, 5)}, "fractals", "has one fractal"),
        ({"labels": "one", "train": 3, "codes": 4}, "train", "too few for 4 codes"),
        ({"scale": (0.9, 0.2)}, "scale", "smaller number comes first"),
        ({"maps": (2, 9)}, "maps", "within 2 to 8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        fractals(Path(), False, 0, **{"train": 4, "test": 2, "codes": 10, **settings})  # type: ignore[arg-type]
    assert caught.value.where == where


def test_many_codes_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "_CACHED", 20)
    first = reader.codes_of(20, 0, (2, 8), 0.1)
    (file,) = tmp_path.rglob("*.npz")
    monkeypatch.setattr(reader, "sample_codes", lambda *given: pytest.fail("the file is there"))
    assert reader.codes_of(20, 0, (2, 8), 0.1).digest == first.digest
    monkeypatch.setattr(reader, "VERSION", 0)  # of other draws
    with pytest.raises(pytest.fail.Exception, match="the file is there"):
        reader.codes_of(20, 0, (2, 8), 0.1)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "_CACHED", 20)
    file.write_bytes(b"damaged")
    assert reader.codes_of(20, 0, (2, 8), 0.1).digest == first.digest
    assert reader.codes_of(20, 1, (2, 8), 0.1).digest != first.digest


def test_codes_that_were_drawn_in_vain_are_counted() -> None:
    codes = sample_codes(400, seed=0)
    assert codes.refused > 0
    (note,) = fractals(Path(), False, 0, train=4, test=2, codes=400, iterations=50).notes
    assert note.startswith(f"{codes.refused} of {400 + codes.refused} drawn codes ")
