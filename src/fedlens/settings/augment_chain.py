"""Makes the augmentations of a run, and refuses those that do not fit the task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedlens.base.errors import ConfigError
from fedlens.data.augmentation.augmented import Augmentation, Chain, Step
from fedlens.data.dataset import Dataset
from fedlens.data.lazy_images import LazyImages
from fedlens.settings.resolve import Resolved
from fedlens.tasks.task import Task


def augment_chain(
    choices: Sequence[Resolved], dataset: Dataset, task: Task
) -> tuple[Chain | None, Sequence[str]]:
    """The chain of augmentations, None for none, and their notes.

    Raises `ConfigError` where the targets of the task have no place in the image: for augmentations that join parts of
    several images, or change the size of images; and where a task has several views, and nothing makes them differ.
    """
    if not choices:
        _refuse_equal_views(dataset, task)
        return None, ()
    shape = dataset.input_shape
    steps: list[Step] = []
    notes: list[str] = []
    for choice in choices:
        step = choice(shape)
        steps.append(step)
        if not isinstance(step, Augmentation):
            continue
        if step.combines and not task.placed:
            raise _unplaced(choice.name, "joins parts of several images", task)
        note, before, shape = step.note(shape), shape, step.output_shape(shape)
        if shape != before and not task.placed:
            sizes = f"from {_size(before)} to {_size(shape)}"
            raise _unplaced(choice.name, f"changes the size of images {sizes}", task)
        notes += [note] if note else []
    return Chain(tuple(steps), task.move), notes


def _refuse_equal_views(dataset: Dataset, task: Task) -> None:
    """Raises `ConfigError` if the views of an image would be equal without an augmentation."""
    images = dataset.train.inputs
    if task.views < 2 or (isinstance(images, LazyImages) and images.views(np.arange(1)).ndim == 5):
        return
    raise ConfigError(
        f"the {task.views} views of an image of '{dataset.name}' are equal, because no augmentation changes them",
        where="data.augment",
        hint="set data.augment = ['random-resized-crop', 'flip', 'colour-jitter', 'grey'], for example",
    )


def attempt(chain: Chain, dataset: Dataset, task: Task) -> None:
    """Calls augmentations of a user's own once; see `Chain.attempt`. `dataset` is for training.

    Raises `ConfigError` for their faults, and for what `augment_chain` refuses of the others.
    """
    images, targets = dataset.train.batch(torch.arange(min(2, len(dataset.train))))
    for step, result in chain.attempt(images, targets):
        if task.placed:
            continue
        if result.change is not None and result.change.pieces is not None:
            raise _unplaced(step, "joins parts of several images", task)
        if result.images.shape != images.shape:
            sizes = f"from {_size(images.shape[1:])} to {_size(result.images.shape[1:])}"
            raise _unplaced(step, f"changes the size of images {sizes}", task)


def _unplaced(name: str, what: str, task: Task) -> ConfigError:
    return ConfigError(
        f"the augmentation '{name}' {what}, which needs targets that lie in the image, and the task is {task.kind}",
        where="data.augment",
        hint="remove it; it is for segmentation and detection",
    )


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape[1:]))
