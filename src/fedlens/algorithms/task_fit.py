"""Whether a client rule and a task fit together."""

from __future__ import annotations

from fedlens.base.errors import ConfigError
from fedlens.local.rules import ClientRule
from fedlens.tasks.task import Task


def refuse_task(rule: ClientRule, task: Task) -> None:
    """Raises `ConfigError` if the rule needs what the task does not have.

    See `Traits.features`, `Traits.reweighs` and `Traits.full_gradients`.

    Rules that only change weights and gradients fit every task.
    """
    traits, who = rule.traits, rule.called
    if traits.features and not task.features:
        raise ConfigError(
            f"{who} compares one feature vector per example, and models for {task.kind} have none",
            where="algorithm.name",
            hint="choose another algorithm",
        )
    if (traits.full_gradients or traits.anchored) and not task.full_gradients:
        raise ConfigError(
            f"{who} takes gradients besides those of the steps, and with {type(task).__name__} these have another "
            "objective: images are augmented anew for every step",
            where="algorithm.name",
            hint="choose another algorithm, such as 'fedavg'",
        )
    if traits.reweighs and not task.one_class:
        raise ConfigError(
            f"{who} weighs examples by their class (hsu2020, Eq. 3), and examples for {task.kind} have no single class",
            where="algorithm.name",
            hint="choose another algorithm",
        )
    if traits.reweighs and not task.counts_classes:
        raise ConfigError(
            f"{who} counts classes (hsu2020, Eq. 3), and the task {type(task).__name__} does not define `counts`",
            where="task.name",
            hint="define it, or choose another algorithm",
        )
    if traits.reweighs and task.weighs:
        raise ConfigError(
            f"{who} weighs the classes in the loss, and task.class_weights would weigh them again",
            where="task.class_weights",
            hint="set task.class_weights = 'none', or choose another algorithm",
        )
