"""The k-NN accuracy of a self-supervised run on a labelled dataset, at every evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.arithmetic import PLAIN
from fedlens.core.device_copies import uploaded
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.tree import Tree, load_into
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.loading import loaded
from fedlens.data.normalize import moments, normalize
from fedlens.settings.config import Neighbours
from fedlens.settings.plan import Plan
from fedlens.tasks.central_evaluation import automatic_batch
from fedlens.tasks.nearest_neighbours import check_neighbours, knn_accuracy
from fedlens.tasks.task import Task

_TABLE = "evaluation.neighbours"


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """The labelled images whose neighbours vote.

    Args:
        settings: how they vote.
        model, task: the encoder, and the task that exports it.
        train, test: (uint8 [n, C, H, W], labels int64 [n]).
        mean, std: for `normalize`, those of the dataset.
    """

    settings: Neighbours
    model: ModelSpec
    task: Task
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def accuracy(self, tree: Tree, device: torch.device) -> float:
        """The k-NN accuracy of the encoder that the task exports from `tree`, computed on `device`."""
        with random_state_kept():
            encoder = self.model.build(initial=False)
        encoder = PLAIN.fit(encoder.eval(), device)
        load_into(encoder, uploaded(self.task.export(tree), device))
        features, tests = (self._features(encoder, part[0], device) for part in (self.train, self.test))
        k, temperature = self.settings.k, self.settings.temperature
        labels, truth = (part[1].to(device) for part in (self.train, self.test))
        return knn_accuracy(features, labels, tests, truth, k, temperature)

    def description(self) -> dict[str, Any]:
        """Which images they are: the settings that chose them, and the SHA-256 of the images and labels in use."""
        hashed = hashlib.sha256()
        for images, labels in (self.train, self.test):
            hashed.update(images.contiguous().numpy().data)
            hashed.update(labels.contiguous().numpy().data)
        chosen = self.settings.model_dump(mode="json", include={"dataset", "train", "test"})
        return {"settings": chosen, "sha256": hashed.hexdigest()}

    def _features(self, encoder: nn.Module, images: Tensor, device: torch.device) -> Tensor:
        size = automatic_batch(images[0].numel(), 0)
        with torch.inference_mode():
            parts = [
                encoder(normalize(part.to(device), self.mean, self.std)).float()
                for part in torch.split(images, size)
            ]
        return torch.cat(parts)


def labelled_images(
    planned: Plan, algorithm: AlgorithmBase, model: ModelSpec, task: Task, data_dir: Path, download: bool
) -> LabelledImages | None:
    """The labelled images of `evaluation.neighbours`; None if the table is not set. `model` is the encoder.

    Raises `ConfigError` if the task is not self-supervised, if each client has a model of its own, if the images have
    no single label or one class, or if the encoder does not take them; and what the reader of the dataset raises.
    """
    settings = planned.config.evaluation.neighbours
    if settings is None:
        return None
    if task.classifier:
        raise ConfigError(
            f"the k-NN accuracy is for self-supervised tasks, and the task is {task.kind}",
            where=_TABLE,
            hint="remove the table: the accuracy of the classifier is measured",
        )
    if algorithm.personal:
        raise ConfigError(
            f"'{planned.config.algorithm['name']}' makes a model for each client, so there is no encoder to measure",
            where=_TABLE,
            hint="choose an algorithm with one global model, such as 'fedavg'",
        )
    seed = planned.config.seeds.data
    dataset: Dataset = planned.chosen[f"{_TABLE}.dataset"](data_dir, download, seed)
    if not dataset.table().single:
        what = f"no single label each: they are for {dataset.kind}" if dataset.classes else "no labels"
        raise ConfigError(
            f"the images of '{dataset.name}' have {what}",
            where=f"{_TABLE}.dataset",
            hint="choose a dataset whose images have one class each, such as 'cifar10'",
        )
    dataset = loaded(dataset, 0)
    rng = Rng((seed, "neighbours"))
    train = _sample(dataset.train, settings.train, rng.torch("train"))
    test = _sample(dataset.test, settings.test, rng.torch("test"))
    try:
        check_neighbours(train[1], len(test[1]), settings.k, f"'{dataset.name}'")
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{_TABLE}.{error.where}", hint=error.hint) from None
    _check_shape(model, dataset.input_shape, dataset.name)
    mean, std = moments(planned.config.data.normalize, dataset.mean, dataset.std)
    return LabelledImages(settings, model, task, train, test, mean, std)


def _sample(examples: Examples, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most so many of the examples, drawn once."""
    at = torch.randperm(len(examples), generator=generator)[:most].sort().values
    images, labels = examples.tensors().batch(at)
    return images, labels


def _check_shape(model: ModelSpec, shape: Sequence[int], name: str) -> None:
    """Raises `ConfigError` if the encoder does not take images of this shape."""
    with random_state_kept(), torch.inference_mode():
        encoder = model.build(initial=False).eval()
        try:
            features: Any = encoder(torch.zeros(2, *shape))
        except Exception:  # of any layer
            features = None
    if not isinstance(features, Tensor) or features.dim() != 2:
        sizes = ["x".join(map(str, each)) for each in (shape, model.input_shape)]
        raise ConfigError(
            f"the images of '{name}' are {sizes[0]}, and the encoder '{model.name}' takes {sizes[1]}",
            where=f"{_TABLE}.dataset",
            hint="choose a dataset whose images have that size, or one that can be resized to it",
        )
