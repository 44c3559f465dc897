"""The parts of a model in split learning, as operations: the first layers at a client, the others at the server.

A step is two operations at a client: `Lower` of one step ends with a forward pass, and that of the next begins with its
backward pass. What is in between, the weights of the part and its optimizer, is the state of its holder. The graph of
the forward pass stays in the worker as a cache. Without it the pass is computed again from the same state, with the
same batch and the same random numbers, so the result does not depend on the cache.

With two cuts the client has the last layers too, so that labels stay there: the server's `Middle` has a forward and a
backward pass, and `Upper` runs at the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedlens.core.arithmetic import gradients_of
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, Letter, ModelSpec, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TreeField
from fedlens.core.tree import TreeSpec, copied, part, select
from fedlens.local.optimizers import OptimizerState, optimizer
from fedlens.local.settings import LocalSettings
from fedlens.tasks.task import Task


@dataclass(frozen=True)
class Pass:
    """One forward pass of a half, with its graph.

    Attributes:
        weights: the trainable weights, leaves of the graph.
        rest: buffers and counters after the pass.
        inputs: what the half was given, a leaf of the graph if it came in a letter.
        outputs: what the half computes.
        targets: those of the batch.
    """

    weights: dict[str, Tensor]
    rest: dict[str, Tensor]
    inputs: Tensor
    outputs: Any
    targets: Any = None


@dataclass(frozen=True)
class Half:
    """One half in training. Its holder's state has `tree`, the leaves of its halves, and `optimizer`, by their names.

    Payload of every operation: `step`, from 0; `lr`, and `schedule` if the rate changes with every step; in step 0
    `model`, the leaves that it starts from, and `optimizer`, a flat tree, if that starts from another one's.

    Attributes:
        name: which one.
        model: the half.
        settings: the local settings.
        factor: of the learning rate.
        keep_optimizer: whether the optimizer goes on in the next round.
    """

    name: str
    model: ModelSpec
    settings: LocalSettings
    factor: float = 1.0
    keep_optimizer: bool = False

    @cached_property
    def leaves(self) -> list[str]:
        """The names of the leaves that are sent."""
        return [name for name in self.model.leaves if name not in self.model.fixed]

    def begun(self, payload: Payload, client: Client) -> Payload:
        """The state at the beginning of the operation."""
        if "model" not in payload:
            return client.state
        kept = client.state.get("optimizer", {}) if self.keep_optimizer else {}
        if "optimizer" in payload:
            kept = _nested(payload["optimizer"])
        return {"tree": payload["model"], "optimizer": kept}

    def forward(self, state: Payload, client: Client, inputs: Tensor, rng: Rng, targets: Any = None) -> Pass:
        """The forward pass of a batch in training mode, which leaves the state and the worker's module alone."""
        learner = loadable(self.model, client)
        if not learner.module.training:  # sets every layer, which takes long in a step
            learner.module.train()
        # Of its own: the graph outlives the operation, and the memory of the state does not. In the module's layout:
        # another one takes other kernels.
        own = {
            n: torch.empty_like(v).copy_(state["tree"][n])
            for n, v in {**learner.trainable, **learner.rest}.items()
        }
        weights = {n: own[n].requires_grad_() for n in learner.trainable}
        rest = {n: own[n] for n in learner.rest}
        rng.seed_torch(client.device)  # for dropout, the same again if the pass is repeated
        outputs = functional_call(learner.module, {**weights, **rest}, (inputs,))
        return Pass(weights, rest, inputs, outputs, targets)

    def backward(
        self, done: Pass, gradient: Tensor, client: Client, also: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The gradients of the tensors `also` and of the weights, from that of the outputs."""
        inputs, dtype = [*also, *done.weights.values()], self.learner(client).autocast_dtype
        if gradient.stride() != done.outputs.stride():  # other kernels give other bits
            gradient = torch.empty_like(done.outputs).copy_(gradient)
        if dtype is torch.float16:  # scaled
            return gradients_of((done.outputs * gradient).sum(), inputs, dtype)
        return list(
            torch.autograd.grad(done.outputs, inputs, gradient, allow_unused=True, materialize_grads=True)
        )

    def stepped(
        self, state: Payload, done: Pass, gradients: list[Tensor], payload: Payload, steps: int
    ) -> Payload:
        """The state after a step of the optimizer with these gradients of the weights, which uses the pass up."""
        rates = self.settings.rates(payload, steps)
        lr = rates[payload["step"]] if rates else payload["lr"]
        weights = {name: value.detach() for name, value in done.weights.items()}
        kept = copied(state["optimizer"].get(self.name, {}))
        optimizer(self.settings, kept)(list(weights.values()), gradients, lr * self.factor)
        tree = {**state["tree"], **done.rest, **weights}
        return {**state, "tree": tree, "optimizer": {**state["optimizer"], self.name: kept}}

    def learner(self, client: Client) -> Loadable:
        """The half in this worker."""
        return loadable(self.model, client)

    @cached_property
    def optimizer_leaves(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The leaves of the optimizer's state after a step, as a flat tree."""
        spec = self.model.leaves
        weights = [
            torch.zeros(spec[n].shape, dtype=spec[n].dtype) for n in part(spec, "weight", trainable=True)
        ]
        kept: OptimizerState = {}
        optimizer(self.settings, kept)(weights, weights, 0.0)
        return {name: (tuple(value.shape), value.dtype) for name, value in _flat({self.name: kept}).items()}


def _flat(kept: Mapping[str, OptimizerState]) -> dict[str, Tensor]:
    return {
        f"{half}.{kind}.{at}": value
        for half, kinds in kept.items()
        for kind, values in kinds.items()
        for at, value in enumerate(values)
    }


def _nested(tree: Mapping[str, Tensor]) -> dict[str, OptimizerState]:
    kept: dict[str, OptimizerState] = {}
    for name, value in tree.items():
        half, kind, _ = name.split(".")
        kept.setdefault(half, {}).setdefault(kind, []).append(value)
    return kept


def cache_pass(client: Client, node: Rng, at: int, found: Any) -> None:
    """Keeps what a forward pass has computed in this worker, and drops what is left of earlier rounds."""
    kept = client.scratch.setdefault("split", {})
    for other in [k for k, (of, _, _) in kept.items() if of.key[2] != node.key[2]]:
        del kept[other]  # of a client that failed
    kept[client.id] = node, at, found


def cached_pass(client: Client, node: Rng, at: int) -> Any:
    """What `cache_pass` has kept, or None on another worker; it is dropped."""
    of, step, found = client.scratch.get("split", {}).pop(client.id, (None, None, None))
    return found if (of, step) == (node, at) else None


@dataclass(frozen=True)
class Lower:
    """A client's part of a step: the backward pass and the optimizer of the step before, then a forward pass.

    With `own_holder` the activations of client K go to "@server:K", else to "@server". The letter has `activations`
    [B, ...] and, if it `sends_targets`, `targets`; else the state has them. The answer, a letter with `gradient`
    [B, ...], comes with the next call. In the one after the last step it sends none. A letter in step 0 has what the
    half starts from, instead of the payload.
    """

    half: Half
    own_holder: bool
    sends_targets: bool
    dtype: torch.dtype  # of the activations that are sent

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """One step. Raises `ValueError` without an example, a first model, or the gradient of the step before."""
        if not len(client.data):
            raise ValueError("the client holds no example")
        at, node = payload["step"], rng.of_client()
        given = payload["letters"][0][1] if not at and payload["letters"] else payload
        if not at and "model" not in given:
            raise ValueError("step 0 has no weights to start from")
        state = self.half.begun(given, client)
        steps = self.half.settings.steps_at(len(client.data))
        if at:
            state = self._backward(state, client, node, payload, steps)
        if at == steps:
            return Outcome({}, state)
        done = self._forward(state, client, node, at)
        cache_pass(client, node, at, done)
        content = {"activations": done.outputs.detach().to(self.dtype)}
        if self.sends_targets:
            content["targets"] = done.targets
        else:
            state = {**state, "targets": done.targets}
        letter = Letter(holder_of(client.id, self.own_holder), content)
        return Outcome({}, state, {"batches": 1.0}, letters=[letter])

    def _forward(self, state: Payload, client: Client, node: Rng, at: int) -> Pass:
        rng = node.child("step", at)
        inputs, targets = client.data.batch(positions(self.half.settings, len(client.data), at, node), rng)
        return self.half.forward(state, client, inputs, rng, targets)

    def _backward(self, state: Payload, client: Client, node: Rng, payload: Payload, steps: int) -> Payload:
        if len(payload["letters"]) != 1:
            raise ValueError(f"step {payload['step']} has no gradient of the step before")
        before = payload["step"] - 1
        done = cached_pass(client, node, before) or self._forward(state, client, node, before)
        gradients = self.half.backward(done, payload["letters"][0][1]["gradient"], client)
        return self.half.stepped(state, done, gradients, {**payload, "step": before}, steps)


@dataclass(frozen=True)
class Upper:
    """The end of a forward pass: forward and backward pass of each letter, and a step of the optimizer.

    Payload besides that of `Half`: `order`, the senders in the order in which their letters are used; `steps`, how many
    steps the round has. Targets come with the letters, or are in the state of the client that it runs at. The letters
    that it sends have `gradient` [B, ...], that of the activations.
    """

    half: Half
    task: Task

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """One step for each letter."""
        state, letters, answers = self.half.begun(payload, client), dict(payload["letters"]), []
        losses = examples = 0.0
        learner = self.half.learner(client)
        for sender in payload["order"]:
            content = letters[sender]
            targets = content["targets"] if "targets" in content else state["targets"]
            node = rng.of_client().child("step", payload["step"], sender)
            done = self.half.forward(
                state, client, received(content["activations"], learner, client), node, targets
            )
            loss = self.task.loss(done.outputs, done.targets)
            inputs = [done.inputs, *done.weights.values()]
            gradient, *gradients = gradients_of(loss, inputs, learner.autocast_dtype)
            state = self.half.stepped(state, done, gradients, payload, payload["steps"])
            answers.append(Letter(sender, {"gradient": gradient}))
            losses, examples = losses + float(loss.detach()) * len(done.targets), examples + len(done.targets)
        # The batches are the clients' (`Lower`).
        return Outcome({}, state, {"loss": losses, "examples": examples}, letters=answers)


@dataclass(frozen=True)
class Middle:
    """The server's part of a step between two cuts: the forward pass of each letter; `back` has the backward pass.

    Payload: that of `Upper`. The letters have `activations` [B, ...], and in `back` `gradient` [B, ...], both ways.
    One half for several clients has the weights from before the step in all of these passes.
    """

    half: Half
    dtype: torch.dtype  # of the activations that are sent

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """The forward passes. The state keeps what they were given."""
        given, learner = dict(payload["letters"]), self.half.learner(client)
        inputs = [
            (sender, received(given[sender]["activations"], learner, client).detach())
            for sender in payload["order"]
        ]
        state = {**self.half.begun(payload, client), "inputs": inputs}
        passes = self._passes(state, payload, client, rng)
        cache_pass(client, rng.of_client(), payload["step"], passes)
        sent = [
            Letter(k, {"activations": done.outputs.detach().to(self.dtype)}) for k, done in passes.items()
        ]
        return Outcome({}, state, letters=sent)

    def _passes(self, state: Payload, payload: Payload, client: Client, rng: Rng) -> dict[Any, Pass]:
        """The pass of each sender; statistics go from one to the next."""
        passes, seen = {}, state
        for sender, inputs in state["inputs"]:
            node = rng.of_client().child("step", payload["step"], sender)
            # The memory of a letter does not outlive the operation.
            own = inputs.detach().clone().requires_grad_()
            done = self.half.forward(seen, client, own, node)
            seen, passes[sender] = {"tree": {**seen["tree"], **done.rest}}, done
        return passes

    def back(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """A backward pass and a step for each letter, in the order of the forward passes."""
        state, letters, answers = client.state, dict(payload["letters"]), []
        passes = cached_pass(client, rng.of_client(), payload["step"]) or self._passes(
            state, payload, client, rng
        )
        for sender, done in passes.items():
            if sender not in letters or letters[sender]["gradient"].shape != done.outputs.shape:
                continue  # it has failed, or will without a gradient
            to_inputs, *own = self.half.backward(done, letters[sender]["gradient"], client, [done.inputs])
            now = {name: state["tree"][name].clone() for name in done.weights}
            state = self.half.stepped(state, replace(done, weights=now), own, payload, payload["steps"])
            answers.append(Letter(sender, {"gradient": to_inputs}))
        return Outcome({}, {k: state[k] for k in ("tree", "optimizer")}, letters=answers)


def received(activations: Tensor, learner: Loadable, client: Client) -> Tensor:
    """The activations of a letter as the half takes them, a leaf of its graph."""
    dtype = next(iter(learner.trainable.values())).dtype
    activations = activations.detach().to(dtype)
    if not client.arithmetic.lays_out(learner.module, client.device):
        # Engines may keep the layout of a letter or not, and dropout draws in the order of the memory.
        activations = activations.contiguous()
    return activations.requires_grad_()


@dataclass(frozen=True)
class Finish:
    """Sends a holder's halves after the round: `weights`, `buffers` and `counters`. The optimizer may stay."""

    halves: tuple[Half, ...]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """The leaves that training has changed."""
        learners, tree = [half.learner(client) for half in self.halves], client.state["tree"]
        sent = {
            "weights": [name for learner in learners for name in learner.trainable],
            "buffers": [name for learner in learners for name in learner.buffers],
            "counters": [name for learner in learners for name in learner.counters],
        }
        kept = {"optimizer": client.state["optimizer"]} if self.halves[0].keep_optimizer else {}
        return Outcome({field: select(tree, names) for field, names in sent.items()}, kept)

    @staticmethod
    def expect(spec: TreeSpec) -> Schema:
        """The schema of its replies."""
        return Schema(
            {
                "weights": TreeField.weights(spec),
                "buffers": TreeField.like({n: spec[n] for n in part(spec, "buffer")}),
                "counters": TreeField.like({n: spec[n] for n in part(spec, "counter")}),
            }
        )


@dataclass(frozen=True)
class Hand:
    """Hands the halves of a client on: their `model`, and their `optimizer` if that is carried.

    Payload: `to`, the client that gets it as a letter, or None, for the server, which gets it in the reply. The state
    stays, in case that the next one fails.
    """

    halves: tuple[Half, ...]
    carry_optimizer: bool

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """The halves as they are."""
        content: dict[str, Any] = {"model": client.state["tree"]}
        if self.carry_optimizer:
            content["optimizer"] = _flat(client.state["optimizer"])
        to = payload["to"]
        return Outcome(content) if to is None else Outcome({}, letters=[Letter(to, content)])

    def expect(self, spec: TreeSpec) -> Schema:
        """The schema of what it hands on, for halves of this spec."""
        leaves = {name: leaf for half in self.halves for name, leaf in half.optimizer_leaves.items()}
        carried = {"optimizer": TreeField(leaves)} if self.carry_optimizer else {}
        return Schema({"model": TreeField.like(spec), **carried})


def forget(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Leaves nothing of the round in a client's state."""
    return Outcome({}, {})


def holder_of(client: Any, own: bool) -> str:
    """Who holds the server's half that answers this client: one of its `own`, or one for all.

    >>> holder_of(3, own=True), holder_of(3, own=False)
    ('@server:3', '@server')
    """
    return f"@server:{client}" if own else "@server"


def positions(settings: LocalSettings, n: int, at: int, node: Rng) -> Tensor:
    """The positions of the examples of step `at` at a client with n examples, int64 [B].

    Epochs are random orders, drawn from `node.child("epoch", e).torch("batches")`, cut into batches.
    """
    size, (epoch, within) = settings.batch(n), divmod(at, settings.batches_at(n))
    return epoch_order(settings, n, epoch, node)[within * size : (within + 1) * size]


def epoch_order(settings: LocalSettings, n: int, epoch: int, node: Rng) -> Tensor:
    """The order of n examples in an epoch, int64 [n]; the given one where a batch holds all."""
    generator = node.child("epoch", epoch).torch("batches")
    return torch.arange(n) if settings.batch(n) >= n else torch.randperm(n, generator=generator)
