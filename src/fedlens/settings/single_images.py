"""Refuses models that cannot train on a batch of one image, where clients have such batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.local.settings import LocalSettings
from fedlens.tasks.task import Task

_NAMED = 5  # clients that a message lists


def refuse_single_images(
    model: ModelSpec,
    task: Task,
    local: LocalSettings,
    sizes: NDArray[np.int64],
    names: Sequence[str],
    full_gradients: bool = False,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raises `ConfigError` if a client's batches include one of a single image, and the model cannot train on it.

    Batch normalization needs more than one value per channel. The client would fail in every round.

    Args:
        model: the model.
        task: calls the model.
        local: the settings of local training.
        sizes: [n], the number of training examples of each client that may be asked to train.
        names: the n clients.
        full_gradients: whether clients also take gradients over all their examples.
        shape: the shape of an augmented training image; by default that of the model's input.
    """
    single = [
        k for k, size in enumerate(sizes.tolist()) if size and meets_single_image(local, size, full_gradients)
    ]
    if not single or not fails_on_one_image(model, task, shape):
        return
    listed = ", ".join(names[k] for k in single[:_NAMED])
    more = f" and {len(single) - _NAMED:,} more" if len(single) > _NAMED else ""
    alone = [k for k in single if (local.examples or sizes[k]) == 1 or local.batch_size == 1]
    if not alone and full_gradients:
        hint = "set another local.batch_size: gradients over all examples include the last batch"
    elif not alone:
        hint = "set local.last_batch = 'drop', or another local.batch_size"
    elif local.batch_size == 1:
        hint = "set local.batch_size to at least 2"
    else:
        hint = (
            "leave clients with one image out of the partition, or take a model without batch normalization"
        )
    raise ConfigError(
        f"{len(single):,} of {np.count_nonzero(sizes):,} clients train on a batch of one image, on which "
        f"'{model.name}' fails, because batch normalization needs at least two: {listed}{more}",
        where="local.batch_size" if alone or full_gradients else "local.last_batch",
        hint=hint,
    )


def meets_single_image(local: LocalSettings, examples: int, full_gradients: bool = False) -> bool:
    """Whether local training at a client of this many examples includes a batch of one image.

    >>> local = LocalSettings(lr=0.1, batch_size=32)
    >>> [meets_single_image(local, n) for n in (1, 32, 33, 34)]
    [True, False, True, False]
    """
    n = local.examples or examples
    batch = local.batch(n)
    if batch == 1:
        return True
    if n % batch != 1:
        return False
    return full_gradients or (local.last_batch == "keep" and local.steps_at(n) >= local.batches_at(n))


def fails_on_one_image(model: ModelSpec, task: Task, shape: tuple[int, ...] | None = None) -> bool:
    """Whether batch normalization in the model raises its error for a training batch of one image of this shape."""
    module = model.build(initial=False).train()
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return False
    with torch.no_grad(), random_state_kept():
        try:
            task.trial(module, task.blank(1, shape or model.input_shape), model.classes)
        except ValueError as error:
            return "more than 1 value per channel" in str(error)
        except Exception:  # another fault, which the run reports
            return False
    return False
