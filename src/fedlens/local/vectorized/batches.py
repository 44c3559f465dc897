"""The batches of stacked clients, beside each other: short ones filled up, and the filling weighted with 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.local.rules import LocalContext
from fedlens.local.vectorized.group import Group


class Batch(NamedTuple):
    """A step's batches of the clients that take it, A of them.

    Attributes:
        inputs, targets: [A, B, ...] and [A, B].
        weights: [A, B]: one over the number of a client's examples, and 0 where there is none.
        counts: how many examples there are.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    counts: list[int]


def batches(group: Group, like: Tensor) -> Iterator[Batch]:
    """The batches of the steps of these clients; weights are as `like` is."""
    if _gatherable(group.datas):
        return _gathered(group, like)
    streams = [
        data.batches(size, rng) for data, size, rng in zip(group.datas, group.sizes, group.rngs, strict=True)
    ]
    return _beside(streams, group.steps, like)


def held(data: Any, n: int) -> int:
    """The bytes of images that a client with n examples keeps in memory while it trains."""
    return 0 if _gatherable([data]) else int(data.held(n))


def _gatherable(datas: Sequence[Any]) -> bool:
    return bool(datas[0].beside(datas[1:]))


def stretches(contexts: Sequence[LocalContext], like: Tensor) -> Iterator[Batch]:
    """All examples of these clients in the order in which they hold them, those with the most batches first."""
    return _beside(
        [context.problem.stretches() for context in contexts],
        [context.problem.passes() for context in contexts],
        like,
    )


def _gathered(group: Group, like: Tensor) -> Iterator[Batch]:
    """The images of a step are read at once, wherever they are in the set that all clients share."""
    datas = group.datas
    at = datas[0].orders(datas, group.sizes, group.rngs, group.steps)
    size = at.shape[2]
    begins = torch.tensor([0, *(len(data) for data in datas[:-1])]).cumsum(0).unsqueeze(1)
    real = at >= 0
    # Short batches are filled up with the first of their own examples: another client's might be no number here.
    at = torch.where(real, at, at[:, :, :1]).clamp_(min=0)
    places = torch.cat([data.indices for data in datas])[at.add_(begins)]
    counts = real.sum(2)
    weights = (real.to(like.dtype) / counts.clamp(min=1).unsqueeze(2)).to(like.device)
    for step, row in enumerate(counts.tolist()):
        active = len(row) - row.count(0)
        images, labels = datas[0].gather(places[step, :active].flatten())
        yield Batch(
            images.view(active, size, *images.shape[1:]),
            labels.view(active, size),
            weights[step, :active],
            row[:active],
        )


def _beside(
    streams: Sequence[Iterator[tuple[Tensor, Tensor]]], steps: Sequence[int], like: Tensor
) -> Iterator[Batch]:
    """Each client's own batches, as they come, padded and put beside each other."""
    for step in range(steps[0]):
        active = sum(own > step for own in steps)
        found = [next(stream) for stream in streams[:active]]
        counts = [len(targets) for _, targets in found]
        size = max(counts)
        weights = torch.zeros(active, size, dtype=like.dtype, device=like.device)
        for k, count in enumerate(counts):
            weights[k, :count] = 1 / count
        yield Batch(
            torch.stack([_padded(inputs, size) for inputs, _ in found]),
            torch.stack([_padded(targets, size) for _, targets in found]),
            weights,
            counts,
        )


def _padded(value: Tensor, size: int) -> Tensor:
    if len(value) == size:
        return value
    return torch.cat([value, value[:1].expand(size - len(value), *value.shape[1:])])
