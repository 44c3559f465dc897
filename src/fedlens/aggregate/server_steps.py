"""Server steps: how the aggregated update moves the model. They see trainable weights and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, TypeGuard

from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry, Feeds, Registry
from fedlens.core.protocol import Payload
from fedlens.core.tree import Tree, add, map_tree, zeros_like

Rate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False, description="server learning rate gamma"),
    Feeds("server"),
]


class ServerStep(Protocol):
    """An optimizer at the server, as pure functions: the state is an argument and a result.

    With the class attribute `follows_device = True`, it declares that it computes where its inputs are, which may then
    be on a GPU; otherwise they are in CPU memory. `step` may return a third value, numbers of its own by name: they
    become columns of `metrics.jsonl`.
    """

    def init(self, weights: Tree) -> Payload:
        """The state before the first step."""
        ...

    def step(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """The new weights and the new state."""
        ...


class StepInPlace(ServerStep, Protocol):
    """A server step that can also write the new weights into the update's memory, and so needs no more memory."""

    def step_in_place(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """As `step`, for an update that is donated (`fedlens.core.tree`); the weights stay as they are."""
        ...


def steps_in_place(server: ServerStep) -> TypeGuard[StepInPlace]:
    """Whether `step_in_place` does what `step` does: a class that overrides `step` alone inherits another's."""
    for kind in type(server).__mro__:
        if "step_in_place" in vars(kind):
            return True
        if "step" in vars(kind):
            return False
    return False


@dataclass(frozen=True)
class ServerSGD:
    """w <- w - gamma Delta.

    >>> import torch
    >>> ServerSGD(lr=0.5).step({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0])}, {})[0]
    {'w': tensor([0.5000])}
    """

    follows_device: ClassVar[bool] = True
    lr: float = 1.0

    def init(self, weights: Tree) -> Payload:
        """No state."""
        return {}

    def step(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """One step."""
        return add(weights, update, scale=-self.lr), state

    def step_in_place(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """One step, in the update's memory."""
        return add(weights, update, scale=-self.lr, donated=True), state


@dataclass(frozen=True)
class Momentum:
    """FedAvgM: v <- beta v + Delta, w <- w - gamma v (Hsu et al. 2019, section 4.2; 2020, section 5.1).

    With Nesterov's momentum (Hsu et al. 2019), w <- w - gamma (Delta + beta v) with the new v.

    >>> import torch
    >>> step, delta = Momentum(momentum=0.5), {"w": torch.tensor([1.0])}
    >>> weights, state = step.step({"w": torch.tensor([0.0])}, delta, {"v": {"w": torch.tensor([2.0])}})
    >>> weights["w"], state["v"]["w"]
    (tensor([-2.]), tensor([2.]))
    """

    follows_device: ClassVar[bool] = True
    lr: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False

    def init(self, weights: Tree) -> Payload:
        """v = 0."""
        return {"v": zeros_like(weights)}

    def step(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """One step."""
        v: Mapping[str, Tensor] = map_tree(lambda old, delta: self.momentum * old + delta, state["v"], update)
        direction = add(update, v, scale=self.momentum) if self.nesterov else v
        return add(weights, direction, scale=-self.lr), {"v": v}


def plain(*, lr: Rate = 1.0) -> ServerSGD:
    """The plain step of FedAvg, with a server learning rate."""
    return ServerSGD(lr)


def momentum(
    *,
    lr: Rate = 1.0,
    momentum: Annotated[float, Field(ge=0, lt=1, description="beta")] = 0.9,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum")] = False,
) -> Momentum:
    """The server momentum of FedAvgM."""
    if nesterov and momentum == 0:
        raise ConfigError("nesterov needs a momentum above 0", where="nesterov")
    return Momentum(lr, momentum, nesterov)


SERVERS = Registry(
    "server step",
    {
        "plain": Entry("fedlens.aggregate.server_steps:plain", "plain server SGD: w - lr * update"),
        "momentum": Entry(
            "fedlens.aggregate.server_steps:momentum", "FedAvgM's server momentum, plain or Nesterov"
        ),
        "adagrad": Entry(
            "fedlens.aggregate.adaptive_server_steps:adagrad", "FedAdagrad's step, a rate for every weight"
        ),
        "adam": Entry("fedlens.aggregate.adaptive_server_steps:adam", "FedAdam's step"),
        "yogi": Entry("fedlens.aggregate.adaptive_server_steps:yogi", "FedYogi's step"),
    },
)
