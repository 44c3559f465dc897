"""Refuses learning rates and steps that a rule or an aggregate cannot reckon with."""

from __future__ import annotations

from fedlens.aggregate.mean import Aggregate
from fedlens.base.errors import ConfigError
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings


def refuse_steep(rule: ClientRule, local: LocalSettings, scale: float = 1.0) -> None:
    """Raises `ConfigError` if SGD on the rule's quadratic term alone would diverge; `scale` is the largest `lr_scale`.

    Steps w <- w - lr mu (w - w^t) with momentum converge below the bound. A single step is accepted, because the term
    is zero in the first, and so are clipped steps, because their length is bounded.
    """
    mu = rule.traits.proximal
    if local.optimizer != "sgd" or local.clip_norm is not None or local.steps == 1 or not mu:
        return
    bound = 2 * (1 + local.momentum) / (1 + 2 * local.momentum if local.nesterov else 1)
    if local.lr * scale * mu >= bound:
        rate = "local.lr" if scale == 1 else f"local.lr, scaled by {scale:g},"
        raise ConfigError(
            f"{rate} times the weight of the quadratic term of '{rule.name}' is {local.lr * scale * mu:g}: "
            f"at {bound:g} or more, SGD on that term alone diverges",
            where="local.lr",
            hint=f"set local.lr below {bound / (mu * scale):g}, or a smaller weight",
        )


def refuse_scaled(rule: ClientRule, aggregate: Aggregate) -> None:
    """Raises `ConfigError` if a formula takes one learning rate for all leaves, and `local.lr_scale` is set."""
    what = None
    if rule.solve is not None:
        what = f"the solver of '{rule.name}' takes no steps at a learning rate"
    elif aggregate.normalized and rule.traits.proximal:
        what = "with a proximal term the number that normalized averaging divides by depends on the learning rate"
    if what is not None:
        raise ConfigError(
            f"{what}, so leaves cannot have rates of their own", where="local.lr_scale", hint="remove it"
        )


def refuse_unequal(rule: ClientRule, local: LocalSettings) -> None:
    """Raises `ConfigError` if the update is not a sum of gradients, so there is no number of steps to divide by."""
    if local.optimizer != "sgd" or rule.solve is not None:
        what = "a local solver" if rule.solve is not None else local.optimizer
        raise ConfigError(
            f"normalized averaging divides an update by the number of SGD steps it amounts to, and {what} takes none",
            where="aggregate" if rule.solve is not None else "local.optimizer",
            hint="take local.optimizer = 'sgd' and a rule of local steps",
        )
    if local.changes_by_step:
        raise ConfigError(
            "normalized averaging divides an update by the number of SGD steps it amounts to, at one learning rate",
            where="local.lr_change",
            hint="set it to 'round'",
        )
    if rule.traits.replaces_update:
        raise ConfigError(
            f"normalized averaging divides an update by the number of SGD steps it amounts to, and '{rule.name}' sends "
            "an update of its own that is no sum of steps",
            where="aggregate",
            hint="take aggregate.name = 'mean'",
        )
