"""The operation of averaging algorithms: trains the global model on a client's data, and sends its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.base.profiling import scope, scoped
from fedlens.base.threads import first
from fedlens.core.arithmetic import gradients_of
from fedlens.core.device_copies import uploaded
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, ModelSpec, Outcome, Payload
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.schema import AskedField, Field, NumberField, Schema, TreeField
from fedlens.core.step_counts import steps_of
from fedlens.core.tree import Tree, TreeSpec, part
from fedlens.core.wire.asked_fields import RowField
from fedlens.local.class_counts import class_counts
from fedlens.local.features import ModelFeatures
from fedlens.local.hook_checks import watching
from fedlens.local.optimizers import (
    Leafwise,
    OptimizerState,
    WeightReused,
    clip,
    forgo,
    heavy,
    leafwise,
    optimizer,
)
from fedlens.local.personal_leaves import PERSONAL, own_leaves
from fedlens.local.problem import LocalProblem
from fedlens.local.rate_scales import learner_scales
from fedlens.local.rules import ClientRule, LocalContext, Solved, Tensors
from fedlens.local.settings import LocalSettings
from fedlens.tasks.task import Task

Weighting = Literal["examples", "uniform"]
FOREVER = 2**31  # rounds of a run whose number nobody has said


@dataclass(frozen=True)
class Train:
    """Local training.

    Payload: `model`, the global tree; `varied`, if its shapes are not those of the first one (`ModelSpec.of`); `lr`;
    `schedule`, the round and the number of rounds, if the rate changes with every step; for a straggler `work` (epochs,
    or steps if the settings use steps); and `positions`, int64 [n], to train on these of the client's examples only. It
    sends back

    - `update`: w^t - w_k of the trainable weights (Delta w_k of Hsu et al. 2019);
    - `buffers` and `counters`: their values after training;
    - `weight`: the number of examples it trained on, or 1;
    - the fields that the rule's `finish` adds;
    - `tau` if updates are `normalized`: the number of steps that the update was divided by (FedNova).

    Leaves named in `personal` stay at the client, in its state, and are never sent. With `keep_optimizer` the
    optimizer's state is part of the client's state and is used again in the next round.
    """

    model: ModelSpec
    task: Task
    settings: LocalSettings
    rule: ClientRule
    weighting: Weighting = "examples"
    keep_optimizer: bool = False
    normalized: bool = False
    personal: frozenset[str] = frozenset()

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains at one client. Raises `HookError` if a hook of the rule changes its inputs."""
        with watching(self, client.scratch) as train:
            return train._visit(payload, client, rng)

    def _visit(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        learner = loadable(self.model.of(payload), client)
        plain = self.rule.grad is None and self.settings.plain_steps
        if plain and leafwise(learner):
            with suppress(WeightReused), random_state_kept(client.device):
                return self._train(payload, client, rng, leaf_by_leaf=True)
            forgo(learner)
        return self._train(payload, client, rng)

    def _train(self, payload: Payload, client: Client, rng: Rng, leaf_by_leaf: bool = False) -> Outcome:
        with ExitStack() as closing:
            context = self.context(payload, client, rng, closing)
            problem = context.problem
            parameters = list(problem.learner.trainable.values())
            if self.rule.start is not None:
                self.rule.start(context)
            kept = optimizer_state(client.state) if self.keep_optimizer else {}
            if self.rule.solve is not None:
                solved = self._solve(parameters, context)
            else:
                solved = self._steps(parameters, context, rng, kept, leaf_by_leaf)
            trained = [p.detach() for p in parameters]
            if self.rule.finish is None and not self.personal and heavy(problem.learner):
                # The weights are not read any more, so the update is computed in their memory.
                trained = problem.learner.give()
                update = [torch.sub(w, p, out=p) for w, p in zip(context.anchor, trained, strict=True)]
            else:
                update = list(torch._foreach_sub(context.anchor, trained))
            limited = limited_together(self.rule, [leaf.unsqueeze(0) for leaf in update], payload)
            alone = {name: values[0] for name, values in limited.items()}
            outcome = self.outcome(client, context, trained, context.tree(update), solved, kept, alone)
            # A rule that sends another update instead may reuse its memory.
            own = {id(tensor) for tensor in update}
            donated = self.normalized or all(id(t) in own for t in outcome.payload["update"].values())
            return outcome._replace(donated=frozenset({"update"} if donated else ()))

    def outcome(
        self,
        client: Client,
        context: LocalContext,
        parameters: Tensors,
        update: Tree,
        solved: Solved,
        kept: OptimizerState | None = None,
        limited: Mapping[str, float] = MappingProxyType({}),
    ) -> Outcome:
        """The reply and the new state of a trained client.

        Args:
            client: the client.
            context: the context of the rule's hooks.
            parameters: the trained weights; only a rule with `finish` uses them.
            update: anchor - weights.
            solved: loss, examples and batches of its steps or its solver.
            kept: the state of the optimizer.
            limited: fields that the rule's `limit` adds to the reply.

        Raises `HookError` if `finish` sends an update in place of one that `limit` has made smaller.
        """
        problem, more, changes = context.problem, dict[str, Any](limited), None
        if self.rule.finish is not None:
            found, changes = self.rule.finish(parameters, context)
            if "update" in found and self.rule.limit is not None:
                raise HookError(
                    f"{self.rule.called} limits the norm of updates, and `finish` sends another update",
                    hint="declare traits=Traits(replaces_update=True), and leave `limit` out",
                )
            more.update(found)
        reply = self._reply(problem.learner, update, more, context, len(problem.data))
        state = self._state(client.state, changes, problem.learner, kept or {})
        # A solver reports the total number of its batches.
        batches = solved.batches + (problem.seen if self.rule.solve is None else 0)
        sums = {"examples": solved.examples, "batches": batches}
        loss = {} if solved.loss is None else {"loss": solved.loss * solved.examples}
        return Outcome(reply, state, {**solved.sums, **loss, **sums})

    def context(
        self, payload: Payload, client: Client, rng: Rng, closing: ExitStack, load: bool = True
    ) -> LocalContext:
        """The context of the rule's hooks at this client; loads the model if it is not loaded."""
        if len(client.data) == 0:
            raise ValueError("the client holds no example")
        data = virtual(client.data, self.settings.examples, rng)
        if "positions" in payload:
            data = data.take(payload["positions"])
        learner = loadable(model := self.model.of(payload), client)
        tree = {**payload["model"], **own_leaves(model, self.personal, client)}
        if load:
            learner.load(tree)
        steps = self.settings.steps_at(len(data), payload.get("work"))
        rates = self.settings.rates(payload, steps)
        lr = sum(rates) / steps if rates else payload["lr"]
        context = LocalContext(
            list(learner.trainable),
            [tree[name] for name in learner.trainable],
            payload,
            client.state,
            lr,
            steps,
            self.settings,
            proximal=self.rule.traits.proximal,
            rate_factors=[rate / lr if lr else 1.0 for rate in rates],
            scales=learner_scales(self.settings, learner),
        )
        batch = self.settings.batch(len(data))
        weights = self.task.client_weights(partial(class_counts, self.task, client, self.model.classes))
        loss = self.task.loss
        if weights is not None:
            loss = partial(loss, weights=uploaded(weights.to(context.anchor[0].dtype), client.device))
        risk = partial(_risk, self.rule, context) if self.rule.risk else loss
        context.problem = LocalProblem(
            model,
            client,
            learner,
            tree,
            data,
            risk,
            loss,
            batch,
            closing,
            self.task,
            rng=rng,
            drop_last=self.settings.last_batch == "drop",
        )
        return context

    def _solve(self, parameters: list[Tensor], context: LocalContext) -> Solved:
        assert self.rule.solve is not None
        solved = self.rule.solve(context)
        with torch.no_grad():
            for parameter, value in zip(parameters, solved.parameters, strict=True):
                parameter.copy_(value)
        return solved

    def _steps(
        self,
        parameters: list[Tensor],
        context: LocalContext,
        rng: Rng,
        kept: OptimizerState,
        leaf_by_leaf: bool = False,
    ) -> Solved:
        """The training loop."""
        settings, rule, problem = self.settings, self.rule, context.problem
        step = optimizer(settings, kept)
        scales = context.scales
        descend = Leafwise(parameters, context.lr, problem.closing, scales) if leaf_by_leaf else None
        # The same memory, detached, so that autograd allows changes in place.
        weights = [p.detach() for p in parameters]
        module = problem.learner.module
        module.train()
        losses: list[Tensor] = []
        counts: list[int] = []
        twin = problem.twin("anchor") if rule.traits.anchored else None
        trees = rule.references(context) if rule.references is not None else {}
        looking = ModelFeatures(context, trees) if trees else None
        taken = steps_of(problem.client.scratch)
        taken.begin(context.steps)
        for at, (inputs, targets) in enumerate(scoped("data", self._batches(context, rng))):
            context.batch, lr = (inputs, targets), context.rate(at)
            if twin is not None:
                with scope("rule"):
                    context.at_anchor = _replayed(twin, problem, context.batch)
            with scope("forward"):
                outputs = self.task.outputs(module, inputs, targets)
                loss = problem.task_loss(outputs, targets)
            with scope("rule"):
                objective = loss if rule.risk is None else rule.risk(outputs, targets, context)
                if looking is not None:
                    context.features = looking.take(inputs, targets)
                if rule.loss is not None:
                    objective = rule.loss(objective, outputs, targets, context)
            losses.append(loss.detach())
            counts.append(len(targets))
            taken.done += 1
            if descend is not None:
                descend.lr = lr
                with scope("backward"):
                    descend(objective)
            else:
                with scope("backward"):
                    gradients = gradients_of(objective, parameters, problem.learner.autocast_dtype)
                if rule.grad is not None:
                    with scope("rule"):
                        gradients = rule.grad(gradients, weights, context)
                with scope("optimizer"):
                    if settings.clip_norm is not None:
                        gradients = clip(gradients, settings.clip_norm)
                    step(weights, gradients, [lr * scale for scale in scales] if scales else lr)
                del gradients
            del outputs, loss, objective  # otherwise they are in memory together with those of the next step
        seen = sum(counts)
        each = torch.stack(losses).cpu().double()  # not every device has float64
        mean = float(each @ torch.tensor(counts, dtype=torch.float64)) / seen
        return Solved(weights, mean, seen, context.steps)

    def _batches(self, context: LocalContext, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        problem = context.problem
        batches = problem.data.batches(problem.batch, rng, problem.drop_last)
        return first(batches, context.steps, problem.closing)

    def _reply(
        self,
        learner: Loadable,
        update: Mapping[str, Tensor],
        more: Mapping[str, Any],
        context: LocalContext,
        examples: int,
    ) -> dict[str, Any]:
        sent = more.get("update", update)
        if self.personal:
            sent = {name: value for name, value in sent.items() if name not in self.personal}
        reply = {
            "buffers": self._copies(learner, "buffer"),
            "counters": self._copies(learner, "counter"),
            "weight": float(examples) if self.weighting == "examples" else 1.0,
            **more,
        }
        if self.normalized:
            tau = effective_steps(self.settings, context.lr, context.steps, context.proximal)
            sent = {name: value / tau for name, value in sent.items()}
            reply["tau"] = tau
        return {"update": sent, **{k: v for k, v in reply.items() if k != "update"}}

    def _copies(self, learner: Loadable, role: Literal["buffer", "counter"]) -> dict[str, Tensor]:
        names = learner.buffers if role == "buffer" else learner.counters
        return {name: learner.rest[name].clone() for name in names if name not in self.personal}

    def _state(
        self, before: Payload, changes: Payload | None, learner: Loadable, kept: OptimizerState
    ) -> Payload | None:
        new: dict[str, Any] = dict(changes or {})
        if self.personal:
            leaves = {**learner.trainable, **learner.rest}
            new[PERSONAL] = {n: leaves[n].detach().clone() for n in leaves if n in self.personal}
        if self.keep_optimizer:
            new["optimizer"] = kept
        return {**before, **new} if new or changes is not None else None

    def expect(self, spec: TreeSpec, most: float) -> Schema:
        """The schema of a valid reply of this operation, for clients of at most `most` examples."""
        sent = {name: leaf for name, leaf in spec.items() if name not in self.personal}
        most = float(self.settings.examples or most) if self.weighting == "examples" else 1.0
        fields: dict[str, Field] = {
            "update": TreeField.weights(sent),
            "buffers": TreeField.like({n: sent[n] for n in part(sent, "buffer")}),
            "counters": TreeField.like({n: sent[n] for n in part(sent, "counter")}),
            "weight": NumberField(above=0, most=most),
        }
        if self.normalized:
            fields["tau"] = NumberField(above=0)
        if self.rule.expect is not None:
            fields |= self.rule.expect(sent)
        return Schema(fields, metrics=self.rule.metrics, bounded=self.rule.limit is None)


def asked_rate(settings: LocalSettings, rounds: int | None) -> dict[str, AskedField]:
    """The fields of `LocalSettings.shared_rate`: a rate of at most `local.lr`, in a round of the run."""
    last = rounds or FOREVER
    round, all_rounds = (NumberField(above, last, whole=True) for above in (0, rounds - 1 if rounds else 0))
    rate: dict[str, AskedField] = {"lr": NumberField(above=0, most=settings.lr)}
    return {**rate, "schedule": RowField((round, all_rounds))} if settings.changes_by_step else rate


_PIECE = 1 << 16  # numbers at a time, which stay in a processor's cache


def limited_together(rule: ClientRule, updates: Tensors, payload: Payload) -> dict[str, list[float]]:
    """Multiplies the updates of A clients, [A, ...] each leaf, in place as the rule's `limit` says.

    Norms are computed in float64. Returns what the hook adds to each reply, by name.

    >>> rule = ClientRule(limit=lambda norms, payload: (1 / norms, {"norm": norms}))
    >>> update = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
    >>> limited_together(rule, [update], {}), update
    ({'norm': [5.0, 0.5]}, tensor([[0.6000, 0.8000],
            [0.0000, 1.0000]]))
    """
    if rule.limit is None:
        return {}
    norms = torch.stack([norm for leaf in _few(updates) for norm in _norms_of(leaf)]).norm(dim=0)
    factors, fields = rule.limit(norms, payload)
    if len(factors) == 1:
        torch._foreach_mul_(updates, float(factors))
    else:
        for leaf in updates:
            leaf.mul_(factors.to(leaf.dtype).view(-1, *[1] * (leaf.dim() - 1)))
    return {name: values.tolist() for name, values in fields.items()}


def _few(updates: Tensors) -> Tensors:
    """The leaves as [A, n], the small ones joined: each costs some operations."""
    flat = [leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None] for leaf in updates]
    small = [leaf for leaf in flat if leaf.numel() <= _PIECE]
    joined = [torch.cat(small, 1)] if len(small) > 1 else small
    return [*joined, *(leaf for leaf in flat if leaf.numel() > _PIECE)]


def _norms_of(leaf: Tensor) -> Iterator[Tensor]:
    """The norms of the pieces of [A, n], each float64 [A]."""
    for piece in torch.split(leaf, max(1, _PIECE // len(leaf)), 1):
        yield piece.double().square_().sum(1).sqrt_()


def virtual(data: Any, examples: int | None, rng: Rng) -> Any:
    """The examples of a virtual client (hsu2020 section 5.3): `examples` of the client's own, drawn anew each round.

    Drawn uniformly, without replacement if it has enough, in the order of the client's examples.
    """
    if examples is None:
        return data
    draw, n = rng.torch("virtual"), len(data)
    if n >= examples:
        at = torch.randperm(n, generator=draw)[:examples]
    else:
        at = torch.randint(n, (examples,), generator=draw)
    return data.take(at.sort().values)


def _risk(rule: ClientRule, context: LocalContext, outputs: Tensor, targets: Tensor) -> Tensor:
    assert rule.risk is not None
    return rule.risk(outputs, targets, context)


def _replayed(twin: Loadable, problem: LocalProblem, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of the batch at the anchor, with the dropout masks that the step will draw."""
    problem.seen += 1
    twin.module.train()
    inputs, targets = batch
    with random_state_kept(problem.client.device):
        risk = problem.risk(problem.task.outputs(twin.module, inputs, targets), targets)
        return gradients_of(risk, list(twin.trainable.values()), twin.autocast_dtype)


def optimizer_state(state: Payload) -> OptimizerState:
    """The optimizer's state in a client's state, copied, so that steps may change it; empty if there is none."""
    kept = state.get("optimizer", {}).items()
    # Adam reads its number of steps in each step; on the CPU this needs no synchronization.
    return {name: [t.cpu().clone() if t.dim() == 0 else t.clone() for t in ts] for name, ts in kept}


def effective_steps(settings: LocalSettings, lr: float, steps: int, proximal: float = 0.0) -> float:
    """||a||_1 of Wang et al. 2020 (arXiv 2007.07481): a client's update is lr sum_t a_t g_t over its gradients g_t.

    For plain SGD it is the number of steps. With momentum m (section 4), a_t = (1 - m^(K - t)) / (1 - m); with a
    proximal term, a_t = (1 - lr mu)^(K - 1 - t). Both together, and Nesterov's momentum, follow from the same linear
    recursion: it is applied to a single gradient of 1, and its value after j steps is a_(K - j).

    >>> local = LocalSettings(lr=0.1, momentum=0.5)
    >>> effective_steps(local, 0.1, 3)  # 1 + 1.5 + 1.75
    4.25
    >>> effective_steps(LocalSettings(lr=0.1), 0.1, 2, proximal=1.0)
    1.9
    """
    momentum, nesterov = settings.momentum, settings.nesterov
    moved, velocity, total = 0.0, 0.0, 0.0
    for step in range(steps):
        gradient = (1.0 if step == 0 else 0.0) - lr * proximal * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if nesterov else velocity
        total += abs(moved)
    return total
