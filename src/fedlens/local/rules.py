"""Client rules: how an algorithm modifies local training, through hooks that do nothing by default.

A hook is a plain function of tensors. It changes no input and does not branch on a tensor's value, so that an
engine may run it for several clients at once. Lists of tensors are in the order of the trainable leaves,
`context.names`.

Hooks run at the client. `server_rules` says what the rule does at the server, if anything: the state that it keeps
between rounds, what it sends with the model, and what it does with the fields of the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.signatures import check_signature
from fedlens.core.protocol import Answers, Ask, ClientId, FederationInfo, ModelSpec, Op, Payload, RoundContext
from fedlens.core.reduction import How, Update
from fedlens.core.schema import AskedField, Bound
from fedlens.core.schema import Field as SchemaField
from fedlens.core.tree import Tree, TreeSpec
from fedlens.local.problem import LocalProblem
from fedlens.local.settings import LocalSettings

Tensors = list[Tensor]
"""Tensors in the order of the trainable leaves, `context.names`."""


@dataclass
class LocalContext:
    """One client's local training, as a hook sees it.

    Attributes:
        names: the names of the trainable leaves.
        anchor: the weights that local training starts from, in that order: the global ones that the client received,
            and its own for personal parts of the model.
        payload: what the server sent.
        state: the client's stored state.
        lr: the learning rate of this round; if it changes with every step, the mean over the steps.
        steps: the number of local steps.
        settings: the local settings.
        problem: further computations: gradients over all examples, a second copy of the model.
        batch: (inputs, targets) of the current step.
        features: the inputs of the last linear layer on the step's batch, [n, features] by name: `own`, of the
            trained model, and those of the rule's `references`; see `fedlens.local.features`.
        at_anchor: gradients of the step's batch at the anchor, if the rule is `anchored`.
        proximal: mu of all terms mu/2 ||w - w^t||^2 in the local objective; `start` may correct it.
        saved: values that `start` stores for the other hooks, until the client has finished.
        rate_factors: the learning rate of each step as a share of `lr`; empty if all are `lr`.
        scales: the learning rate of each leaf as a multiple of the step's (`local.lr_scale`); empty if all are 1.
    """

    names: list[str]
    anchor: Tensors
    payload: Payload
    state: Payload
    lr: float
    steps: int
    settings: LocalSettings = field(default_factory=lambda: LocalSettings(lr=1.0))
    problem: LocalProblem = None  # type: ignore[assignment]  # contexts made by hand in tests have none
    batch: tuple[Tensor, Tensor] = None  # type: ignore[assignment]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    at_anchor: Tensors = field(default_factory=list)
    proximal: float = 0.0
    saved: dict[str, Any] = field(default_factory=dict)
    rate_factors: Sequence[float] = ()
    scales: Sequence[float] = ()

    def rate(self, step: int) -> float:
        """The learning rate of a step, the first being 0."""
        return self.lr * self.rate_factors[step] if self.rate_factors else self.lr

    def inputs(self) -> Mapping[str, Any]:
        """The inputs that a hook must not change, by name."""
        return {
            "anchor": self.anchor,
            "payload": self.payload,
            "state": self.state,
            "at_anchor": self.at_anchor,
            "batch": self.batch,
        }

    @property
    def targets(self) -> Any:
        """The targets of the examples that the client trains on this round, read on first use.

        int64 [n] for classification.
        """
        return self.problem.data.read_targets()

    def tree(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors in the order of the trainable leaves, as a tree."""
        return dict(zip(self.names, tensors, strict=True))

    def listed(self, tree: Tree) -> Tensors:
        """The leaves of a tree in the order of the trainable leaves."""
        return [tree[name] for name in self.names]


class Solved(NamedTuple):
    """The result of a rule's own solver: weights, mean task loss, numbers of examples and batches.

    A `loss` that is None is not sent. `sums` are its own metrics, which are summed over the clients; the rule declares
    them in `metrics`.
    """

    parameters: Tensors
    loss: float | None
    examples: int
    batches: int
    sums: Mapping[str, float] = MappingProxyType({})


RiskHook = Callable[[Tensor, Tensor, LocalContext], Tensor]
"""(outputs, targets, context) -> the loss of a batch."""

LossHook = Callable[[Tensor, Tensor, Tensor, LocalContext], Tensor]
"""(loss, outputs, targets, context) -> the loss to minimize."""

GradHook = Callable[[Tensors, Tensors, LocalContext], Tensors]
"""(gradients, parameters, context) -> the gradients for the step."""

FinishHook = Callable[[Tensors, LocalContext], tuple[Mapping[str, Any], Payload | None]]
"""(parameters, context) -> (fields for the reply, changes of the client's state or None)."""

LimitHook = Callable[[Tensor, Payload], tuple[Tensor, Mapping[str, Tensor]]]
"""(norms, payload) -> (a factor for each update, at most 1, and numbers for each reply)."""


# The arguments of each hook of a rule.
HOOKS: Mapping[str, Sequence[str]] = {
    "loss": ("loss", "outputs", "targets", "context"),
    "grad": ("gradients", "parameters", "context"),
    "finish": ("parameters", "context"),
    "expect": ("spec",),
    "references": ("context",),
    "start": ("context",),
    "risk": ("outputs", "targets", "context"),
    "solve": ("context",),
    "limit": ("norms", "payload"),
    "check": ("settings",),
    "fits": ("federation", "model"),
}
SERVER_HOOKS: Mapping[str, Sequence[str]] = {
    "init": ("weights", "federation"),
    "shared": ("state",),
    "takes": ("spec", "federation"),
    "prepare": ("state", "shared", "cohort", "ctx"),
    "after": ("state", "update", "ctx"),
    "spent": ("state",),
}


@dataclass(frozen=True)
class ServerRule:
    """The part of a client rule at the server. It has its own state in the algorithm's state.

    Attributes:
        init: (trainable weights, federation) -> the state before the first round.
        shared: state -> what is sent to every client of the cohort with the model, under names that only this rule
            uses.
        takes: (spec of the model, federation) -> the schema of what `shared` sends, by name. A site refuses a rule that
            sends something and does not say what.
        asks: the operations that `prepare` asks of clients: each with what is shared so far, or with nothing.
        prepare: (state, shared so far, cohort, context) -> a generator of asks before local training that returns the
            new state, or None to skip the round. Shared so far are `model`, the global tree; `lr`; and what earlier
            rules send.
        after: (state, update, context) -> (the new state, the update that the server step takes). `update.more` has
            the aggregated `fields` of the rule, `update.replies` the number of replies.
        release: what each round releases of the clients' data, if `after` does; see `fedlens.privacy.accounting`.
        spent: state -> what `after` has released of the clients' data in this round, in the terms of differential
            privacy, a mapping each; see `fedlens.privacy`.
        follows_device: the functions compute on the device of their inputs, which may then be on a GPU; otherwise
            inputs are on the CPU.
    """

    init: Callable[[Tree, FederationInfo], Payload] = lambda weights, federation: {}
    shared: Callable[[Payload], Payload] | None = None
    takes: Callable[[TreeSpec, FederationInfo], Mapping[str, AskedField]] | None = None
    asks: Mapping[str, Literal["shared", "nothing"]] = field(default_factory=dict)
    prepare: (
        Callable[
            [Payload, Payload, Sequence[ClientId], RoundContext], Generator[Ask, Answers, Payload | None]
        ]
        | None
    ) = None
    after: Callable[[Payload, Update, RoundContext], tuple[Payload, Update]] | None = None
    release: Mapping[str, Any] | None = None
    spent: Callable[[Payload], Sequence[Mapping[str, Any]]] | None = None
    follows_device: bool = False

    def __post_init__(self) -> None:
        for name, arguments in SERVER_HOOKS.items():
            hook = vars(self)[name]
            if hook is not None:
                check_signature(hook, arguments, f"`{name}` of a server rule", name=name)


@dataclass(frozen=True)
class Traits:
    """Properties of a rule that engines, other rules, aggregates and selections need to know.

    Attributes:
        stackable: clients with this rule may train together, their weights stacked (the engine `vectorized`).
        anchored: `grad` needs `context.at_anchor`, the gradients of the same batch at the anchor.
        proximal: mu of a term mu/2 ||w - w^t||^2 in the local objective. It is stored only here: hooks that need it
            receive these traits, and FedNova reads it from them.
        replaces_update: `finish` sends another update, which is not a sum of the gradients of the steps.
        corrects: it corrects the steps with a stored estimate of the client's drift. Two such rules would each treat
            the other's correction as drift.
        all_weights: it needs all weights at the server: it sends trees of them, or stores them there.
        invariant: it keeps a sum over all clients, which is wrong if a client appears twice in a round.
        full_gradients: it takes gradients over all examples of a client (`LocalProblem.gradient`).
        features: it compares one feature vector per example, which not every task has.
        reweighs: it weighs the classes in the task's loss.
        releases: its `after` adds noise, so it is called in every round, also in one in which nobody was asked or no
            reply was accepted: such a round would otherwise tell that nobody was there. The update is 0 then.
        hides_loss: clients send no local loss.
        discloses: what leaves the clients beyond model updates, as sentences for the run's report.
    """

    stackable: bool = False
    anchored: bool = False
    proximal: float = 0.0
    replaces_update: bool = False
    corrects: bool = False
    all_weights: bool = False
    invariant: bool = False
    full_gradients: bool = False
    features: bool = False
    reweighs: bool = False
    releases: bool = False
    hides_loss: bool = False
    discloses: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClientRule:
    """How an algorithm modifies local training: hooks, and its traits. A hook that is None does nothing.

    With `Traits.stackable`, no hook draws random numbers or changes a tensor that it receives, and `grad` is called
    once for all clients, with a leading client axis: docs/add-an-algorithm.md, "Clients that train together".
    """

    loss: LossHook | None = None
    """(loss, outputs, targets, context) -> the loss to descend."""

    grad: GradHook | None = None
    """(gradients, parameters, context) -> the gradients to step along."""

    finish: FinishHook | None = None
    """(parameters after training, context) -> (more fields of the reply, what changes in the client's state).
    A field called `update` replaces the difference of the weights."""

    expect: Callable[[TreeSpec], Mapping[str, SchemaField]] | None = None
    """Spec of the model -> the schema of the fields of `finish`."""

    name: str = ""
    """The name of the rule in errors, and in a chain."""

    references: Callable[[LocalContext], Mapping[str, Tree]] | None = None
    """Context -> models, as trees by name, whose features `loss` finds in `context.features`."""

    start: Callable[[LocalContext], None] | None = None
    """Runs before the first step. It stores what the other hooks need in `context.saved`."""

    risk: RiskHook | None = None
    """(outputs, targets, context) -> the loss of a batch, instead of the task's mean (weights of FedIR)."""

    solve: Callable[[LocalContext], Solved] | None = None
    """Replaces all steps of the local optimizer."""

    limit: LimitHook | None = None
    """(norms, payload) -> (factors, fields): makes updates smaller, those of one or several clients at once.

    It gets their Euclidean norms over all trainable leaves, float64 [A], and what the server sent to all of them. It
    returns what each update is multiplied by, float64 [A], and further numbers of each reply, [A] by name."""

    fields: Mapping[str, How] = field(default_factory=dict)
    """How the fields of `finish` are aggregated: "mean" (weighted like updates) or "sum"; see `update.more`."""

    metrics: Mapping[str, Bound] = field(default_factory=dict)
    """The bounds of the metrics in the `sums` of `solve`, by name."""

    server_rules: Mapping[str, ServerRule] = field(default_factory=dict)
    """What the rule does at the server, by its name; several rules run in this order."""

    ops: Mapping[str, Callable[[Any], Op]] = field(default_factory=dict)
    """Operations that the server rules ask for: functions of the algorithm's `Train`, which does not exist yet when
    the rule is made."""

    check: Callable[[LocalSettings], None] | None = None
    """Raises `ConfigError` if the local settings do not fit the rule."""

    fits: Callable[[FederationInfo, ModelSpec], None] | None = None
    """Raises `ConfigError` if the rule does not fit the number of classes or the layers."""

    traits: Traits = Traits()
    """The properties of the rule; see `Traits`."""

    # The rules of a chain. `dataclasses.replace` leaves it out, because the result is a different rule.
    links: tuple[ClientRule, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        own = list(takewhile(lambda kind: kind is not ClientRule, type(self).__mro__))
        for part in fields(ClientRule) if own else ():
            # The default of the field would hide what a subclass defines, such as a method `grad`.
            found = next((vars(kind)[part.name] for kind in own if part.name in vars(kind)), None)
            if found is not None and vars(self)[part.name] in (part.default, {}):
                bound = found.__get__(self) if callable(found) or isinstance(found, staticmethod) else found
                object.__setattr__(self, part.name, bound)
        for name, arguments in HOOKS.items():
            hook = vars(self)[name]
            if hook is not None:
                check_signature(hook, arguments, f"`{name}` of {self.called}", name=name)

    @property
    def called(self) -> str:
        """The name of the rule in errors."""
        if type(self) is not ClientRule:
            return type(self).__name__
        return f"the client rule '{self.name}'" if self.name else "a client rule without a name"

    @cached_property
    def plain(self) -> bool:
        """Whether it does nothing."""
        return self == ClientRule(name=self.name)

    @cached_property
    def steps_plainly(self) -> bool:
        """Whether no hook sees a client's steps or weights; `limit` sees norms alone."""
        return all(
            vars(self)[hook] is None for hook in HOOKS if hook not in ("limit", "expect", "check", "fits")
        )


def plain() -> ClientRule:
    """Plain local training, as in FedAvg."""
    return ClientRule(name="plain")


Mu = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="weight of the proximal term; 0 is FedAvg; Ghaemi 2022 uses 3",
    ),
]


def proximal(*, mu: Mu = 0.01) -> ClientRule:
    """FedProx: F_k(w) + mu/2 ||w - w^t||^2 (ghaemi2022 Algorithm 2), whose gradient adds mu (w - w^t).

    >>> context = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, 0.1, 1)
    >>> proximal(mu=2.0).grad([torch.tensor([0.0])], [torch.tensor([1.5])], context)
    [tensor([1.])]
    """
    if not mu:
        return ClientRule()
    traits = Traits(stackable=True, proximal=mu)
    return ClientRule(name="proximal", grad=partial(proximal_grad, traits=traits), traits=traits)


def proximal_grad(
    gradients: Tensors, parameters: Tensors, context: LocalContext, *, traits: Traits
) -> Tensors:
    """g + mu (w - w^t), where mu is the rule's `traits.proximal`."""
    away = torch._foreach_sub(parameters, context.anchor)
    return list(torch._foreach_add(gradients, away, alpha=traits.proximal))
