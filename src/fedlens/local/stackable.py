"""Whether clients can train together, and how much memory each of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedlens.core.errors import told
from fedlens.core.modules import module_in
from fedlens.core.protocol import Call, Client, Outcome, Payload
from fedlens.core.seeding import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.local.rules import ClientRule
from fedlens.local.together import train_together

if TYPE_CHECKING:
    from fedlens.local.training import Train

OTHER = "take engine.name = 'inline' or 'processes'"


class Obstacle(NamedTuple):
    """Why clients cannot be trained together: what, the setting, and what to do."""

    what: str
    where: str
    hint: str


def obstacle(train: Train) -> Obstacle | None:
    """What keeps this training from being done for several clients at once; None where nothing does."""
    rule = train.rule
    if rule.solve is not None:
        return Obstacle(f"'{rule.name}' solves each client's problem in a way of its own", "client", OTHER)
    if train.personal:
        return Obstacle("parts of the model are the clients' own", "algorithm.name", OTHER)
    if train.keep_optimizer:
        return Obstacle(
            "the optimizer's state is kept, so there is one client after the other", "algorithm.name", OTHER
        )
    if not rule.plain and not rule.stackable:
        who = f"the client rule '{rule.name}'" if rule.name else "a client rule without a name"
        return Obstacle(
            f"{who} does not say that its clients may be stacked",
            "client",
            f"give it stackable=True where that is so, or {OTHER}",
        )
    for name, module in train.model.build().named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return Obstacle(
                f"the layer {name!r} normalizes over the examples of a batch and keeps statistics of them, which "
                "stacked clients do not have for themselves",
                "model",
                f"take group normalization (model.norm = 'group' where there is one), or {OTHER}",
            )
    return _tried(train)


def _tried(train: Train) -> Obstacle | None:
    """Two small clients, one with more steps, stacked and one after the other: what cannot be stacked shows here."""
    settings = train.settings.model_copy(
        update={
            "optimizer": "sgd", "lr": 0.1, "epochs": 2, "steps": None, "examples": None, "batch_size": 4,
            "stragglers": 0.0, "clip_norm": None, "momentum": 0.0, "nesterov": False,
        }
    )  # fmt: skip
    plain = replace(train, settings=settings, rule=ClientRule(), normalized=False)
    tree = tree_of(train.model.build())
    dtype = next((value.dtype for value in tree.values() if value.is_floating_point()), torch.float32)
    g = torch.Generator().manual_seed(0)
    datas = [
        _Rows(
            torch.randn(n, *train.model.input_shape, generator=g).to(dtype),
            torch.randint(train.model.classes, (n,), generator=g),
        )
        for n in (7, 3)
    ]

    def calls() -> list[Call]:
        scratch: dict[Any, Any] = {}
        there = [Client(k, d, {}, Secrets((k,)), scratch, torch.device("cpu")) for k, d in enumerate(datas)]
        return [Call({"model": tree, "lr": 0.1}, client, Rng((client.id, "trial"))) for client in there]

    random_state = torch.get_rng_state()
    try:
        alone = [_alone(plain, call) for call in calls()]
    except Exception:
        return None  # what is wrong with the model shows in the run itself
    finally:
        torch.set_rng_state(random_state)
    try:
        for found, expected in zip(train_together(plain, calls()), alone, strict=True):
            if isinstance(found, Exception):
                raise found
            torch.testing.assert_close(_sent(found), expected, rtol=1e-3, atol=1e-6, equal_nan=True)
    except AssertionError:
        return Obstacle(
            "the model does to stacked clients something else than to each by itself: it may mix the examples of a "
            "batch, or count them, or drop out values that are not laid out as the batch is",
            "model",
            OTHER,
        )
    except Exception as error:
        return Obstacle(f"the model cannot be stacked ({told(error)})", "model", OTHER)
    finally:
        torch.set_rng_state(random_state)
    return None


def _alone(train: Train, call: Call) -> dict[str, Tensor]:
    torch.default_generator.manual_seed(call.rng.seed("torch"))
    return {name: value.clone() for name, value in _sent(train(*call)).items()}


def _sent(outcome: Outcome) -> dict[str, Tensor]:
    payload: Payload = outcome.payload
    return {
        f"{part}.{name}": value
        for part in ("update", "buffers", "counters")
        for name, value in payload[part].items()
    }


@dataclass(frozen=True)
class _Rows:
    """A small client's data, in the given order again and again."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, size: int, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        while True:
            for start in range(0, len(self), size):
                yield self.inputs[start : start + size], self.targets[start : start + size]


def footprint(train: Train, device: torch.device, largest: int = 32) -> int:
    """About how many bytes a client takes in a group: its copies of the weights, a batch and its activations.

    `largest` is the batch where a client's examples are all one batch.
    """
    learner = module_in(train.model, {}, device)
    weights = sum(value.nbytes for value in learner.trainable.values())
    size = largest if train.settings.batch_size == "all" else train.settings.batch_size
    seen = [0]

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not any(module.children()):
            seen[0] += output.nbytes

    handles = [module.register_forward_hook(count) for module in learner.module.modules()]
    dtype = next(iter(learner.trainable.values())).dtype
    images = torch.zeros(1, *train.model.input_shape, dtype=dtype, device=device)
    with torch.no_grad():
        learner.module.eval()(images)
    for handle in handles:
        handle.remove()
    copies = 6 if train.rule.looks is None else 9  # two models to look at, and the features
    return copies * weights + size * (images.nbytes + 3 * seen[0])
