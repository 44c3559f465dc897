"""Adding replies up, one after the other; the same additions on every engine."""

from __future__ import annotations

from typing import Any

import torch

from fedlens.core.protocol import Payload, Reduce


def fold(total: dict[str, Any], reduce: Reduce, payload: Payload, folded: bool = False) -> None:
    """Adds a reply to `total`, in place, which is empty before the first.

    A tree under `"sum"` is added times the reply's weight, one under `"max"` leaf by leaf; the weights add up. What
    is `folded` already, a sum over several replies, is added as it is.

    >>> total = {}
    >>> for weight, value in ((1.0, 4.0), (3.0, 8.0)):
    ...     fold(total, Reduce({"x": "sum"}), {"x": {"w": torch.tensor([value])}, "weight": weight})
    >>> total["x"]["w"] / total["weight"]
    tensor([7.])
    """
    weight, first = float(payload[reduce.weight]), not total
    factor = 1.0 if folded else weight
    total[reduce.weight] = total.get(reduce.weight, 0.0) + weight
    for name, how in reduce.fields.items():
        tree = payload[name]
        if first:
            # Never the reply's own tensors: they may lie in a worker's memory, which is wanted back.
            total[name] = {leaf: t * factor if how == "sum" else t.clone() for leaf, t in tree.items()}
        elif how == "sum" and tree:
            torch._foreach_add_(
                list(total[name].values()), [tree[leaf] for leaf in total[name]], alpha=factor
            )
        else:
            total[name] = {leaf: torch.maximum(t, tree[leaf]) for leaf, t in total[name].items()}
