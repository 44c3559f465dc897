"""Sums replies one after the other, in the same order on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.core.device_copies import uploaded
from fedlens.core.protocol import Payload, Reduce
from fedlens.core.stacked import Column, StackedTrees, row_of, stack_of
from fedlens.core.tree import Tree

REPLIES = "replies"  # the name of the number of replies in a total

# How a field of the replies is aggregated: the mean, weighted like the update, or the plain sum.
How = Literal["mean", "sum"]


@dataclass(frozen=True)
class Update:
    """The aggregated replies of a round.

    Attributes:
        update: the mean Delta of the trainable weights.
        buffers, counters: the new values of the model's buffers and counters.
        more: further aggregated fields, trees or numbers, by name.
        replies: the number of replies.
        weight: the sum of their weights.
        state: the aggregate's state for the next round; None leaves it unchanged.
        donated: `update` itself if its tensors belong to the receiver alone; see "Ownership" in `fedlens.core.tree`.
            After `dataclasses.replace`, the update is not donated.
    """

    update: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    counters: Mapping[str, Tensor]
    more: Mapping[str, Any] = field(default_factory=dict)
    replies: int = 0
    weight: float = 0.0
    donated: Mapping[str, Tensor] | None = None
    state: Payload | None = None


@dataclass(frozen=True)
class Refusal:
    """What an aggregate returns in place of an `Update` when the replies do not allow one, with the reason.

    Attributes:
        reason: a sentence without a full stop, such as "2 replies were accepted, and Krum needs 5".
    """

    reason: str


def add_reply(
    total: dict[str, Any],
    reduce: Reduce,
    payload: Payload,
    reduced: bool = False,
    donated: AbstractSet[str] = frozenset(),
    allocate: Callable[[Tree], dict[str, Tensor]] | None = None,
) -> None:
    """Adds a reply to `total` in place; `total` is empty before the first reply.

    Under `"sum"`, a tree or a number is multiplied by the reply's weight and added; under `"plain"` it is added as it
    is; under `"max"` a tree contributes its largest values, leaf by leaf. The weights are summed, and `replies` counts.

    Args:
        total: changed in place.
        reduce: how each field is aggregated.
        payload: the payload of the reply; it is not changed, except for its `donated` fields.
        reduced: whether the payload is already a sum over several replies, to be added as it is.
        donated: fields that the caller donates (`fedlens.core.tree`): the first reply's memory becomes the total's.
        allocate: returns memory for the total of a tree; see `Reply.allocate`.

    >>> total = {}
    >>> for weight, value in ((1.0, 4.0), (3.0, 8.0)):
    ...     add_reply(total, Reduce({"x": "sum"}), {"x": {"w": torch.tensor([value])}, "weight": weight})
    >>> total["x"]["w"] / total["weight"], total["replies"]
    (tensor([7.]), 2)
    """
    weight, first = float(payload[reduce.weight]), not total
    total[reduce.weight] = total.get(reduce.weight, 0.0) + weight
    total[REPLIES] = total.get(REPLIES, 0) + (payload[REPLIES] if reduced else 1)
    for name, how in reduce.fields.items():
        value = payload[name]
        factor = weight if how == "sum" and not reduced else 1.0
        if not isinstance(value, Mapping):
            total[name] = value * factor if first else total[name] + value * factor
        elif not first:
            _add(total, name, how, value, factor)
        elif how == "max":
            total[name] = {leaf: t.clone() for leaf, t in value.items()}
        elif not all(t.is_floating_point() for t in value.values()):
            total[name] = {leaf: t * factor for leaf, t in value.items()}  # integers become floats
        elif value and name in donated:
            torch._foreach_mul_(list(value.values()), factor)
            total[name] = dict(value)
        elif value and allocate is None:
            products = torch._foreach_mul(list(value.values()), factor)
            total[name] = dict(zip(value, products, strict=True))
        else:
            # Never the reply's own tensors: they may lie in a worker's memory, which the worker reuses.
            new = dict.fromkeys(value) if allocate is None else allocate(value)
            total[name] = {leaf: torch.mul(t, factor, out=new[leaf]) for leaf, t in value.items()}


def _add(total: dict[str, Any], name: str, how: str, value: Tree, factor: float) -> None:
    if how == "max":
        total[name] = {leaf: torch.maximum(t, value[leaf]) for leaf, t in total[name].items()}
    elif value:
        torch._foreach_add_(list(total[name].values()), [value[leaf] for leaf in total[name]], alpha=factor)


def add_rows(total: dict[str, Any], reduce: Reduce, payloads: Sequence[Payload]) -> None:
    """Adds several replies of one group to a total, as `add_reply` does one after the other; agrees to rounding.

    Trees that are rows of one `StackedTrees` are added up as one product with their weights.

    >>> rows, total = StackedTrees({"w": torch.tensor([[4.0], [8.0]])}).rows(), {}
    >>> add_rows(total, Reduce({"x": "sum"}), [{"x": rows[0], "weight": 1.0}, {"x": rows[1], "weight": 3.0}])
    >>> total
    {'weight': 4.0, 'replies': 2, 'x': {'w': tensor([28.])}}
    """
    stacks = {
        name: (stack, [payload[name].at for payload in payloads])
        for name, how in reduce.fields.items()
        if how != "max" and (stack := stack_of([payload[name] for payload in payloads])) is not None
    }
    _add_stacks(total, reduce, stacks, payloads)


def add_columns(
    total: dict[str, Any], reduce: Reduce, columns: Mapping[str, Column], rows: Sequence[int]
) -> None:
    """Adds the replies in these rows of the columns to a total, as `add_rows` does, without their payloads.

    >>> total, columns = {}, {"x": StackedTrees({"w": torch.tensor([[4.0], [8.0]])}), "weight": [1.0, 3.0]}
    >>> add_columns(total, Reduce({"x": "sum"}), columns, [0, 1])
    >>> total
    {'weight': 4.0, 'replies': 2, 'x': {'w': tensor([28.])}}
    """
    stacks, others = {}, {}
    for name, how in reduce.fields.items():
        column = columns[name]
        if how != "max" and isinstance(column, StackedTrees):
            stacks[name] = column, rows
        elif column:  # in a tree without leaves there is nothing to add
            others[name] = column
    filled = {name: how for name, how in reduce.fields.items() if name in stacks or name in others}
    others[reduce.weight] = columns[reduce.weight]
    payloads = [row_of(others, row) for row in rows]
    _add_stacks(total, Reduce(filled, reduce.weight), stacks, payloads)
    for name in reduce.fields:
        total.setdefault(name, {})


def _add_stacks(
    total: dict[str, Any],
    reduce: Reduce,
    stacks: Mapping[str, tuple[StackedTrees, Sequence[int]]],
    payloads: Sequence[Payload],
) -> None:
    """Adds replies: the fields in `stacks` as products of their rows, the others one reply after the other."""
    first = not total
    others = Reduce({n: how for n, how in reduce.fields.items() if n not in stacks}, reduce.weight)
    for payload in payloads:
        add_reply(total, others, payload)
    for name, (stack, rows) in stacks.items():
        factors = [float(p[reduce.weight]) if reduce.fields[name] == "sum" else 1.0 for p in payloads]
        sums = _weighted(stack, sorted(zip(rows, factors, strict=True)))
        if first:
            total[name] = sums
        else:
            torch._foreach_add_(list(total[name].values()), [sums[leaf] for leaf in total[name]])


def _weighted(stack: StackedTrees, rows: Sequence[tuple[int, float]]) -> dict[str, Tensor]:
    """The sum of these rows, each times its factor."""
    places, factors = zip(*rows, strict=True)
    # Other rows are not read: a rejected reply may hold NaN, and 0 times NaN is NaN.
    between = places[-1] + 1 - places[0] == len(places)
    at = slice(places[0], places[-1] + 1) if between else list(places)
    sums: dict[str, Tensor] = {}
    by_kind: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for name, leaf in stack.leaves.items():
        kind, taken = (leaf.dtype, leaf.device), leaf[at]
        if kind not in by_kind:
            by_kind[kind] = uploaded(torch.tensor([factors], dtype=leaf.dtype), leaf.device)
        weights = by_kind[kind]
        if leaf.is_cuda:  # a matrix product might use tf32 here
            sums[name] = (taken * weights.view(-1, *[1] * (taken.dim() - 1))).sum(0)
        else:
            sums[name] = (weights @ taken.reshape(len(factors), -1)).view(leaf.shape[1:])
    return sums
