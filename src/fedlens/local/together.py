"""Several clients' local training as one computation: their weights stacked along an axis of clients.

Each client takes exactly its own steps over its own batches, in its own order, under its own dropout masks. Batches are
padded to one length with a weight of 0, and clients stand in the order of their steps, the most first, so that those
who still have some are always the first ones. What comes out agrees with one client after the other to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlens.core.arithmetic import gradients_of
from fedlens.core.errors import told
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Call, Outcome
from fedlens.local.optimizers import OptimizerState, optimizer
from fedlens.local.rules import Solved, Tensors, Visit

if TYPE_CHECKING:
    from fedlens.local.training import Train

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass
class _Member:
    """A client of the group: where it stands in the calls, and what the rule's hooks see there."""

    at: int
    call: Call
    visit: Visit
    masks: torch.Generator | None


def train_together(train: Train, calls: Sequence[Call]) -> list[Outcome | Exception]:
    """Local training of several clients, as `Train` does it for one.

    Where a client fails by itself its place holds the exception. Raises whatever the common computation raises.
    """
    kinds: dict[Any, list[int]] = {}
    for at, call in enumerate(calls):
        kinds.setdefault((id(call.payload.get("model")), call.payload.get("lr")), []).append(at)
    if len(kinds) > 1:  # what a request brings itself, a model or a rate, is that client's alone
        found: dict[int, Outcome | Exception] = {}
        for kind in kinds.values():
            found |= dict(zip(kind, train_together(train, [calls[at] for at in kind]), strict=True))
        return [found[at] for at in range(len(calls))]
    results: dict[int, Outcome | Exception] = {}
    with ExitStack() as closing:
        learner = loadable(train.model, calls[0].client)
        learner.load(calls[0].payload["model"])
        dropouts = [m for m in learner.module.modules() if isinstance(m, _DROPOUTS) and m.p > 0]
        members: list[_Member] = []
        for at, call in enumerate(calls):
            try:
                members.append(_begun(train, at, call, closing, bool(dropouts)))
            except (Exception, SystemExit) as error:
                results[at] = _failure(error)
        if members:
            members.sort(key=lambda member: -member.visit.steps)
            trained, losses = _Group(train, learner, members, dropouts).run()
            updates = [anchor - now for anchor, now in zip(members[0].visit.anchor, trained, strict=True)]
            for k, (member, loss) in enumerate(zip(members, losses, strict=True)):
                try:
                    results[member.at] = train.outcome(
                        member.call.client,
                        member.visit,
                        [value[k] for value in trained],
                        [value[k] for value in updates],
                        Solved([], loss[0], loss[1], member.visit.steps),
                    )
                except (Exception, SystemExit) as error:
                    results[member.at] = _failure(error)
    return [results[at] for at in range(len(calls))]


def _failure(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(told(error))


def _begun(train: Train, at: int, call: Call, closing: ExitStack, random: bool) -> _Member:
    if random or train.rule.start is not None:
        torch.default_generator.manual_seed(call.rng.seed("torch"))
    visit = train.visit(call.payload, call.client, call.rng, closing, load=False)
    if train.rule.start is not None:
        train.rule.start(visit)
    masks = None
    if random:  # masks come from where the client's own generator would stand
        masks = torch.Generator()
        masks.set_state(torch.get_rng_state())
    return _Member(at, call, visit, masks)


class _Batch(NamedTuple):
    """A step's batches of the clients that take it: [A, B, ...], [A, B], [A, B], and how many are real."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    counts: list[int]


class _Group:
    """The steps of a group of clients, those with the most steps first."""

    def __init__(
        self, train: Train, learner: Loadable, members: Sequence[_Member], dropouts: Sequence[nn.Module]
    ) -> None:
        self.train, self.learner, self.members, self.dropouts = train, learner, members, dropouts
        self.visits = [member.visit for member in members]
        self.steps = [visit.steps for visit in self.visits]
        anchor = self.visits[0].anchor
        self.weights = [value.expand(len(members), *value.shape).clone() for value in anchor]
        self.kept: OptimizerState = {}
        self.stacked = _stacked(self.visits) if train.rule.grad and train.rule.stackable else None
        self.first: tuple[int, Visit] | None = None  # the stacked visit of the clients that still have steps

    def run(self) -> tuple[Tensors, list[tuple[float, int]]]:
        """The trained weights [C, ...], and each client's mean loss and number of examples looked at."""
        device = self.weights[0].device
        total = torch.zeros(len(self.members), dtype=torch.float64, device=device)
        seen = [0] * len(self.members)
        module = self.learner.module
        module.train()
        with _adapted(module, self.members) as masks:
            for batch in self._batches():
                active = len(batch.counts)
                masks.begin(batch.counts)
                losses = self._step(batch, active, masks)
                total[:active] += losses.double() * torch.tensor(
                    batch.counts, dtype=torch.float64, device=device
                )
                for k, count in enumerate(batch.counts):
                    seen[k] += count
        return self.weights, [(value / n, n) for value, n in zip(total.tolist(), seen, strict=True)]

    def _step(self, batch: _Batch, active: int, masks: _Masks) -> Tensor:
        rule, settings = self.train.rule, self.train.settings
        weights = [value[:active] for value in self.weights]
        visits = self.visits[:active]
        at_anchor: Tensors = []
        if rule.anchored:
            anchor = [value.expand(active, *value.shape) for value in visits[0].anchor]
            _, at_anchor = self._gradients(anchor, batch, visits)
            masks.again()
            for visit in visits:
                visit.bench.seen += 1
        if rule.risk is not None:
            for k, (visit, n) in enumerate(zip(visits, batch.counts, strict=True)):
                visit.batch = batch.inputs[k, :n], batch.targets[k, :n]
        losses, gradients = self._gradients(weights, batch, visits)
        if rule.grad is not None:
            gradients = self._bent(gradients, weights, at_anchor, batch)
        if settings.clip_norm is not None:
            gradients = _clipped(gradients, settings.clip_norm)
        kept = {name: [v[:active] if v.dim() else v for v in values] for name, values in self.kept.items()}
        optimizer(settings, visits[0].lr, kept)(weights, gradients)
        self.kept = kept  # whoever has no steps left has no use for it any more
        return losses

    def _gradients(self, weights: Tensors, batch: _Batch, visits: Sequence[Visit]) -> tuple[Tensor, Tensors]:
        """The mean of the task's loss at each client, [A], and the gradients of what it descends, each [A, ...]."""
        train, names = self.train, list(self.learner.trainable)
        leaves = [value.detach().requires_grad_() for value in weights]

        def forward(own: Tensors, images: Tensor) -> Tensor:
            found: Tensor = functional_call(
                self.learner.module, dict(zip(names, own, strict=True)), (images,)
            )
            return found

        outputs = vmap(forward)(leaves, batch.inputs)
        each = train.task.losses(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).view(batch.weights.shape)
        losses = (each * batch.weights).sum(1)
        descended = losses
        if (risk := train.rule.risk) is not None:
            rows = enumerate(batch.counts)
            descended = torch.stack([risk(outputs[k, :n], batch.targets[k, :n], visits[k]) for k, n in rows])
        return losses.detach(), gradients_of(descended.sum(), leaves, self.learner.half)

    def _bent(self, gradients: Tensors, weights: Tensors, at_anchor: Tensors, batch: _Batch) -> Tensors:
        """What the rule makes of the gradients: at once where it may, else client by client."""
        grad, visits = self.train.rule.grad, self.visits[: len(batch.counts)]
        assert grad is not None
        if self.stacked is not None:
            if self.first is None or self.first[0] != len(visits):
                self.first = len(visits), replace(self.stacked, own=_cut(self.stacked.own, len(visits)))
            self.first[1].at_anchor = at_anchor
            return grad(gradients, weights, self.first[1])
        rows = []
        for k, visit in enumerate(visits):
            visit.batch = batch.inputs[k, : batch.counts[k]], batch.targets[k, : batch.counts[k]]
            visit.at_anchor = [value[k] for value in at_anchor]
            rows.append(grad([g[k] for g in gradients], [w[k] for w in weights], visit))
        return [torch.stack(leaf) for leaf in zip(*rows, strict=True)]

    # ---- the batches

    def _batches(self) -> Iterator[_Batch]:
        datas = [visit.bench.data for visit in self.visits]
        together = hasattr(datas[0], "beside") and datas[0].beside(datas[1:])
        return self._gathered() if together else self._streamed()

    def _gathered(self) -> Iterator[_Batch]:
        """The images of a step are read at once, wherever they are in the set that all clients share."""
        benches = [visit.bench for visit in self.visits]
        size = max(bench.batch for bench in benches)
        orders = [
            bench.data.orders(bench.batch, member.call.rng, steps)
            for bench, member, steps in zip(benches, self.members, self.steps, strict=True)
        ]
        if all(order.shape == orders[0].shape for order in orders):
            at = torch.stack(orders, 1)
        else:
            at = torch.full((self.steps[0], len(orders), size), -1)
            for k, order in enumerate(orders):
                at[: len(order), k, : order.shape[1]] = order
        begins = torch.tensor([0, *(len(bench.data) for bench in benches[:-1])]).cumsum(0).unsqueeze(1)
        real = at >= 0
        # Short batches are filled up with the first of their own examples: another client's might be no number here.
        at = torch.where(real, at, at[:, :, :1]).clamp_(min=0)
        places = torch.cat([bench.data.indices for bench in benches])[at + begins]
        counts = real.sum(2)
        device = self.weights[0].device
        weights = (real.to(self.weights[0].dtype) / counts.clamp(min=1).unsqueeze(2)).to(device)
        for step, row in enumerate(counts.tolist()):
            active = len(row) - row.count(0)
            images, labels = self.members[0].visit.bench.data.gather(places[step, :active].flatten())
            yield _Batch(
                images.view(active, size, *images.shape[1:]),
                labels.view(active, size),
                weights[step, :active],
                row[:active],
            )

    def _streamed(self) -> Iterator[_Batch]:
        """Each client's own batches, as they come, padded and put beside each other."""
        streams = [m.visit.bench.data.batches(m.visit.bench.batch, m.call.rng) for m in self.members]
        for step in range(self.steps[0]):
            active = sum(steps > step for steps in self.steps)
            batches = [next(stream) for stream in streams[:active]]
            counts = [len(targets) for _, targets in batches]
            size = max(counts)
            weights = torch.zeros(active, size, dtype=self.weights[0].dtype, device=self.weights[0].device)
            for k, count in enumerate(counts):
                weights[k, :count] = 1 / count
            yield _Batch(
                torch.stack([_padded(inputs, size) for inputs, _ in batches]),
                torch.stack([_padded(targets, size) for _, targets in batches]),
                weights,
                counts,
            )


def _padded(value: Tensor, size: int) -> Tensor:
    if len(value) == size:
        return value
    return torch.cat([value, value[:1].expand(size - len(value), *value.shape[1:])])


def _clipped(gradients: Tensors, largest: float) -> Tensors:
    """Each client's gradients, scaled down to this norm where theirs is above it."""
    norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients]
    factor = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return [g * factor.view(-1, *[1] * (g.dim() - 1)) for g in gradients]


# ---- layers that are written in another way where clients are stacked


class _Masks:
    """The dropout masks of a step, each client's from a generator of its own, drawn in the order of the layers."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators
        self.begin([])

    def begin(self, counts: Sequence[int]) -> None:
        """A new step, of clients with so many examples."""
        self.counts, self.drawn, self.next = counts, list[Tensor](), 0
        self.size = max(counts, default=0)

    def again(self) -> None:
        """The same masks once more."""
        self.next = 0

    def mask(self, like: Tensor, layer: nn.Module) -> Tensor:
        """The next mask, for values [A, B, ...]: 0, or 1 / (1 - p)."""
        if self.next == len(self.drawn):
            self.drawn.append(self._draw(like, layer))
        self.next += 1
        return self.drawn[self.next - 1]

    def _draw(self, like: Tensor, layer: nn.Module) -> Tensor:
        assert isinstance(layer, _DROPOUTS)
        keep = 1 - layer.p
        if not keep:
            return torch.zeros((), dtype=like.dtype, device=like.device)  # nothing is drawn for it either
        if like.shape[1] != self.size:
            raise RuntimeError("dropout of values whose first axis is not that of the batch")
        shape = like.shape[2:] if isinstance(layer, nn.Dropout) else (like.shape[2], *[1] * (like.dim() - 3))
        mask = torch.zeros(*like.shape[:2], *shape, dtype=like.dtype)
        for k, count in enumerate(self.counts):
            mask[k, :count].copy_(
                torch.empty(count, *shape, dtype=like.dtype).bernoulli_(keep, generator=self.generators[k])
            )
        return (mask / keep).to(like.device)


class _Dropped(torch.autograd.Function):
    """Times the mask; its place in a vmapped forward pass, where it sees the values of all clients."""

    @staticmethod
    def forward(values: Tensor, masks: _Masks, layer: nn.Module) -> Tensor:
        raise RuntimeError("dropout of stacked clients was met outside of their common forward pass")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, masks: _Masks, layer: nn.Module) -> tuple[Tensor, int]:
        values = values.movedim(in_dims[0], 0)
        return values * masks.mask(values, layer), 0


@contextmanager
def _adapted(module: nn.Module, members: Sequence[_Member]) -> Iterator[_Masks]:
    """Gives layers the form that is right, or fast, for stacked clients; and back."""
    masks, changed = _Masks([member.masks for member in members]), list[nn.Module]()
    try:
        for layer in module.modules():
            if "forward" in layer.__dict__:
                continue  # somebody else's
            if isinstance(layer, _DROPOUTS) and layer.p > 0:
                layer.__dict__["forward"] = partial(_dropped, masks, layer)
            elif type(layer) is nn.Linear:
                layer.__dict__["forward"] = partial(_linear, layer)
            else:
                continue
            changed.append(layer)
        yield masks
    finally:
        for layer in changed:
            del layer.forward


def _dropped(masks: _Masks, layer: nn.Module, input: Tensor) -> Tensor:
    if not layer.training:
        return input
    dropped: Tensor = _Dropped.apply(input, masks, layer)
    return dropped


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """x W^T + b, as (W x^T)^T: of stacked clients the gradient of W comes out in W's own layout, and not turned."""
    rows = input.reshape(-1, input.shape[-1])
    out = (layer.weight @ rows.t()).t().contiguous().view(*input.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias


# ---- a visit of all


class _Unequal(Exception):
    """Something that is no tensor differs between clients."""


def _stacked(visits: Sequence[Visit]) -> Visit | None:
    """One visit that stands for all of them, what `start` left there stacked; None where that cannot be.

    The anchor and what the server sent are the same for all, and stand without an axis of clients.
    """
    try:
        own = _stack([visit.own for visit in visits])
    except Exception:  # of whatever kind: then it is done client by client, which is always right
        return None
    first = visits[0].payload
    common = {
        name: value for name, value in first.items() if all(v.payload.get(name) is value for v in visits)
    }
    return replace(visits[0], own=own, payload=common, state={}, labels=torch.empty(0))


def _stack(values: Sequence[Any]) -> Any:
    one = values[0]
    if all(value is one for value in values):
        return _Common(one)
    if any(type(value) is not type(one) for value in values):
        raise _Unequal
    if isinstance(one, Tensor):
        if not one.dim():
            raise _Unequal  # a number, which would stand against the wrong axis
        return torch.stack(list(values))
    if isinstance(one, Mapping):
        if any(value.keys() != one.keys() for value in values):
            raise _Unequal
        return {name: _stack([value[name] for value in values]) for name in one}
    if type(one) in (list, tuple):
        if any(len(value) != len(one) for value in values):
            raise _Unequal
        return [_stack(list(row)) for row in zip(*values, strict=True)]
    if is_dataclass(one) and not isinstance(one, type):
        return replace(
            one, **{f.name: _stack([getattr(value, f.name) for value in values]) for f in fields(one)}
        )
    if any(value != one for value in values):
        raise _Unequal
    return one


class _Common(NamedTuple):
    """What is one and the same object at all clients: it has no axis of clients to cut."""

    value: Any


def _cut(value: Any, active: int) -> Any:
    """What was stacked, of the first so many clients."""
    if isinstance(value, _Common):
        return value.value
    if isinstance(value, Tensor):
        return value[:active]
    if isinstance(value, Mapping):
        return {name: _cut(inner, active) for name, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, active) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cut(getattr(value, f.name), active) for f in fields(value)})
    return value
