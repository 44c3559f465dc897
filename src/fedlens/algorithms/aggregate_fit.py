"""Whether an aggregate that evaluates models on the server's data fits the algorithm and the federation."""

from __future__ import annotations

from fedlens.aggregate.mean import Aggregate
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo
from fedlens.core.tree import TreeSpec
from fedlens.local.rules import ClientRule
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

_OTHER = "take aggregate.name = 'mean', or another algorithm"


def refuse_server_data(
    aggregate: Aggregate, rule: ClientRule, federation: FederationInfo, personal: frozenset[str]
) -> None:
    """Raises `ConfigError` if there are no such data at the server, or no whole models of clients to evaluate."""
    name = aggregate.server_data
    if name is None:
        return
    who, data = f"the aggregate {type(aggregate).__name__}", name.removeprefix("@")
    if name == "@validation" and federation.held_out is not None:
        raise ConfigError(
            f"{who} evaluates models on validation data of the server, but the clients hold them out",
            where="data.validation_from",
            hint="set data.validation_from = 'global'",
        )
    if not federation.held.get(name):
        raise ConfigError(
            f"{who} evaluates models on {data} data of the server, and it has none",
            where="data.validation" if name == "@validation" else "aggregate.on",
            hint="set data.validation = 0.02, or another share"
            if name == "@validation"
            else "choose a dataset with test data",
        )
    if personal:
        raise ConfigError(
            f"{who} evaluates whole models at the server, but parts of this model stay at the clients",
            where="aggregate.name",
            hint=_OTHER,
        )
    if rule.traits.replaces_update or rule.fields:
        raise ConfigError(
            f"{who} weighs the models of the clients, but {rule.called} makes the server need a mean of what clients "
            "send besides or in place of them",
            where="aggregate.name",
            hint=_OTHER,
        )


def refuse_server_evaluation(aggregate: Aggregate, task: Task, spec: TreeSpec, size: EvaluationSize) -> None:
    """Raises `ConfigError` if the server cannot take gradients of the task's loss on its data as they are."""
    if aggregate.server_data is None:
        return
    who = f"the aggregate {type(aggregate).__name__}"
    if task.views > 1 or task.local_leaves(spec):
        raise ConfigError(
            f"{who} takes gradients on data of the server, and {type(task).__name__} compares augmentations of each "
            "image, which these data do not have",
            where="aggregate.name",
            hint="take aggregate.name = 'mean'",
        )
    if size != FULL:
        raise ConfigError(
            f"{who} evaluates images at their stored size, and evaluation.size is another",
            where="evaluation.size",
            hint="set evaluation.size = 'full'",
        )
