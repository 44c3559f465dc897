"""Batches and random numbers of each augmentation, bit for bit, as before augmentations were given targets."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.datasets.digits import digits
from fedlens.data.federated import federate
from fedlens.data.partition.partition import Partition

# Two batches of 16 and 7 images, and the state of the generator afterwards.
BITS = {
    ("pad-crop-flip", 3): ("dbff15a1f032b9cc", "ebde347f0eeb1af7"),
    ("pad-crop-flip", 1): ("580043dc1ae5b106", "ebde347f0eeb1af7"),
    ("crop", 3): ("f0ed7b3863ca30f8", "e908c224215f8d2e"),
    ("crop", 1): ("d746249453d98137", "e908c224215f8d2e"),
    ("flip", 3): ("f0ce076e882958a5", "30115e8b932ad1fd"),
    ("flip", 1): ("86260263740eb5a8", "30115e8b932ad1fd"),
    ("colour-jitter", 3): ("049b037ed2b9f432", "03cdf4a055b8465e"),
    ("colour-jitter", 1): ("574594bed09d5ab9", "03cdf4a055b8465e"),
    ("random-resized-crop", 3): ("525dab6754b6430b", "ab0fc89fa8fa9808"),
    ("random-resized-crop", 1): ("9d9096b4e051e602", "ab0fc89fa8fa9808"),
    ("scale-crop", 3): ("58ea2175dc517b15", "ebde347f0eeb1af7"),
    ("scale-crop", 1): ("3c753ccf05581e8d", "ebde347f0eeb1af7"),
    ("mosaic", 3): ("c9234788f29f876f", "6fe03b54232d11c9"),
    ("mosaic", 1): ("c3a8038d775ea045", "6fe03b54232d11c9"),
}
SHAPES = {3: (3, 32, 24), 1: (1, 28, 28)}


def digest(*tensors: Tensor) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return hashed.hexdigest()[:16]


def images(n: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 256, (n, *shape), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


@pytest.mark.parametrize(("name", "channels"), BITS)
def test_images_and_random_stream_are_those_of_before(name: str, channels: int) -> None:
    shape, drawn = SHAPES[channels], torch.Generator().manual_seed(11)
    augment = AUGMENTS.find(name)(shape)
    batches = [augment(images(n, shape), torch.arange(n), drawn).images for n in (16, 7)]
    assert (digest(*batches), digest(drawn.get_state())) == BITS[name, channels]


def holders(prefetch: int) -> ClientDatasets:
    owners = np.random.RandomState(0).randint(0, 5, len(digits(Path(), False, 0).train))
    names = ("pad-crop-flip", "flip", "random-resized-crop")
    chain = Chain(tuple(AUGMENTS.find(name)((1, 8, 8)) for name in names))
    drawn = lambda table: Partition.of_owners(owners, 5, spec={})  # noqa: E731
    return replace(federate(digits(Path(), False, 0), drawn)[0], augment=chain, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("who", "bits"), [(2, "e59b31ce0b3cb04c"), ("@train", "b4f1e5a415a0e073")])
def test_batches_of_a_client_are_those_of_before_however_many_are_read_ahead(
    who: int | str, bits: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlens.data.client_datasets._AHEAD", 0)
    read = islice(holders(prefetch).data_of(who).batches(32, Rng((1, "a"))), 30)
    assert digest(*[part for batch in read for part in batch]) == bits
