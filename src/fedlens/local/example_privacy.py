"""The client rule of example-level differential privacy: DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedlens.core.device_copies import uploaded
from fedlens.core.random import Rng, random_state_kept
from fedlens.local.optimizers import optimizer
from fedlens.local.rules import ClientRule, LocalContext, Solved, Tensors, Traits
from fedlens.local.settings import LocalSettings
from fedlens.local.vectorized.model import TaskForward
from fedlens.privacy.noise import KEY_BYTES, KeyedStream
from fedlens.privacy.settings import PrivacySettings
from fedlens.tasks.task import Task

NAME = "example-privacy"
_MARGIN = 1e-6  # of a clipped norm below C, more than the rounding of float32
_AT_ONCE, _BYTES = 256, 2**28  # the most examples, and bytes of their gradients, that are computed together


@dataclass(frozen=True)
class PrivateSteps:
    """Local steps with a clipped gradient of each unit, and noise in their sum.

    A unit is an example, or all examples of the client with one value of `[privacy] column`. Equation, for a client of
    n examples, batches of B, q = B / n and the clip C:

        batch:  each unit by itself, with probability q
        g_j  <- the sum of the gradients of the examples of unit j, over all leaves
        g_j  <- min(1, (1 - 1e-6) C / ||g_j||) g_j
        g    <- (sum_j g_j + N(0, (z C)^2 I)) / B
        w    <- the optimizer's step of `[local]` along g

    An empty batch is a step along noise. Each example's gradient is computed alone (`torch.func.vmap`), so it depends
    on no other example; a g_j that is not finite counts as 0. q and the number of steps follow from n, which is public.
    B is the expected number of examples with a column, too.

    Batches, noise, augmentation and dropout come from the operating system's entropy at the client, since the server
    knows the seed; with `noise = "seeded"` from the seed, and nothing is promised.
    """

    settings: PrivacySettings

    def __call__(self, context: LocalContext) -> Solved:
        """All steps of a client; without the loss, which has no noise."""
        problem, local = context.problem, context.settings
        n, weights = len(problem.data), [p.detach() for p in problem.learner.trainable.values()]
        release = self.release(n, local, context.steps)
        key = self._key(problem.rng)
        stream, secret = KeyedStream(key), Rng((key.hex(),))
        deviation = self.settings.z * self.settings.first_clip
        units = self._units(problem.data)
        in_order = units.argsort(stable=True)
        ordered, count = units[in_order], int(units.max()) + 1
        step = optimizer(local, {})
        with random_state_kept(problem.client.device):
            secret.seed_torch(problem.client.device)
            for at in range(context.steps):
                drawn = (stream.uniform(count) < release["q"])[ordered]
                batch = in_order[drawn], ordered[drawn]
                sums = self.clipped_sum(context, weights, *batch, secret.child(at))
                gradients = _noised(sums, deviation, release["cohort"], stream)
                lr = context.rate(at)
                step(weights, gradients, [lr * scale for scale in context.scales] if context.scales else lr)
        return Solved(weights, None, round(context.steps * release["cohort"]), context.steps)

    def clipped_sum(
        self, context: LocalContext, weights: Tensors, positions: Tensor, units: Tensor, rng: Rng
    ) -> list[Tensor]:
        """The sum of the clipped gradients of these units, leaf by leaf; 0 for none.

        Args:
            context: of the client.
            weights: the trainable weights.
            positions: int64 [k], of the units' examples among the client's.
            units: int64 [k], the unit of each, in ascending order.
            rng: of their augmentation.
        """
        problem = context.problem
        total = [torch.zeros_like(weight) for weight in weights]
        if not len(positions):
            return total
        gradient_of = _example_gradient(context, problem.task)
        inputs, targets = problem.data.batch(positions, rng)
        size = max(1, min(_AT_ONCE, _BYTES // problem.learner.weight_bytes))
        carried: list[Tensor] = []  # the sums of a unit whose examples go on
        for start in range(0, len(positions), size):
            batch = inputs[start : start + size], targets[start : start + size]
            each = vmap(gradient_of, in_dims=(None, 0, 0), randomness="different")(weights, *batch)
            each = [leaf.flatten(1) for leaf in each]
            if self.settings.column is not None:
                each = _unit_sums(each, units[start : start + size], carried)
                goes_on = bool(units[start + size - 1 : start + size + 1].diff().eq(0).any())
                carried = [leaf[-1] for leaf in each] if goes_on else []
                each = [leaf[:-1] for leaf in each] if goes_on else each
            norms = torch.stack([torch.linalg.vector_norm(leaf, dim=1) for leaf in each]).norm(dim=0)
            finite = norms.isfinite()
            if norms.is_cuda or not finite.all():  # the host would wait for a GPU to look
                each = [leaf.masked_fill(~finite[:, None], 0.0) for leaf in each]
            factors = ((1 - _MARGIN) * self.settings.first_clip / norms).clamp(max=1.0).where(finite, 0.0)
            for own, leaf in zip(total, each, strict=True):
                own += (factors @ leaf).view_as(own)
        return total

    def release(self, examples: int, local: LocalSettings, steps: int | None = None) -> Mapping[str, Any]:
        """What a client of so many examples releases each time that it trains; see `fedlens.privacy.accounting`.

        >>> settings = PrivacySettings(unit="example", clip=1.0, noise_multiplier=1.0, delta=1e-5)
        >>> found = PrivateSteps(settings).release(600, LocalSettings(lr=0.1, epochs=2, batch_size=32))
        >>> found["steps"], round(found["q"], 4)  # 2 epochs of 19 batches
        (38, 0.0533)
        """
        batch = local.batch(examples)
        return {
            "event": self.settings.mechanism,
            "q": batch / examples,
            "z": self.settings.z,
            "relation": "add-or-remove",
            "sampling": "poisson",
            "cohort": batch,
            "clients": examples,
            "steps": local.steps_at(examples) if steps is None else steps,
        }

    def _units(self, data: Any) -> Tensor:
        """int64 [n]: the unit of each example, from 0 on in the order of their first examples."""
        if self.settings.column is None:
            return torch.arange(len(data))
        _, first, units = np.unique(data.units(self.settings.column), return_index=True, return_inverse=True)
        return torch.from_numpy(first.argsort().argsort()[units])

    def _key(self, rng: Rng | None) -> bytes:
        if not self.settings.seeded:
            return os.urandom(KEY_BYTES)
        assert rng is not None
        return hashlib.sha256(str(rng.seed(NAME)).encode()).digest()


def example_privacy(settings: PrivacySettings) -> ClientRule:
    """The rule whose local steps are those of DP-SGD.

    >>> rule = example_privacy(PrivacySettings(unit="example", clip=1.0, noise_multiplier=1.0, delta=1e-5))
    >>> rule.name, rule.steps_plainly
    ('example-privacy', False)
    """
    return ClientRule(name=NAME, solve=PrivateSteps(settings), traits=Traits(hides_loss=True))


def _example_gradient(context: LocalContext, task: Task) -> Any:
    """(weights, image [C, H, W], target) -> the gradient of the loss of one example, leaf by leaf."""
    module, losses = context.problem.learner.module, task.losses
    assert losses is not None
    module.train()
    forward = TaskForward(module, task)

    def loss(weights: Tensors, image: Tensor, target: Tensor) -> Tensor:
        named = {f"module.{name}": weight for name, weight in zip(context.names, weights, strict=True)}
        outputs = functional_call(forward, named, (image.unsqueeze(0),))
        return losses(outputs, target.unsqueeze(0)).sum()

    return grad(loss)


def _unit_sums(each: Tensors, units: Tensor, carried: Tensors) -> Tensors:
    """The sums of the gradients of each unit, [units, d] each leaf; `carried` is added to those of the first one."""
    counts = torch.unique_consecutive(units, return_counts=True)[1].tolist()
    sums = [torch.stack([part.sum(0) for part in torch.split(leaf, counts)]) for leaf in each]
    for leaf, more in zip(sums, carried, strict=False):
        leaf[0] += more
    return sums


def _noised(sums: Tensors, deviation: float, expected: float, stream: KeyedStream) -> Tensors:
    """The sums with noise, over the expected batch.

    The noise is drawn on the processor, where the cryptographic generator is, and added in float64 where the sums are:
    the host never waits for a GPU.
    """
    flat = torch.cat([leaf.flatten() for leaf in sums]).double()
    if deviation:
        flat += uploaded(stream.normal(len(flat)).mul_(deviation), flat.device)
    noised = (flat / expected).to(sums[0].dtype)
    parts = torch.split(noised, [leaf.numel() for leaf in sums])
    return [part.view_as(leaf) for part, leaf in zip(parts, sums, strict=True)]
