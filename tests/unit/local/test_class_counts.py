"""Class counts of a client: in chunks that take little memory, and kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.core.protocol import Client
from fedlens.core.random import Secrets
from fedlens.local import class_counts as counting
from fedlens.local.class_counts import class_counts
from fedlens.tasks.classification import Classification
from fedlens.tasks.task import Task

CLASSES = 3


class Labels:
    """Targets that note which parts of them are read."""

    def __init__(self, targets: Tensor) -> None:
        self.targets, self.read = targets, list[int]()

    def __len__(self) -> int:
        return len(self.targets)

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        part = self.targets[start:stop]
        self.read.append(len(part))
        return part


class Pixels(Task):
    """Counts the pixels of each class in a mask."""

    kind = "segmentation"

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        return torch.stack([torch.bincount(mask.flatten(), minlength=classes) for mask in targets])

    def loss(self, outputs: Any, targets: Any, weights: Any = None, normalize: bool = True) -> Tensor:
        raise NotImplementedError

    def measure(self, outputs: Any, targets: Any) -> Any:
        raise NotImplementedError

    def metrics(self, measured: Any) -> Any:
        raise NotImplementedError


def client(data: Labels, scratch: dict[Any, Any], name: int = 0) -> Client:
    return Client(name, data, {}, Secrets((name,)), scratch, torch.device("cpu"))


@pytest.mark.parametrize("values", [3, 7, 10**6])
def test_counts_do_not_depend_on_the_chunks(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_VALUES", values)
    data = Labels(torch.tensor([2, 0, 2, 2, 0, 1, 2]))
    assert class_counts(Classification(), client(data, {}), CLASSES).tolist() == [2, 1, 4]
    assert max(data.read) <= max(1, values // CLASSES)


def test_a_chunk_of_masks_has_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_VALUES", 128)
    masks = torch.randint(0, CLASSES, (5, 8, 8), generator=torch.Generator().manual_seed(0))
    data = Labels(masks)
    found = class_counts(Pixels(), client(data, {}), CLASSES)
    assert found.tolist() == torch.bincount(masks.flatten(), minlength=CLASSES).tolist()
    assert max(data.read) == 2


def test_the_counts_of_a_client_are_kept_and_those_of_another_are_its_own() -> None:
    scratch: dict[Any, Any] = {}
    first, second = Labels(torch.tensor([0, 0])), Labels(torch.tensor([1]))
    for _ in range(2):
        assert class_counts(Classification(), client(first, scratch, 0), CLASSES).tolist() == [2, 0, 0]
        assert class_counts(Classification(), client(second, scratch, 1), CLASSES).tolist() == [0, 1, 0]
    assert (sum(first.read), sum(second.read)) == (1 + 2, 1 + 1)


def test_the_kept_counts_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_KEPT", 2 * CLASSES)
    scratch: dict[Any, Any] = {}
    for name in range(5):
        class_counts(Classification(), client(Labels(torch.tensor([1])), scratch, name), CLASSES)
        assert len(scratch["class-counts"]) <= 2


def test_a_client_without_examples_has_no_classes() -> None:
    none = Labels(torch.zeros(0, dtype=torch.int64))
    assert class_counts(Classification(), client(none, {}), CLASSES).tolist() == [0, 0, 0]
