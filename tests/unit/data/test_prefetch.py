"""Batches read ahead: the same bits, the same errors, no file decoded in vain, and no thread left."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedlens.base import threads
from fedlens.base.errors import DataError
from fedlens.base.threads import ReadAhead, first
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDataset, ClientDatasets
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.partition.partition import Partition
from tests.covering import covering

SHAPE = (3, 8, 8)
IMAGES = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, root = np.random.RandomState(0), tmp_path_factory.mktemp("images")
    for k in range(IMAGES):
        Image.fromarray(draw.randint(0, 256, (8, 8, 3), np.uint8)).save(root / f"{k:02}.png")
    return root


def files(root: Path, cached: int = 0) -> ImageFiles:
    names = Paths.of([f"{k:02}.png" for k in range(IMAGES)])
    return ImageFiles(root, names, *SHAPE).kept(cached * (1 + 192))


def chain(*names: str) -> Chain | None:
    return Chain(tuple(AUGMENTS.find(name)(SHAPE) for name in names)) if names else None


def holders(examples: Examples, augment: Chain | None = None, prefetch: int = 1) -> ClientDatasets:
    train = Examples(examples.inputs, np.arange(IMAGES) % 3)
    data = Dataset("made", train, train, ("a", "b", "c"), (0.4,) * 3, (0.2,) * 3, "", "")
    owners = np.arange(IMAGES) % 2
    shifts = {"brightness": np.array([1.0, 1.4]), "noise": np.array([0.0, 0.1])}

    def partitioner(table: Any) -> Partition:
        return replace(Partition.of_owners(owners, 2, spec={}), features=shifts)

    return replace(federate(data, partitioner)[0], augment=augment, prefetch=prefetch)


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


AUGMENTED = [(), ("pad-crop-flip", "colour-jitter"), ("random-resized-crop",), ("mosaic", "scale-crop")]


@pytest.mark.parametrize(
    ("augment", "who", "batches"), covering(AUGMENTED, [0, 1, "@train"], [(4, False), (4, True), (50, False)])
)
def test_batches_have_the_same_bits_from_files_from_memory_and_however_many_are_read_ahead(
    folder: Path, augment: tuple[str, ...], who: int | str, batches: tuple[int, bool], monkeypatch: Any
) -> None:
    monkeypatch.setattr("fedlens.data.client_datasets._AHEAD", 0)
    decoded = Examples(files(folder).take(np.arange(IMAGES)), np.zeros(IMAGES, np.int64))
    in_files = [Examples(files(folder, cached), np.zeros(IMAGES, np.int64)) for cached in (0, 7)]

    def read(examples: Examples, prefetch: int) -> list[Any]:
        data = holders(examples, chain(*augment), prefetch).data_of(who)
        with ExitStack() as ending:
            return list(first(data.batches(batches[0], Rng((3,)), batches[1]), 13, ending))

    plain = read(decoded, 0)
    assert len(plain) == 13
    for examples in (decoded, *in_files):
        for prefetch in (0, 1, 3):
            assert same(read(examples, prefetch), plain)
    assert not readers()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fedlens-read-ahead")]


def test_evaluation_reads_ahead_in_the_same_order(folder: Path) -> None:
    examples = Examples(files(folder), np.zeros(IMAGES, np.int64))
    for who in (0, "@train", "@test"):
        ahead, plain = holders(examples).data_of(who), holders(examples, prefetch=0).data_of(who)
        found = ahead.stretches(2, len(ahead), 5)
        assert isinstance(found, ReadAhead)
        assert not isinstance(plain.stretches(2, len(plain), 5), ReadAhead)
        assert same(list(found), list(plain.stretches(2, len(plain), 5)))
    assert not isinstance(ahead.stretches(0, 5, 5), ReadAhead)  # it would wait for the only one


def test_images_in_memory_are_read_in_the_thread_of_the_step_unless_augmenting_takes_long() -> None:
    images = torch.zeros(4, 3, 256, 256, dtype=torch.uint8)
    big = ClientDataset(Examples(images, torch.zeros(4).long()), torch.arange(4), (0.0,) * 3, (1.0,) * 3)
    small = replace(big, examples=Examples(images[:, :, :8, :8], torch.zeros(4).long()))
    flip = chain("flip")
    assert isinstance(replace(big, augment=flip).batches(2, Rng((0,))), ReadAhead)
    for data in (big, small, replace(small, augment=flip), replace(big, augment=flip, prefetch=0)):
        assert not isinstance(data.batches(2, Rng((0,))), ReadAhead)


class Counted:
    """Counts the images decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[int] = []
        decode = ImageFiles.decode

        def counted(images: ImageFiles, at: int) -> Any:
            self.at.append(at)
            return decode(images, at)

        monkeypatch.setattr(ImageFiles, "decode", counted)


@pytest.mark.parametrize("augment", [(), ("flip",)])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_no_image_is_decoded_after_the_last_step(
    folder: Path, augment: tuple[str, ...], prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = holders(Examples(files(folder), np.zeros(IMAGES, np.int64)), chain(*augment), prefetch).data_of(0)
    counted = Counted(monkeypatch)
    with ExitStack() as ending:
        for _ in first(data.batches(4, Rng((0,))), 3, ending):
            pass
    assert len(counted.at) == len(set(counted.at)) == 12


def test_images_without_augmentation_are_decoded_at_most_twice_however_many_epochs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = holders(Examples(files(folder), np.zeros(IMAGES, np.int64))).data_of(0)
    counted = Counted(monkeypatch)
    with ExitStack() as ending:
        assert len(list(first(data.batches(4, Rng((0,))), 40, ending))) == 40
    assert sorted(counted.at) == sorted(2 * data.indices.tolist())


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_a_file_that_is_gone_or_damaged_is_named_where_its_batch_is_read(
    folder: Path, tmp_path: Path, augment: tuple[str, ...], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads._Share, "cores", cores)
    root = tmp_path / "images"
    shutil.copytree(folder, root)
    order = torch.randperm(15, generator=Rng((0,)).torch("batches"))
    bad = 2 * int(order[9])  # client 0 has the even images; its third batch of 4 has this one
    (root / f"{bad:02}.png").write_bytes(b"no image")
    messages = []
    for prefetch in (0, 1, 4):
        examples = Examples(files(root), np.zeros(IMAGES, np.int64))
        batches = holders(examples, chain(*augment), prefetch).data_of(0).batches(4, Rng((0,)))
        with ExitStack() as ending:
            read = first(batches, 10, ending)
            assert len(list(islice(read, 2))) == 2
            with pytest.raises(DataError, match=f"{bad:02}.png") as caught:
                next(read)
            messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert not readers()


def test_an_augmentation_of_a_users_own_runs_in_the_thread_of_the_step(folder: Path) -> None:
    used = []

    def noise(images: Tensor, targets: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        used.append(threading.current_thread())
        return images ^ torch.randint_like(images, 2), targets  # from the global generator, as dropout does

    def read(prefetch: int) -> list[Any]:
        examples = Examples(files(folder), np.zeros(IMAGES, np.int64))
        data = holders(examples, Chain((noise,)), prefetch).data_of(0)
        torch.manual_seed(0)
        with ExitStack() as ending:
            return [(*batch, torch.rand(1)) for batch in first(data.batches(4, Rng((0,))), 6, ending)]

    assert same(read(2), read(0))
    assert set(used) == {threading.current_thread()}


def test_a_batch_of_files_is_decoded_in_the_threads_that_the_process_may_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[threading.Thread] = set()
    decode = ImageFiles.decode

    def watched(images: ImageFiles, at: int) -> Any:
        used.add(threading.current_thread())
        return decode(images, at)

    monkeypatch.setattr(ImageFiles, "decode", watched)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    wanted = files(folder).take(np.array([4, 4, 0, 29]))
    assert threading.current_thread() not in used
    assert 1 <= len(used) <= 3
    used.clear()
    monkeypatch.setattr(threads._Share, "cores", 1)
    assert np.array_equal(files(folder).take(np.array([4, 4, 0, 29])), wanted)
    assert used == {threading.current_thread()}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    threads._Share.cores = None
