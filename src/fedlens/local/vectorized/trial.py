"""Two small clients trained stacked and one after the other: what a model or a rule cannot have stacked shows here.

In float64, so that what is left are the last bits: an image that a rounding brings to the other side of a ReLU moves
weights in float32 further than some mistakes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlens.core.errors import out_of_memory, told
from fedlens.core.protocol import Call, Client, ClientExamples, Obstacle, Outcome, Payload
from fedlens.core.random import Rng, Secrets, random_state_kept
from fedlens.core.tree import Tree, tree_of
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, LocalContext, Traits
from fedlens.local.training import Train
from fedlens.local.vectorized.model import in_float64
from fedlens.local.vectorized.train_group import train_together

OTHER = "take engine.name = 'inline' or 'processes'"
THERE = "there"


def of_model(train: Train) -> Obstacle | None:
    """What the trial finds in the way with the model, the local settings, and features where the rule looks at any."""
    rule = (
        ClientRule()
        if train.rule.looks is None
        else ClientRule(looks=_looks, loss=_loss, traits=Traits(stackable=True))
    )
    found = _tried(replace(train, rule=rule))
    if found is None:
        return None
    if found:
        return Obstacle(f"the model cannot be stacked ({found})", "model", OTHER)
    return Obstacle(
        "the model does to stacked clients something else than to each by itself: it may mix the examples of a "
        "batch, or count them, or drop out values that are not laid out as the batch is",
        "model",
        OTHER,
    )


def of_rule(train: Train) -> Obstacle | None:
    """What it finds in the way with the rule; nothing is tried of one that needs something of the server."""
    rule = train.rule
    found = None if rule.plain or rule.servers else _tried(train)
    if found is None:
        return None
    who = f"the client rule '{rule.name}'"
    return Obstacle(
        f"{who} cannot be stacked ({found})"
        if found
        else f"{who} does to stacked clients something else than to each by itself",
        "client",
        f"see what `stackable` asks of its hooks, or take stackable=True out, or {OTHER}",
    )


def _tried(train: Train) -> str | None:
    """None where both come to the same, or where it does not run alone either, which shows in the run itself.

    Otherwise what is raised of stacked clients; nothing where they come to something else.
    """
    # Adam would make large steps of gradients that are 0 but for rounding.
    update = {
        "optimizer": "sgd", "lr": 0.1, "epochs": 2, "steps": None, "examples": None, "batch_size": 4, "stragglers": 0.0,
    }  # fmt: skip
    settings = train.settings.model_copy(update=update)
    plain = replace(train, settings=settings, normalized=False)
    failed: Exception | None = None
    for model, close in ((in_float64(train.model), 1e-6), (train.model, 1e-2)):
        trial = _Trial(replace(plain, model=model))
        with random_state_kept():
            try:
                alone = trial.alone()
            except Exception:
                continue
            try:
                apart = _apart(alone, trial.together())
            except Exception as error:
                if out_of_memory(error):
                    raise
                failed = failed or error
                continue
            # No further than rounding takes it: a rule may step along the sign of what is 0 but for that.
            return None if apart <= close or apart <= 10 * _apart(alone, trial.alone(nudged=True)) else ""
    return None if failed is None else told(failed)


class _Trial:
    """Two clients, one with more steps."""

    def __init__(self, train: Train) -> None:
        self.train, self.tree, model = train, tree_of(train.model.build()), train.model
        self.dtype = next((v.dtype for v in self.tree.values() if v.is_floating_point()), torch.float32)
        self.generator = torch.Generator().manual_seed(0)
        self.datas = [
            _Rows(
                torch.randn(n, *model.input_shape, generator=self.generator).to(self.dtype),
                torch.randint(model.classes, (n,), generator=self.generator),
            )
            for n in (7, 3)
        ]

    def alone(self, nudged: bool = False) -> list[dict[str, Tensor]]:
        """What each sends; from weights that are other ones in their last bits, if `nudged`."""
        found = []
        for call in self._calls(self._nudged() if nudged else self.tree):
            torch.default_generator.manual_seed(call.rng.seed("torch"))
            found.append({name: value.clone() for name, value in _sent(self.train(*call)).items()})
        return found

    def together(self) -> list[dict[str, Tensor]]:
        """What each sends when they are stacked."""
        found = []
        for outcome in train_together(self.train, self._calls(self.tree)):
            if isinstance(outcome, Exception):
                raise outcome
            found.append(_sent(outcome))
        return found

    def _calls(self, tree: Tree) -> list[Call]:
        scratch: dict[Any, Any] = {}
        there = [
            Client(k, data, {}, Secrets((k,)), scratch, torch.device("cpu"))
            for k, data in enumerate(self.datas)
        ]
        return [Call({"model": tree, "lr": 0.1}, client, Rng((client.id, "trial"))) for client in there]

    def _nudged(self) -> dict[str, Tensor]:
        by = 4 * torch.finfo(self.dtype).eps
        return {
            name: v * (1 + by * torch.randn(v.shape, generator=self.generator).to(v))
            if v.is_floating_point()
            else v
            for name, v in self.tree.items()
        }


def _sent(outcome: Outcome) -> dict[str, Tensor]:
    payload: Payload = outcome.payload
    return {
        f"{part}.{name}": value
        for part in ("update", "buffers", "counters")
        for name, value in payload[part].items()
    }


def _apart(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> float:
    """The largest distance of a leaf, as a share of it and of a thousandth of all that its client sends."""
    return max(_distance(one, other) for one, other in zip(expected, found, strict=True))


def _distance(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    whole = torch.stack(
        [value.double().norm() for name, value in expected.items() if name.startswith("update.")]
    ).norm()
    worst = 0.0
    for name, value in expected.items():
        other = found[name]
        differs = (value != other) & ~(value.isnan() & other.isnan())
        if bool(differs.any()):
            share = (value.double() - other.double())[differs].norm() / (value.double().norm() + 1e-3 * whole)
            worst = max(worst, float(share.nan_to_num(torch.inf)))
    return worst


def _looks(context: LocalContext) -> Mapping[str, Tree]:
    return {THERE: context.problem.tree}


def _loss(loss: Tensor, outputs: Tensor, targets: Tensor, context: LocalContext) -> Tensor:
    """Something of the features of both models, row by row; nothing where the model has none."""
    seen = context.features
    return loss + (seen[OWN] * seen[THERE]).mean(1).tanh().mean() if OWN in seen else loss


@dataclass(frozen=True)
class _Rows(ClientExamples):
    """A small client's data, in the given order again and again."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def labels(self) -> Tensor:
        return self.targets

    def take(self, at: Tensor) -> _Rows:
        return _Rows(self.inputs[at], self.targets[at])

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.inputs[start:stop], self.targets[start:stop]

    def batches(self, size: int, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        while True:
            for start in range(0, len(self), size):
                yield self.inputs[start : start + size], self.targets[start : start + size]
