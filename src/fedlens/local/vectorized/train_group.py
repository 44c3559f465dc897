"""Local training of several clients as one computation: their weights are stacked along a client axis.

The results agree with training one client after the other, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import HookError, out_of_memory
from fedlens.base.interrupts import from_code
from fedlens.core.calls import Calls, StackedOutcomes
from fedlens.core.device_copies import downloaded, uploaded
from fedlens.core.modules import loadable
from fedlens.core.protocol import Call, GroupExamples, Outcome
from fedlens.core.random import Rng
from fedlens.core.stacked import Column, StackedRow, StackedTrees
from fedlens.core.tree import Tree
from fedlens.local.hook_checks import watching
from fedlens.local.rate_scales import learner_scales
from fedlens.local.rules import LocalContext, Solved, Tensors
from fedlens.local.training import Train, limited_together, virtual
from fedlens.local.vectorized.batches import Group, stretches
from fedlens.local.vectorized.model import StackedModel
from fedlens.local.vectorized.objectives import Objectives
from fedlens.local.vectorized.stack import mask_generator
from fedlens.local.vectorized.steps import Steps, gradients


@dataclass
class _Member:
    """One client of a group: its index in the calls, and the context that the rule's hooks see."""

    at: int
    call: Call
    context: LocalContext
    masks: torch.Generator | None = None


Results = dict[int, Outcome | BaseException]


def train_together(train: Train, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
    """Local training of several clients, like `Train` for one.

    A client that fails has its exception in its place. Raises what the common computation raises.
    """
    return _in_columns(train, calls) or _by_kind(train, calls, partial(_trained, train))


def gradients_together(
    train: Train, calls: Sequence[Call], reply: Callable[[LocalContext, Tree], Outcome]
) -> list[Outcome | BaseException]:
    """Replies with the gradient of each client's objective over all its examples; failures as in `train_together`."""
    return _by_kind(train, calls, partial(_gradient_replies, train, reply))


def _by_kind(
    train: Train, calls: Sequence[Call], work: Callable[[StackedModel, list[_Member]], Results]
) -> list[Outcome | BaseException]:
    """Calls the work for each set of clients with the same model and rate, which may be all of them."""
    results: Results = {}
    made: dict[int, Call] = {}
    kinds: dict[Any, list[int]] = {}
    for at in range(len(calls)):
        try:
            made[at] = calls[at]
        except BaseException as error:
            results[at] = _failure(error)
        else:
            payload = made[at].payload
            kind = id(payload.get("model")), id(payload.get("varied")), payload.get("lr")
            kinds.setdefault(kind, []).append(at)
    for members_of in kinds.values():
        payload, client, _ = made[members_of[0]]
        learner = loadable(train.model.of(payload), client)
        learner.load(payload["model"])
        with ExitStack() as closing:
            members = []
            for at in members_of:
                try:
                    call = made[at]
                    context = train.context(call.payload, call.client, call.rng, closing, load=False)
                    members.append(_Member(at, call, context))
                except BaseException as error:
                    results[at] = _failure(error)
            if members:
                results |= work(StackedModel(learner, client.scratch, train.task), members)
    return [results[at] for at in range(len(calls))]


def _in_columns(train: Train, calls: Sequence[Call]) -> StackedOutcomes | None:
    """Training without hooks but `limit`, of clients with the same model and rate, without an object per client.

    None for any other training, and if a client fails: `_by_kind` reports which.
    """
    special = train.normalized or train.personal or train.keep_optimizer or not train.rule.steps_plainly
    special = special or train.settings.changes_by_step
    if (
        special
        or not isinstance(calls, Calls)
        or any({"model", "varied", "lr"} & own.keys() for own in calls.payloads)
    ):
        return None
    examples = _examples(train, calls)
    if examples is None or not all(examples.counts):
        return None
    settings, counts = train.settings, examples.counts
    kinds = [(n, own.get("work")) for n, own in zip(counts, calls.payloads, strict=True)]
    steps_of = {kind: settings.steps_at(*kind) for kind in set(kinds)}
    size_of = {n: settings.batch(n) for n in set(counts)}
    order = sorted(range(len(calls)), key=lambda k: -steps_of[kinds[k]])
    tree = calls.shared["model"]
    learner = loadable(train.model.of(calls.shared), calls[0].client)
    learner.load(tree)
    model = StackedModel(learner, calls.scratch, train.task)
    rngs = [calls.rng(k) for k in order]
    group = Group(
        list(learner.trainable),
        [tree[name] for name in learner.trainable],
        calls.shared["lr"],
        examples.reordered(order),
        [size_of[counts[k]] for k in order],
        [steps_of[kinds[k]] for k in order],
        rngs,
        [mask_generator(rng, calls.device) for rng in rngs] if model.random else [None] * len(rngs),
        settings.last_batch == "drop",
        scales=learner_scales(settings, learner),
    )
    updates, losses, _ = _moved(train, model, group)
    by_examples = train.weighting == "examples"
    payload: dict[str, Column] = {
        "update": updates,
        "buffers": {name: learner.rest[name].clone() for name in learner.buffers},
        "counters": {name: learner.rest[name].clone() for name in learner.counters},
        "weight": [float(counts[k]) if by_examples else 1.0 for k in order],
        **limited_together(train.rule, list(updates.leaves.values()), calls.shared),
    }
    metrics: dict[str, Sequence[float]] = {
        "loss": [mean * seen for mean, seen in losses],
        "examples": [seen for _, seen in losses],
        "batches": group.steps,
    }
    rows = [0] * len(order)  # the row of each call
    for row, k in enumerate(order):
        rows[k] = row
    return StackedOutcomes(payload, metrics, rows)


def _examples(train: Train, calls: Calls) -> GroupExamples | None:
    """The examples of all clients, to be read together; None if that is not possible."""
    try:
        if train.settings.examples is None:
            return calls.program.data.group(calls.clients)
        first, *others = [virtual(call.client.data, train.settings.examples, call.rng) for call in calls]
        together: GroupExamples | None = first.group(others)
        return together
    except Exception:
        return None


def _moved(
    train: Train, model: StackedModel, group: Group
) -> tuple[StackedTrees, list[tuple[float, int]], Tensors]:
    """Runs the steps: the update of each client, its mean loss and number of examples, and its weights."""
    trained, losses = Steps(train, model, group).run()
    # The update reuses the memory of weights that no hook reads any more.
    moved = [
        torch.sub(anchor, now, out=now) if train.rule.steps_plainly else anchor - now
        for anchor, now in zip(group.anchor, trained, strict=True)
    ]
    return StackedTrees(dict(zip(group.names, moved, strict=True))), losses, trained


def _gradient_replies(
    train: Train, reply: Callable[[LocalContext, Tree], Outcome], model: StackedModel, members: list[_Member]
) -> Results:
    contexts = [member.context for member in members]
    gradients = full_gradients(train, model, contexts, [member.call.rng for member in members])
    for context in contexts:
        context.problem.seen += context.problem.passes()
    return {m.at: reply(m.context, gradient) for m, (gradient, _) in zip(members, gradients, strict=True)}


def _trained(train: Train, model: StackedModel, members: list[_Member]) -> Results:
    with watching(train, members[0].call.client.scratch) as watched:
        return _started_and_trained(watched, model, members)


def _started_and_trained(train: Train, model: StackedModel, members: list[_Member]) -> Results:
    failed = _started(train, model, members) if train.rule.start is not None or model.random else {}
    ready = [member for member in members if member.at not in failed]
    ready.sort(key=lambda member: -member.context.steps)
    # `start` may have changed some; rates that change with every step are equal if the numbers of steps are.
    rates: dict[tuple[float, int], list[_Member]] = {}
    for member in ready:
        steps = member.context.steps if train.settings.changes_by_step else 0
        rates.setdefault((float(member.context.lr), steps), []).append(member)
    results = failed
    for members in rates.values():
        results |= _train(train, model, members)
    return results


def _started(train: Train, model: StackedModel, members: Sequence[_Member]) -> Results:
    """Calls the rule's `start` at each client and keeps the state of its random generator; returns the failures."""
    failed: Results = {}
    changed = False
    shared = SharedGradients(train, model, [m.context for m in members], [m.call.rng for m in members])
    for k, member in enumerate(members):
        device = member.call.client.device
        torch.default_generator.manual_seed(member.call.rng.seed("torch"))
        if device.type == "cuda":
            torch.cuda.manual_seed(member.call.rng.seed("torch"))
        try:
            if train.rule.start is not None:
                member.context.problem.shared = partial(shared.of, k)
                anchor = list(member.context.anchor)
                train.rule.start(member.context)
                member.context.problem.shared = None
                changed = changed or [id(v) for v in member.context.anchor] != [id(v) for v in anchor]
        except BaseException as error:
            failed[member.at] = _failure(error)
        if model.random:
            member.masks = torch.Generator(device)
            member.masks.set_state(
                torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            )
    if changed:
        raise HookError(
            f"`start` of {train.rule.called} replaces its input context.anchor",
            hint="save what the rule needs in context.saved",
        )
    return failed


def _train(train: Train, model: StackedModel, members: Sequence[_Member]) -> Results:
    results: Results = {}
    contexts = [member.context for member in members]
    rngs, masks = [member.call.rng for member in members], [member.masks for member in members]
    updates, losses, trained = _moved(train, model, Group.of(contexts, rngs, masks))
    # Split into clients only for a rule that reads them.
    ends = list(zip(*trained, strict=True)) if train.rule.finish is not None else [()] * len(members)
    limited = limited_together(train.rule, list(updates.leaves.values()), contexts[0].payload)
    for row, (member, loss, end, update) in enumerate(
        zip(members, losses, ends, updates.rows(), strict=True)
    ):
        solved = Solved([], loss[0], loss[1], member.context.steps)
        own = {name: values[row] for name, values in limited.items()}
        try:
            results[member.at] = train.outcome(
                member.call.client, member.context, list(end), update, solved, limited=own
            )
        except BaseException as error:
            results[member.at] = _failure(error)
    return results


def _failure(error: BaseException) -> BaseException:
    """A client's failure; raises the error if memory ran out, if a hook breaks a rule, or if the user stops the run."""
    if out_of_memory(error) or isinstance(error, HookError) or not from_code(error):
        raise error
    return error


def full_gradients(
    train: Train, model: StackedModel, contexts: Sequence[LocalContext], rngs: Sequence[Rng]
) -> list[tuple[StackedRow, float]]:
    """Each client's gradient at the initial weights of training, and the mean of the task's loss there."""
    order = sorted(range(len(contexts)), key=lambda k: -contexts[k].problem.passes())
    contexts, rngs = [contexts[k] for k in order], [rngs[k] for k in order]
    anchor = contexts[0].anchor
    total = [
        torch.zeros(len(contexts), *value.shape, dtype=value.dtype, device=value.device) for value in anchor
    ]
    objectives = Objectives(train.rule)
    means: list[Tensor] = []
    shares: list[Tensor] = []
    sizes = torch.tensor([len(context.problem.data) for context in contexts], dtype=torch.float64)
    # The clients' generators before the first draw.
    masks = [mask_generator(rng, anchor[0].device) for rng in rngs] if model.random else []
    with model.ready(masks) as drawn:
        for batch in stretches(contexts, anchor[0]):
            drawn.begin(batch.counts, batch.inputs.shape[1])
            active = len(batch.counts)
            weights = [value.expand(active, *value.shape) for value in anchor]
            losses, slopes = gradients(train, model, weights, batch, contexts[:active], objectives)
            means.append(losses)
            shares.append(torch.tensor(batch.counts, dtype=torch.float64) / sizes[:active])
            share = uploaded(shares[-1], losses.device)
            parts = [g * share.to(g).view(-1, *[1] * (g.dim() - 1)) for g in slopes]
            torch._foreach_add_([own[:active] for own in total], parts)
    loss = torch.zeros(len(contexts), dtype=torch.float64)
    for share, mean in zip(shares, downloaded(means), strict=True):
        loss[: len(share)] += share * mean
    rows = StackedTrees(dict(zip(contexts[0].names, total, strict=True))).rows()
    done = dict(zip(order, zip(rows, loss.tolist(), strict=True), strict=True))
    return [done[k] for k in range(len(order))]


class SharedGradients:
    """The full gradients that rules request before the first step; the first request computes all of them."""

    def __init__(
        self, train: Train, model: StackedModel, contexts: Sequence[LocalContext], rngs: Sequence[Rng]
    ) -> None:
        self.train, self.model, self.contexts, self.rngs = train, model, contexts, rngs
        self.gradients: dict[int, tuple[StackedRow, float]] | None = None

    def of(self, at: int) -> tuple[Tensors, float] | None:
        """The gradient and the loss of client `at`; None if they cannot be computed together."""
        if self.gradients is None:
            try:
                every = full_gradients(self.train, self.model, self.contexts, self.rngs)
            except Exception as error:  # computing one client at a time shows whose error it is
                if out_of_memory(error) or isinstance(error, HookError):
                    raise
                every = []
            self.gradients = dict(enumerate(every))
        if at not in self.gradients:
            return None
        row, loss = self.gradients[at]
        return list(row.values()), loss
