import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.base.errors import DataError
from fedlens.data import images as module
from fedlens.data.images import DecodedImages, ImageFiles, Paths, decode_all, sample_moments
from fedlens.engines.shared_memory import Packer, Region, unpack
from tests.unit.data.engine_on_images import seen_by_two_workers
from tests.unit.data.pictures import pixels, write


@pytest.fixture
def ten(tmp_path: Path) -> ImageFiles:
    """Ten random pictures 8 x 8."""
    for seed in range(10):
        write(tmp_path / "f" / f"{seed}.png", seed)
    return ImageFiles(tmp_path, Paths.of([f"f/{seed}.png" for seed in range(10)]), 3, 8, 8)


def expected(rows: list[int]) -> np.ndarray:
    return np.stack([pixels(row).transpose(2, 0, 1) for row in rows])


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files as they are decoded from here on."""
    decoded: list[str] = []
    decode = module.decode

    def counting(path: Path, *args: object) -> np.ndarray:
        decoded.append(path.name)
        return decode(path, *args)

    monkeypatch.setattr(module, "decode", counting)
    return decoded


def test_paths_give_back_every_name() -> None:
    names = ["a.png", "", "deep/er/b.png", "spital-zürich/ü.png", "not\udcffutf8.png"]
    paths = Paths.of(names)
    assert len(paths) == 5
    assert [paths[at] for at in range(5)] == names
    kept = paths.take(np.array([3, 0, 3]))
    assert [kept[at] for at in range(3)] == [names[3], names[0], names[3]]
    assert len(Paths.of([])) == 0


def test_images_stand_where_an_array_may_stand(ten: ImageFiles) -> None:
    assert ten.shape == (10, 3, 8, 8)
    assert (len(ten), ten.dtype, ten.nbytes) == (10, np.uint8, 1920)
    np.testing.assert_array_equal(ten.take(np.array([7, 2, 7])), expected([7, 2, 7]))
    assert ten.take(np.array([], np.int64)).shape == (0, 3, 8, 8)
    np.testing.assert_array_equal(ten.subset(np.array([4, 1])).take(np.array([1])), expected([1]))
    masks = replace(ten, channels=0)
    assert (masks.shape, masks.nbytes) == ((10, 8, 8), 640)


@pytest.mark.parametrize(
    ("nbytes", "kept"),
    [
        (0, []),
        (192, []),  # an image is 192 bytes, and its flag one
        (193, [9]),
        (4 * 193, [2, 4, 7, 9]),  # slot j is the row where floor(4 (row + 1) / 10) goes up
        (10 * 193 - 1, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10**9, list(range(10))),
    ],
)
def test_as_many_images_are_kept_as_fit_and_each_is_decoded_once(
    ten: ImageFiles, monkeypatch: pytest.MonkeyPatch, nbytes: int, kept: list[int]
) -> None:
    stored = ten.kept(nbytes)
    decoded = count_decodes(monkeypatch)
    everything = np.arange(10)
    for _ in range(3):
        np.testing.assert_array_equal(stored.take(everything), expected(list(range(10))))
    times = {row: decoded.count(f"{row}.png") for row in range(10)}
    assert times == {row: 1 if row in kept else 3 for row in range(10)}


def test_a_store_takes_no_more_than_it_may(ten: ImageFiles) -> None:
    large = replace(ten, height=100, width=100)
    for nbytes in (30_001, 75_000, 200_000):
        stored = large.kept(nbytes)
        assert stored.store is not None
        assert stored.store.memory.nbytes <= nbytes
        assert stored.store.slots == nbytes // 30_001
    assert large.kept(30_000).store is None


def test_what_is_kept_does_not_change_with_what_is_taken(ten: ImageFiles) -> None:
    stored = ten.kept(10**6)
    stored.take(np.arange(10))[...] = 0
    np.testing.assert_array_equal(stored.take(np.arange(10)), expected(list(range(10))))


def test_a_subset_has_no_store_of_other_rows(ten: ImageFiles) -> None:
    stored = ten.kept(10**6)
    stored.take(np.arange(10))
    np.testing.assert_array_equal(stored.subset(np.array([5, 3])).take(np.arange(2)), expected([5, 3]))


def test_a_file_that_fails_fills_no_slot(ten: ImageFiles) -> None:
    stored = ten.kept(10**6)
    content = stored.path(4).read_bytes()
    stored.path(4).write_bytes(content[:50])
    with pytest.raises(DataError, match=r"4\.png"):
        stored.take(np.array([4]))
    stored.path(4).write_bytes(content)
    np.testing.assert_array_equal(stored.take(np.array([4])), expected([4]))


def test_an_empty_store_costs_no_memory_in_a_region_and_is_shared_by_all_that_map_it(ten: ImageFiles) -> None:
    large = replace(ten, store=DecodedImages.of(300_000, 192))  # 58 MB
    payload = {"images": large, "weights": torch.arange(2000.0)}
    packer = Packer(payload)
    region = Region(packer.size)
    packer.write(region.view(), new=True)
    assert resident(region) < 2**20
    one, two = (unpack(packer.envelope, region.view())["images"] for _ in range(2))
    one.store.image(7, (192,))[...] = 5
    one.store.filled[7] = 1
    assert two.store.filled[:9].tolist() == [0] * 7 + [1, 0]
    assert two.store.image(7, (192,)).tolist() == [5] * 192
    assert resident(region) < 2**20


def test_a_region_holds_all_of_what_is_not_zero() -> None:
    """Also of arrays that are zero in between, not contiguous, or -0.0, whose bytes are not all zero."""
    sparse = np.zeros(3 << 18, np.uint8)
    sparse[[5, (1 << 18) - 1, 2 << 18, -1]] = 1, 2, 3, 4
    arrays = {
        "sparse": sparse,
        "zero": np.zeros(70_000, np.int64),
        "turned": np.arange(40_000).reshape(200, 200).T,
        "signed": np.full(1000, -0.0),
        "flags": np.arange(9000) % 7 == 0,
    }
    packer = Packer(arrays)
    region = Region(packer.size)
    packer.write(region.view(), new=True)
    found = unpack(packer.envelope, region.view())
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert np.signbit(found["signed"]).all()


def test_a_region_that_was_used_before_is_written_over_with_zeros() -> None:
    packer = Packer(np.zeros(5000, np.uint8))
    region = Region(packer.size)
    region.view()[:] = b"\7" * packer.size
    packer.write(region.view())
    assert not unpack(packer.envelope, region.view()).any()


def test_a_small_store_is_shared_whole_too(ten: ImageFiles) -> None:
    """Flags that are shared, and images that are not, would show black pictures."""
    packer = Packer(ten.kept(193))
    region = Region(packer.size)
    packer.write(region.view(), new=True)
    one, two = (unpack(packer.envelope, region.view()) for _ in range(2))
    one.take(np.array([9]))
    assert two.store.filled.tolist() == [1]
    np.testing.assert_array_equal(two.take(np.array([9])), expected([9]))


def test_a_copy_by_pickle_goes_on_by_itself(ten: ImageFiles) -> None:
    stored = ten.kept(4 * 193)
    stored.take(np.arange(10))
    copied = pickle.loads(pickle.dumps(stored))
    np.testing.assert_array_equal(copied.take(np.arange(10)), expected(list(range(10))))


@pytest.mark.usefixtures("quick_workers")
def test_one_worker_sees_what_another_decoded(ten: ImageFiles) -> None:
    """The file is gone before the second worker, another process, is asked."""
    assert seen_by_two_workers(ten.kept(10**6), row=3) == (pixels(3).astype(int).sum(),) * 2


def test_every_image_is_decoded_by_several_threads_and_the_faulty_are_named(ten: ImageFiles) -> None:
    for row in (2, 6):
        ten.path(row).write_bytes(b"")
    found, faults = decode_all(ten, threads=3)
    good = [0, 1, 3, 4, 5, 7, 8, 9]
    np.testing.assert_array_equal(found[good], expected(good))
    assert sorted(faults) == [2, 6]
    assert faults[6].where == str(ten.path(6))


def test_moments_of_a_sample_are_those_of_float64(ten: ImageFiles) -> None:
    """Of 10 images 4: those at 0, 2 (2.5), 5, 7 (7.5)."""
    scaled = expected([0, 2, 5, 7]).astype(np.float64) / 255
    mean, std = sample_moments(ten, at_most=4)
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 2, 3)), rtol=1e-12)
    assert sample_moments(expected(list(range(10))), at_most=4) == (mean, std)
    assert sample_moments(ten) == sample_moments(ten, at_most=10) != (mean, std)


def test_moments_pass_over_what_cannot_be_decoded(ten: ImageFiles) -> None:
    for row in range(10):
        if row not in (1, 8):
            ten.path(row).write_bytes(b"")
    scaled = expected([1, 8]) / 255
    np.testing.assert_allclose(sample_moments(ten)[0], scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    ten.path(1).unlink()
    ten.path(8).unlink()
    with pytest.raises(DataError, match="no image"):
        sample_moments(ten)


def test_a_channel_that_never_changes_can_be_divided_by() -> None:
    images = np.zeros((3, 2, 4, 4), np.uint8)
    images[:, 1] = 51
    assert sample_moments(images) == ((0.0, 0.2), (1.0, 1.0))


def resident(region: Region) -> int:
    """Bytes of memory that the region really takes."""
    return os.fstat(region.fd).st_blocks * 512
