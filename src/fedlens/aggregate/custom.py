"""Aggregates that one function of the replies defines: weights of the replies, or a value for each column."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean, checked, reweighted
from fedlens.base.errors import HookError
from fedlens.base.signatures import check_signature, place_of
from fedlens.core.protocol import Answer, Payload, Reply
from fedlens.core.reduction import How, Refusal, Update
from fedlens.core.tree import Tree, norm, subtract

_BLOCK = 2**22  # values of a block: 16 MB in float32


class Rows:
    """The accepted replies of a round, one row each; `len(rows)` is their number n.

    Attributes:
        replies: the replies in the order of their slots. Do not change them.
        ctx: the round; see `AggregateContext`.
        chosen: what `ByWeights.weights` returned, float64 [n]; None before.
    """

    def __init__(self, replies: Sequence[Reply], ctx: AggregateContext) -> None:
        self.replies, self.ctx = replies, ctx
        self.chosen: Tensor | None = None

    def __len__(self) -> int:
        return len(self.replies)

    @property
    def state(self) -> Payload:
        """The aggregate's state. Do not change it."""
        return self.ctx.state

    @cached_property
    def weight(self) -> Tensor:
        """The `weight` of each reply, float64 [n]: its number of examples, or 1; see `Aggregate.weighting`."""
        return torch.tensor([float(reply.payload["weight"]) for reply in self.replies], dtype=torch.float64)

    @cached_property
    def norms(self) -> Tensor:
        """The Euclidean norm of each update, float64 [n]."""
        return torch.stack([norm(update) for update in self.trees("update")])

    @cached_property
    def products(self) -> Tensor:
        """The inner products of the updates, float64 [n, n]. They take n^2 operations a weight of the model."""
        total = torch.zeros(len(self), len(self), dtype=torch.float64)
        for _, _, block in blocks(self.trees("update")):
            values = block.double()
            total += values @ values.T
        return total

    def distances(self, weights: Tensor) -> Tensor:
        """The distance of each update from sum_k w_k Delta_k, float64 [n].

        Args:
            weights: float64 [n]; or [m, n] for m such sums, with a result [m, n]. The identity matrix gives the
                distances between the updates.
        """
        near = weights @ self.products
        squares = self.products.diagonal() - 2 * near + (near * weights).sum(-1, keepdim=True)
        return squares.clamp(min=0).sqrt()

    def distances_to(self, tree: Tree) -> Tensor:
        """The distance of each update from `tree`, float64 [n]."""
        return torch.stack([norm(subtract(update, tree)) for update in self.trees("update")])

    def trees(self, name: str) -> list[Tree]:
        """A field of each reply: `update`, `buffers`, `counters`, or a tree of the client rule."""
        return [reply.payload[name] for reply in self.replies]


def blocks(trees: Sequence[Tree]) -> Iterator[tuple[str, int, Tensor]]:
    """Blocks of columns of n trees: the leaf, the position of the first column in it, and the values [n, b].

    Each block is a copy, and small enough that a heavy model is never copied as a whole.
    """
    width = max(1, _BLOCK // len(trees))
    for name, leaf in trees[0].items():
        rows = [tree[name].reshape(-1) for tree in trees]
        for start in range(0, leaf.numel(), width):
            yield name, start, torch.stack([row[start : start + width] for row in rows])


class _Refused(Exception):
    """The user's function returned a `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class _OfReplies(Aggregate):
    """Keeps the replies of a round, and aggregates each part of them by one function of the user's."""

    _function: ClassVar[tuple[str, str]]  # its name, and that of its argument

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        name, argument = cls._function
        function = vars(cls).get(name)
        if inspect.isfunction(function):
            check_signature(function, ("self", argument), f"`{name}` of the aggregate {cls.__name__}")

    def finish(self, rows: Rows, update: Update) -> Update | Refusal:
        """The update of the round; a rule with memory returns it with its new `state`.

        Args:
            rows: the accepted replies, and the state so far.
            update: what the rule's function gives.
        """
        return update

    def aggregate(
        self, answers: Iterable[Answer], fields: Mapping[str, How], ctx: AggregateContext
    ) -> Update | Refusal | None:
        """The update; None without an accepted reply. Raises `HookError` if the user's function returns no numbers."""
        rows = Rows([answer for answer in answers if isinstance(answer, Reply)], ctx)
        if not len(rows):
            return None
        try:
            update = self._update(rows, dict.fromkeys(fields, "mean"))
        except _Refused as refused:
            return refused.refusal
        sums = [name for name, how in fields.items() if how == "sum"]
        more = {**update.more, **{name: _times(len(rows), update.more[name]) for name in sums}}
        update = replace(update, more=more, replies=len(rows), weight=float(rows.weight.sum()))
        return checked(self.finish, self.finish(rows, update))

    @abstractmethod
    def _update(self, rows: Rows, fields: Mapping[str, How]) -> Update:
        """The update, with each of `fields` aggregated like it."""


class ByWeights(_OfReplies):
    """Base class of aggregates that one function defines, `weights`: the update is sum_k w_k Delta_k.

    Statistics of batch normalization and the fields of a client rule get the mean with these weights; a field that is
    summed is n times that. Of counters, the largest value of a reply with a weight above 0 is taken.

    >>> class Norms(ByWeights):
    ...     def weights(self, rows):  # long updates count less
    ...         return (1 / rows.norms) / (1 / rows.norms).sum()
    >>> def reply(slot, value):
    ...     trees = {"update": {"w": torch.tensor([value])}, "buffers": {}, "counters": {}}
    ...     return Reply((1, 0, slot), slot, {**trees, "weight": 1.0})
    >>> ctx = AggregateContext(1, 1, None, None)
    >>> Norms().aggregate([reply(0, 1.0), reply(1, 3.0)], {}, ctx).update  # weights 3/4 and 1/4
    {'w': tensor([1.5000])}
    """

    _function = ("weights", "rows")

    @abstractmethod
    def weights(self, rows: Rows) -> Tensor | Refusal:
        """The weight of each reply, [n], none below 0.

        For a mean they add up to 1. A smaller sum shortens the update, as clipping does. Return a `Refusal` with the
        reason if there are too few replies.
        """

    def _update(self, rows: Rows, fields: Mapping[str, How]) -> Update:
        weights = rows.chosen = _values(self.weights, self.weights(rows), len(rows)).double()
        total = weights.sum().item()
        if weights.min() < 0 or not 0 < total <= 1 + 1e-6:
            raise HookError(
                f"`weights` of {type(self).__name__} returned weights of which the smallest is "
                f"{weights.min().item():g} and the sum {total:g}",
                where=place_of(self.weights),
                hint="return none below 0; for a mean, divide them by their sum",
            )
        kept = weights.nonzero().flatten().tolist()
        mean = Mean().aggregate(reweighted([rows.replies[k] for k in kept], weights[kept].tolist()), fields)
        assert mean is not None
        torch._foreach_mul_(list(mean.update.values()), total)  # its memory is donated
        return mean


class ByColumn(_OfReplies):
    """Base class of aggregates that one function defines, `column`: a value for each weight of the model.

    The update, statistics of batch normalization, counters (in float64, rounded) and the fields of a client rule are
    all aggregated by it; a field that is summed is n times that.

    >>> class Median(ByColumn):
    ...     def column(self, block):
    ...         return block.median(dim=0).values
    >>> def reply(slot, value):
    ...     trees = {"update": {"w": torch.tensor([value])}, "buffers": {}, "counters": {}}
    ...     return Reply((1, 0, slot), slot, {**trees, "weight": 1.0})
    >>> ctx = AggregateContext(1, 1, None, None)
    >>> Median().aggregate([reply(0, 1.0), reply(1, 3.0), reply(2, 1e9)], {}, ctx).update
    {'w': tensor([3.])}
    """

    _function = ("column", "block")

    @abstractmethod
    def column(self, block: Tensor) -> Tensor | Refusal:
        """A value for each column, [b].

        Return a `Refusal` with the reason if there are too few replies.

        Args:
            block: [n, b], a row for each of the n replies. The model's weights come in blocks of many sizes, so treat
                every column in the same way.
        """

    def _update(self, rows: Rows, fields: Mapping[str, How]) -> Update:
        update, buffers, counters = (
            self._tree(rows.trees(name)) for name in ("update", "buffers", "counters")
        )
        more = {name: self._field([reply.payload[name] for reply in rows.replies]) for name in fields}
        return Update(update, buffers, counters, more, donated=update)

    def _field(self, values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return self._tree(values)
        trees = [{"": torch.tensor(float(value), dtype=torch.float64)} for value in values]
        return self._tree(trees)[""].item()

    def _tree(self, trees: Sequence[Tree]) -> dict[str, Tensor]:
        new = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in trees[0].items()}
        for name, start, block in blocks(trees):
            leaf = new[name]
            values = block if leaf.is_floating_point() else block.double()
            column = _values(self.column, self.column(values), block.shape[1])
            column = column if leaf.is_floating_point() else column.round()
            leaf.view(-1)[start : start + block.shape[1]] = column
        return new


def _values(method: Any, returned: Any, n: int) -> Tensor:
    """What the user's function returned. Raises `HookError` if it is not a tensor of n finite numbers."""
    if isinstance(returned, Refusal):
        raise _Refused(returned)
    fault = None
    if not isinstance(returned, Tensor):
        fault = f"a {type(returned).__name__}"
    elif returned.shape != (n,):
        fault = f"a tensor of the shape {list(returned.shape)}"
    elif not returned.isfinite().all():
        fault = "values that are not finite"
    if fault is not None:
        raise HookError(
            f"`{method.__name__}` of {type(method.__self__).__name__} returned {fault}",
            where=place_of(method),
            hint=f"return a tensor of {n} finite numbers, or a Refusal with the reason",
        )
    values: Tensor = returned
    return values


def _times(n: int, value: Any) -> Any:
    return {name: n * t for name, t in value.items()} if isinstance(value, Mapping) else n * value
