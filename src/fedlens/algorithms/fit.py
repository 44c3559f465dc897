"""Whether a client rule, a task, an aggregate, learning rates and the federation fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlens.aggregate.mean import Aggregate
from fedlens.algorithms.client_evaluation import Who, refuse_unmeasured
from fedlens.algorithms.client_sampling import BySize, Poisson, Select, repeats
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo
from fedlens.core.tree import TreeSpec
from fedlens.local.chain import chain
from fedlens.local.example_privacy import PrivateSteps
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

_TYPES: Mapping[str, type] = {"aggregate": Aggregate, "client rule": ClientRule}


def refuse_foreign(component: object, kind: str) -> None:
    """Raises `ConfigError` for a class in place of an object, and for an object without the base class it needs."""
    if isinstance(component, type):
        name = component.__name__
        raise ConfigError(
            f"the {kind} is the class {name}, but must be an object",
            where="algorithm",
            hint=f"write {name}()",
        )
    base = _TYPES.get(kind, object)
    if not isinstance(component, base):
        raise ConfigError(
            f"the {kind} is of the class {type(component).__name__}, which does not inherit from {base.__name__}",
            where="algorithm",
            hint=f"inherit from {base.__module__}.{base.__name__}",
        )


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


_OTHER = "take aggregate.name = 'mean', or another algorithm"


def refuse_unprepared(aggregate: Aggregate, rule: ClientRule) -> None:
    """Raises `ConfigError` if a round may end before the aggregate is asked, although it must be asked in every one."""
    prepared = any(server_rule.prepare is not None for server_rule in rule.server_rules.values())
    if aggregate.asked_without_replies and prepared:
        raise ConfigError(
            f"the aggregate {type(aggregate).__name__} must be asked in every round, and {rule.called} asks clients "
            "before they train: without their replies the round ends there",
            where="aggregate.name",
            hint=_OTHER,
        )


def refuse_unsummed(
    aggregate: Aggregate, rule: ClientRule, select: Select, personal: bool, measured: bool
) -> None:
    """Raises `ConfigError` if the server sees sums alone, and the rule or the evaluation needs single clients.

    Args:
        select: whose cohorts have to be of one size, for which the words of a sum are chosen.
        personal: whether parts of the model stay at the clients.
        measured: whether `evaluation.clients` is set.
    """
    what = None
    if rule.solve is not None and not isinstance(rule.solve, PrivateSteps):
        what = "has a solver of its own, and how many batches that takes does not follow from public sizes"
    elif rule.ops or any(server_rule.prepare is not None for server_rule in rule.server_rules.values()):
        what = "prepares each round, and may ask clients for replies that are not summed"
    if aggregate.blind and what is not None:
        raise ConfigError(
            f"with {type(aggregate).__name__} the server sees the sum over the clients alone, and {rule.called} {what}",
            where="aggregate.name",
            hint=_OTHER,
        )
    if aggregate.blind and isinstance(select, Poisson):
        raise ConfigError(
            f"{type(aggregate).__name__} sums over cohorts of one size, and those of 'poisson' may be of any",
            where="select.name",
            hint="set select.name = 'uniform'",
        )
    if personal:
        refuse_measured(aggregate, "parts of the model stay at the clients, which alone can measure it")
    elif measured:
        refuse_measured(aggregate, "evaluation.clients measures the model at each client")


def refuse_measured(aggregate: Aggregate, why: str) -> None:
    """Raises `ConfigError` if the server sees sums alone, and clients would send it their own metrics."""
    if aggregate.blind:
        raise ConfigError(
            f"with {type(aggregate).__name__} the server sees the sum over the clients alone, and {why}: its metrics "
            "are those of single clients, and are not summed",
            where="evaluation.clients",
            hint="set evaluation.clients = 'none' with an algorithm of one model, or aggregate.name = 'mean', which "
            "'fedlens cost' needs",
        )


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


def refuse_twice(rule: ClientRule, aggregate: Aggregate, select: Select, federation: FederationInfo) -> None:
    """Raises `ConfigError` if a client may appear twice in a cohort, and the rule or the aggregate forbids it."""
    why = None
    if rule.traits.invariant:
        why = (
            f"'{rule.name}' keeps a sum over all clients' states at the server, which two changes of one state at once "
            "would break"
        )
    elif aggregate.once:
        why = f"{type(aggregate).__name__} asks each client for one vector"
    if why is not None and repeats(select, federation):
        raise ConfigError(
            f"with this selection a client can appear twice in a round, and {why}",
            where="select",
            hint=_single(select, federation),
        )


def _single(select: Select, federation: FederationInfo) -> str:
    """A hint: how to choose every client at most once."""
    if not isinstance(select, BySize):
        return "name every client once"
    most = int(federation.sizes.sum()) // federation.largest
    if select.method == "replacement":
        return "take select.method = 'systematic'" + (f", and at most {most} clients a round" if most else "")
    return f"take at most {most} clients a round: the largest client holds one in {most + 1} examples or more"


def joined(own: ClientRule, added: ClientRule | None) -> ClientRule:
    """The algorithm's rule with the user's added.

    Raises `ConfigError` if the user's is 'plain' and the algorithm has a rule.
    """
    if added is None:
        return own
    if added.name == "plain" and not own.plain:
        raise ConfigError(
            "the client rule 'plain' has no effect, because the algorithm keeps its own rule",
            where="client.name",
            hint="set algorithm.name = 'fedavg' for plain local training",
        )
    return chain(own, added)


def refuse_counted_twice(
    select: Select, aggregate: Aggregate, local: LocalSettings, federation: FederationInfo
) -> None:
    """Raises `ConfigError` if a client's size counts twice: in how often it is drawn and in its weight."""
    if not isinstance(select, BySize) or aggregate.weighting != "examples" or local.examples:
        return
    sizes = federation.sizes[federation.eligible]
    if len(sizes) and sizes.min() < sizes.max():
        raise ConfigError(
            "clients are selected and weighted by their number of examples, so their size counts twice",
            where="select.name",
            hint="set aggregate.weighting = 'uniform', or set select.name = 'uniform'",
        )


def refuse_personal(
    rule: ClientRule, federation: FederationInfo, measure: Sequence[str], measured: Who | None
) -> None:
    """Raises `ConfigError` if a model with personal leaves cannot be evaluated, or if a rule would send them."""
    refuse_unmeasured(
        federation,
        "parts of the model stay at the clients, so it can only be tested at each client",
    )
    if "@train" in measure:
        raise ConfigError(
            "evaluation.train needs one global model, but parts of this model stay at the clients",
            where="evaluation.train",
        )
    if measured == "none":
        raise ConfigError(
            "parts of the model stay at the clients, so only per-client evaluation can measure it",
            where="evaluation.clients",
            hint="take 'all', or a number",
        )
    if rule.traits.all_weights or rule.fields:
        raise ConfigError(
            f"'{rule.name}' needs all weights at the server, but parts of this model stay at the clients",
            where="client",
            hint="remove it, or choose another algorithm",
        )
