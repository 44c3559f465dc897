"""The errors of a round that ends the run."""

from __future__ import annotations

from collections import Counter

from fedlens.base.errors import RunFailed
from fedlens.core.driver import Tally
from fedlens.core.schema import not_finite

TYPICAL_LR = 0.1  # a typical local.lr


def no_accepted_update(round: int, tally: Tally, lr: float) -> RunFailed:
    """The error when no reply of a round was accepted."""
    reasons = Counter(reason for counts in tally.failures.values() for reason in counts)
    if not reasons:
        return diverged(round, lr)
    reason, times = reasons.most_common(1)[0]
    hint = "the same error at every client usually comes from the model, the data or the algorithm"
    if not_finite(reason):
        hint = _too_high(lr)
    return RunFailed(
        f"no client update of round {round} was accepted: {reason} ({times} of {tally.failed})", hint=hint
    )


def diverged(round: int, lr: float) -> RunFailed:
    """The error when the loss is not finite."""
    return RunFailed(
        f"the loss of round {round} is not a finite number",
        hint=_too_high(lr),
    )


def _too_high(lr: float) -> str:
    smaller = f"{TYPICAL_LR:g}" if lr > 1 else "a tenth"
    return f"usually the learning rate is too high: local.lr is {lr:g}, try {smaller}, or set local.clip_norm"
