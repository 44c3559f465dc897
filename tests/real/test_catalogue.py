"""The counts of the catalogue against what the readers read, for every dataset that is on this machine."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from fedlens.data.catalogue import CATALOGUE, presence

pytestmark = pytest.mark.real

READERS = {
    "mnist": "mnist:mnist",
    "fashion-mnist": "mnist:fashion_mnist",
    "cifar10": "cifar:cifar10",
    "cifar100": "cifar:cifar100",
    "digits": "digits:digits",
    "camvid": "camvid:camvid",
    "bccd": "bccd:bccd",
}


@pytest.mark.parametrize("name", READERS)
def test_a_dataset_is_as_its_record_says(name: str) -> None:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    root = Path(os.environ["FEDLENS_DATA"])
    record = CATALOGUE[name]
    if presence(record, root).state not in ("here", "built in"):
        pytest.skip(f"'{name}' is not below FEDLENS_DATA")
    module, _, function = READERS[name].partition(":")
    data = getattr(importlib.import_module(f"fedlens.data.datasets.{module}"), function)(root, False, 0)
    assert (len(data.train), len(data.test)) == (record.train, record.test)
    assert (len(data.classes), data.kind) == (record.classes, record.task)
    clients = data.train.columns.get("client")
    assert (None if clients is None else len(set(clients.tolist()))) == record.clients


def test_what_is_on_this_machine_is_found(real_data: Path) -> None:
    """Every folder of the real data is one that a record looks for."""
    here = {name for name, record in CATALOGUE.items() if presence(record, real_data).state != "absent"}
    places = {
        "FashionMNIST": "fashion-mnist",
        "cifar-10-batches-bin": "cifar10",
        "cifar-100-binary": "cifar100",
        "omniglot-py": "omniglot",
        "BCCD": "bccd",
        "CamVid": "camvid",
        "federated_vision_datasets/landmarks-user-160k": "landmarks-user-160k",
    }
    assert {name for place, name in places.items() if (real_data / place).is_dir()} <= here
