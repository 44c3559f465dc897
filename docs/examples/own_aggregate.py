"""An aggregate of one's own: the median of the clients' updates, value by value."""

import torch

from fedlens.aggregate.mean import Aggregate
from fedlens.core.protocol import Reply
from fedlens.core.reduction import Update


class Median(Aggregate):
    """The median of each value over the replies, so that a few broken clients change little."""

    def fold(self, answers, fields, ctx):
        """The update; None if no reply was good. Answers are `Reply` or `Failure`."""
        payloads = [answer.payload for answer in answers if isinstance(answer, Reply)]
        if not payloads:
            return None
        return Update(
            update=median([payload["update"] for payload in payloads]),
            buffers=median([payload["buffers"] for payload in payloads]),
            counters=payloads[0]["counters"],
            replies=len(payloads),
            weight=sum(payload["weight"] for payload in payloads),
        )


def median(trees):
    """The median of each value over trees of tensors."""
    return {name: torch.stack([tree[name] for tree in trees]).median(dim=0).values for name in trees[0]}
