"""Trains two small clients stacked and one after the other, and reports whether a model or a rule makes a difference.

In float64, so that only the last bits may differ: in float32, an image that rounding moves to the other side of a ReLU
changes weights more than some mistakes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import HookError, out_of_memory, told
from fedlens.core.protocol import Call, Client, ClientExamples, Obstacle, Outcome
from fedlens.core.random import Rng, Secrets, random_state_kept
from fedlens.core.tree import Tree, tree_of
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, LocalContext, Traits
from fedlens.local.training import Train
from fedlens.local.vectorized.model import in_float64
from fedlens.local.vectorized.train_group import train_together

OTHER = "take engine.name = 'inline' or 'processes'"
START = "start"  # the name of the features at the initial weights of training
SIZES = 7, 3  # examples of the two clients: one takes more steps
# Adam would take large steps along gradients that are 0 up to rounding.
SETTINGS = {
    "optimizer": "sgd", "lr": 0.1, "epochs": 2, "steps": None, "examples": None, "batch_size": 4, "stragglers": 0.0,
}  # fmt: skip


def of_model(train: Train) -> Obstacle | None:
    """Tries the model with the local settings, and its features if the rule uses them."""
    looking = ClientRule(references=_references, loss=_loss, traits=Traits(stackable=True))
    fault = _fault(replace(train, rule=ClientRule() if train.rule.references is None else looking))
    if fault is None:
        return None
    if fault:
        return Obstacle(f"the model cannot train several clients at once ({fault})", "model", OTHER)
    return Obstacle(
        "the model computes other results for several clients at once than for each alone: it may mix or count "
        "the examples of a batch, or apply dropout to values whose first axis is not the batch",
        "model",
        OTHER,
    )


def of_rule(train: Train) -> Obstacle | None:
    """Tries the rule; a rule that needs something from the server is not tried."""
    rule = train.rule
    fault = None if rule.plain or rule.server_rules else _fault(train)
    if fault is None:
        return None
    who = f"the client rule '{rule.name}'"
    return Obstacle(
        f"{who} cannot train several clients at once ({fault})"
        if fault
        else f"{who} computes other results for several clients at once than for each alone",
        "client",
        f"see what `stackable` requires of the hooks, remove stackable=True, or {OTHER}",
    )


def _fault(train: Train) -> str | None:
    """The error of stacked training; empty if its results differ from training one client after the other.

    None if both give the same results, or if training one after the other fails too: the run itself reports that.
    """
    plain = replace(train, settings=train.settings.model_copy(update=SETTINGS), normalized=False)
    fault: str | None = None
    for model, close in ((in_float64(train.model), 1e-6), (train.model, 1e-2)):
        tried = replace(plain, model=model)
        with random_state_kept():
            try:
                generator, tree = torch.Generator().manual_seed(0), tree_of(model.build(initial=False))
                examples = [_examples(tried, n, generator) for n in SIZES]
                expected = _updates(_one_by_one, tried, examples, tree)
            except HookError:
                raise
            except Exception:
                continue
            try:
                distance = _distance(expected, _updates(train_together, tried, examples, tree))
            except Exception as error:
                if out_of_memory(error) or isinstance(error, HookError):
                    raise
                fault = fault or told(error)
                continue
            if distance <= close:
                return None
            # Only as far as rounding: a rule may step along the sign of a value that is 0 up to rounding.
            nudged = _updates(_one_by_one, tried, examples, _nudged(tree, generator))
            return None if distance <= 10 * _distance(expected, nudged) else ""
    return fault


def _examples(train: Train, n: int, generator: torch.Generator) -> _Examples:
    model = train.model
    leaves = model.build(initial=False).state_dict().values()
    dtype = next((value.dtype for value in leaves if value.is_floating_point()), torch.float32)
    inputs = train.task.random_inputs(n, model.input_shape, generator).to(dtype)
    return _Examples(inputs, train.task.random_targets(n, model.classes, model.input_shape, generator))


def _one_by_one(train: Train, calls: Sequence[Call]) -> Iterator[Outcome]:
    for call in calls:
        torch.default_generator.manual_seed(call.rng.seed("torch"))
        yield train(*call)


def _updates(
    run: Callable[[Train, Sequence[Call]], Any], train: Train, examples: Sequence[_Examples], tree: Tree
) -> list[dict[str, Tensor]]:
    """The updates of the clients, trained from the weights in `tree`. Raises what training raises."""
    scratch: dict[Any, Any] = {}
    clients = [
        Client(k, data, {}, Secrets((k,)), scratch, torch.device("cpu")) for k, data in enumerate(examples)
    ]
    updates = []
    for outcome in run(train, [Call({"model": tree, "lr": 0.1}, c, Rng((c.id, "trial"))) for c in clients]):
        if isinstance(outcome, BaseException):
            raise outcome
        sent = {part: outcome.payload[part] for part in ("update", "buffers", "counters")}
        updates.append({f"{part}.{n}": value.clone() for part in sent for n, value in sent[part].items()})
    return updates


def _nudged(tree: Tree, generator: torch.Generator) -> Tree:
    """The weights with changed last bits."""

    def nudge(v: Tensor) -> Tensor:
        return v * (1 + 4 * torch.finfo(v.dtype).eps * torch.randn(v.shape, generator=generator).to(v))

    return {name: nudge(v) if v.is_floating_point() else v for name, v in tree.items()}


def _distance(expected: Sequence[Mapping[str, Tensor]], actual: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest distance of a leaf, relative to its norm plus a thousandth of the norm of its client's update."""
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        norms = [value.double().norm() for name, value in one.items() if name.startswith("update.")]
        for name, value in one.items():
            differs = (value != other[name]) & ~(value.isnan() & other[name].isnan())
            if bool(differs.any()):
                gap = (value.double() - other[name].double())[differs].norm()
                share = gap / (value.double().norm() + 1e-3 * torch.stack(norms).norm())
                worst = max(worst, float(share.nan_to_num(torch.inf)))
    return worst


def _references(context: LocalContext) -> Mapping[str, Tree]:
    return {START: context.problem.tree}


def _loss(loss: Tensor, outputs: Tensor, targets: Tensor, context: LocalContext) -> Tensor:
    """Adds a function of the features of both models, row by row; adds nothing if the model has none."""
    seen = context.features
    return loss + (seen[OWN] * seen[START]).mean(1).tanh().mean() if OWN in seen else loss


@dataclass(frozen=True)
class _Examples(ClientExamples):
    """The examples of a small client, repeated in the given order."""

    inputs: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.answers[start:stop]

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.inputs[start:stop], self.answers[start:stop]

    def batches(self, size: int, rng: Rng, drop_last: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches."""
        end = len(self) - len(self) % size if drop_last else len(self)
        while True:
            yield from (self.stretch(start, start + size) for start in range(0, end, size))
