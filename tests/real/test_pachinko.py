"""`pachinko` over the coarse and fine labels of the published CIFAR-100."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedlens.data.datasets.cifar import cifar100
from fedlens.data.partition.pachinko import pachinko

pytestmark = pytest.mark.real


def test_five_hundred_clients_of_cifar_100_as_fedcv_table_16_lists_them() -> None:
    root = Path(os.environ.get("FEDLENS_DATA", ""))
    if "FEDLENS_DATA" not in os.environ or not (root / "cifar-100-binary").is_dir():
        pytest.skip("FEDLENS_DATA is not set to a folder with cifar-100-binary")
    data = cifar100(root, False, 0)
    labels = np.asarray(data.train.targets)
    assert data.coarse is not None
    p = pachinko(data.table(), 0, clients=500, size=100)
    assert p.sizes().tolist() == [100] * 500
    assert sorted(p.indices.tolist()) == list(range(50_000))
    groups, classes = p.class_counts(data.coarse[labels]), p.class_counts(labels)
    # Dir(0.1 1_20): most of a client lies in one to four groups; Dir(10 1_5): there in nearly all classes.
    most = np.sort(groups, axis=1)[:, -4:].sum(axis=1)
    assert most.mean() > 85
    largest = groups.argmax(axis=1)
    full = groups.max(axis=1) >= 50
    held = [np.count_nonzero(classes[k][data.coarse == largest[k]]) for k in np.flatnonzero(full)]
    assert np.mean(held) > 4.5
