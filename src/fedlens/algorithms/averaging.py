"""The averaging family: one loop with four components. A paper's file fills them.

| slot | question |
|---|---|
| select | who takes part? |
| client | how is the local objective modified? |
| aggregate | how do replies become one update? |
| server | how does the update move the model? |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from fedlens.aggregate.mean import Aggregate, Mean
from fedlens.aggregate.server_steps import ServerSGD, ServerStep, steps_in_place
from fedlens.algorithms import component_calls as calls
from fedlens.algorithms import fit
from fedlens.algorithms.client_evaluation import (
    EVALUATE_OWN,
    EvaluateOwn,
    OwnModel,
    Who,
    asked,
    disclosure,
    everywhere,
    refuse_too_many,
    refuse_unmeasured,
)
from fedlens.algorithms.client_sampling import (
    Select,
    Uniform,
    candidates,
    refuse_all_dropped,
    straggling,
)
from fedlens.algorithms.private_averaging import (
    example_notes,
    privacy_curves,
    privacy_notes,
    private_parts,
)
from fedlens.base.signatures import check_methods, follows_device, place_of
from fedlens.core.algorithm_base import AlgorithmBase, OwnCurve
from fedlens.core.input_checks import FIRST_VISITS, Inputs
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    FederationInfo,
    ModelSpec,
    Op,
    Payload,
    Request,
    Round,
    RoundContext,
    State,
)
from fedlens.core.reduction import Update
from fedlens.core.schema import AskedField, NumberField, Schema, TreeField
from fedlens.core.tree import Leaf, Tree, TreeSpec, part, select, tree_of, zeros_like
from fedlens.local.example_privacy import PrivateSteps
from fedlens.local.rate_scales import model_scales
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train, asked_rate
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.privacy.settings import PrivacySettings
from fedlens.tasks.central_evaluation import Evaluate, central_metrics
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task


@dataclass(frozen=True)
class Parts:
    """The input of every algorithm: the model, the task, the settings, and the components that the settings name.

    `measure` names the data that the server evaluates on: `@test`, and `@validation` or `@train` if asked for.
    """

    model: ModelSpec
    task: Task
    local: LocalSettings
    federation: FederationInfo
    measure: Sequence[str] = ("@test",)
    evaluation_batch: int = 500
    measure_clients: Who | None = None  # None: all clients if the algorithm makes personal models, else none
    select: Select | None = None
    client: ClientRule | None = None
    aggregate: Aggregate | None = None
    server: ServerStep | None = None
    evaluation_size: EvaluationSize = FULL
    test_peers: Who | None = None  # how many peers' models are measured on the test data
    selection_seed: int = 0  # of what an algorithm draws once a run, such as a graph of peers
    privacy: PrivacySettings | None = None  # of the averaging family; others are refused
    rounds: int | None = None  # None in a check without data, which solves no epsilon

    @property
    def slots(self) -> dict[str, Any]:
        """The components by the names of their tables; None for those that the algorithm decides."""
        return {
            "select": self.select, "client": self.client, "aggregate": self.aggregate, "server": self.server
        }  # fmt: skip

    @cached_property
    def spec(self) -> dict[str, Leaf]:
        """The spec of the model's tree."""
        return self.model.leaves


@dataclass(frozen=True)
class Averaging(AlgorithmBase):
    """The round loop of algorithms that average.

    Its state: `model`, the global tree; `server`, the state of the server step; and, if there are any, `aggregate`,
    the state of the aggregate, and `rules`, the server states of client rules.
    """

    parts: Parts
    select: Select
    train: BatchedTrain
    aggregate: Aggregate
    server: ServerStep
    rule: ClientRule = field(default_factory=ClientRule)
    personal: frozenset[str] = frozenset()
    more_ops: Mapping[str, Op] = field(default_factory=dict)  # of the client rule and the aggregate
    tune: Train | None = None
    own_model: OwnModel | None = None
    # The paper's components that the user's replace.
    replaced: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training, evaluation, and further operations of the client rule and the aggregate."""
        parts = self.parts
        size = parts.evaluation_batch
        evaluate = Evaluate(parts.model, parts.task, size, parts.evaluation_size)
        own = EvaluateOwn(
            parts.model, parts.task, size, self.personal, self.tune, parts.evaluation_size, self.own_model
        )
        return {"train": self.train, "evaluate": evaluate, EVALUATE_OWN: own, **self.more_ops}

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates, as sentences for the run's report."""
        return (
            *self.rule.traits.discloses,
            *self.aggregate.discloses,
            *((disclosure(self.parts.task, self.parts.federation),) if self.measured != "none" else ()),
        )

    @property
    def protects(self) -> bool:
        """Whether `[privacy]` is set: a subclass or a client's own model sends or measures more."""
        own = self.tune is not None or self.own_model is not None
        return self.parts.privacy is not None and type(self) is Averaging and not own

    @property
    def private(self) -> bool:
        """Whether clients are hidden by noise and cohorts of the system's entropy; seeded ones promise nothing."""
        privacy = self.parts.privacy
        return self.protects and privacy is not None and privacy.hides_clients and not privacy.seeded

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the aggregate, and whom `[privacy]` trusts."""
        privacy, clients = self.parts.privacy, len(self.parts.federation.eligible)
        if privacy is not None and not privacy.hides_clients:
            return (*self.aggregate.notes, *example_notes(privacy, self.parts.federation))
        return (*self.aggregate.notes, *(() if privacy is None else privacy_notes(privacy, clients)))

    @property
    def measured(self) -> Who:
        """Which clients are evaluated on their own held-out data."""
        own = self.personal or self.tune or self.own_model
        return self.parts.measure_clients or ("all" if own else "none")

    def clients_per_round(self, federation: FederationInfo) -> int:
        """The size of a cohort. Raises `ConfigError` if the population is smaller."""
        return self.select.size(federation)

    def candidates(self, federation: FederationInfo) -> Sequence[int]:
        """Those that can be selected; all that hold data where each client tunes the model before it is measured."""
        if self.tune is not None:
            return super().candidates(federation)
        return candidates(self.select, federation)

    @property
    def full_gradients(self) -> bool:
        """Whether the client rule takes gradients over all examples."""
        return self.rule.traits.full_gradients

    @property
    def needs_replies(self) -> bool:
        """Whether the aggregate does, and no rule releases noise."""
        return not (self.aggregate.asked_without_replies or self.rule.traits.releases)

    @property
    def blind(self) -> bool:
        """Whether the aggregate is."""
        return self.aggregate.blind

    @property
    def release(self) -> Mapping[str, Any] | None:
        """What the rule that adds noise releases."""
        return next((rule.release for rule in self.rule.server_rules.values() if rule.release), None)

    def client_release(self, client: int) -> Mapping[str, Any] | None:
        """Its local steps, where these add noise to the gradients of examples."""
        steps, size = self.rule.solve, int(self.parts.federation.sizes[client])
        return steps.release(size, self.parts.local) if isinstance(steps, PrivateSteps) else None

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """What a private run has spent, and an adaptive clip."""
        return privacy_curves(self.parts.privacy)

    def spent(self, state: State) -> Sequence[Mapping[str, Any]]:
        """What the server rules have released in the round that made this state."""
        rules = state.get("rules", {})
        spending = {name: rule.spent for name, rule in self.rule.server_rules.items() if rule.spent}
        return [release for name, spent in spending.items() for release in spent(rules[name])]

    @property
    def follows_device(self) -> bool:
        """Whether all its components at the server do."""
        return (
            type(self) is Averaging
            and follows_device(self.aggregate, ["init", "aggregate", "exchange"])
            and follows_device(self.server, ["init", "step", "step_in_place"])
            and all(server_rule.follows_device for server_rule in self.rule.server_rules.values())
        )

    def takes(self, op: str) -> Schema | None:
        """What `round` sends with its aggregate's asks, its server rules before that, and `evaluate` to clients.

        None for all training with a server rule that does not say what it sends.
        """
        parts, tune = self.parts, self.tune
        if op == EVALUATE_OWN and self.measured != "none":
            return asked(self._sent_spec, asked_rate(tune.settings, parts.rounds) if tune else {})
        fields: dict[str, AskedField] = {
            "model": TreeField.like(self._sent_spec),
            **asked_rate(parts.local, parts.rounds),
        }
        for rule in self.rule.server_rules.values():
            if op in rule.asks:
                return Schema(fields if rule.asks[op] == "shared" else {})
            if rule.shared is not None and rule.takes is None:
                return None
            fields |= rule.takes(parts.spec, parts.federation) if rule.takes else {}
        if parts.local.stragglers:
            fields["work"] = NumberField(above=0, most=parts.local.work, whole=True)
        training = Schema(fields, optional=frozenset({"work"}))
        return self.aggregate.takes(op, training, parts.federation.clients, parts.rounds)

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The model's initial weights. Raises `ConfigError` if the cohort is larger than the population."""
        self.select.size(federation)
        tree = {**tree_of(model.build()), **model.fixed}
        weights = self._weights(tree)
        state: dict[str, Any] = {"model": tree, "server": calls.first_state(self.server.init, weights)}
        if kept := calls.first_state(self.aggregate.init, weights, federation):
            state["aggregate"] = kept
        rules = {
            name: calls.begun_by(name, server_rule, weights, federation)
            for name, server_rule in self.rule.server_rules.items()
        }
        return {**state, "rules": rules} if rules else state

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Runs one round: select, prepare, train, aggregate, step. Without an update, the model is kept."""
        cohort = self.select.cohort(ctx)
        rules: dict[str, Any] = dict(state.get("rules", {}))
        rate = self.parts.local.shared_rate(ctx.round, ctx.rounds)
        shared: dict[str, Any] = {"model": self._sent(state), **rate}
        for name, server_rule in self.rule.server_rules.items():
            if server_rule.prepare is not None:
                prepared = yield from calls.prepared_by(name, server_rule, rules[name], shared, cohort, ctx)
                if prepared is None:
                    # Keep what an earlier rule has prepared, such as a target that every client was asked for.
                    return self._without_update(state, rules, ctx)
                rules[name] = prepared
            # A new mapping: asks that are already out keep the payload that they were sent with.
            shared = {**shared, **calls.shared_by(name, server_rule, rules[name], shared, ctx)}
        work = straggling(self.parts.local, cohort, ctx)
        requests = [
            Request(client, {"work": work[slot]} if slot in work else {})
            for slot, client in enumerate(cohort)
            if work.get(slot) != 0
        ]
        if not requests and not self.aggregate.asked_without_replies:
            return self._without_update(state, rules, ctx)
        ask = Ask(
            "train",
            requests,
            shared,
            expect=self.train.expect(self.parts.spec, most=ctx.federation.largest),
        )
        update = yield from calls.exchanged(self.aggregate, ask, self.rule, ctx, state.get("aggregate", {}))
        if update is None:
            return self._without_update(state, rules, ctx)
        return self._moved(state, rules, update, ctx)

    def _without_update(self, state: State, rules: dict[str, Any], ctx: RoundContext) -> State:
        """The state after a round without an update: the same model, but where a rule releases noise."""
        if not self.rule.traits.releases:
            return {**state, "rules": rules} if rules else state
        zero = Update(zeros_like(self._weights(state["model"])), {}, {}, dict.fromkeys(self.rule.fields, 0.0))
        return self._moved(state, rules, zero, ctx)

    def _moved(self, state: State, rules: dict[str, Any], update: Update, ctx: RoundContext) -> State:
        new: dict[str, Any] = dict(state)
        if update.state is not None:
            # The state may keep the update, so the server step may not write into it.
            new["aggregate"], update = update.state, replace(update, donated=None)
        for name, rule in self.rule.server_rules.items():
            if rule.after is not None:
                # The rule may keep the update, so the server step may not write into it.
                update = replace(update, donated=None)
                rules[name], update = calls.updated_by(name, rule, rules[name], update, ctx)
                update = replace(update, donated=None)
        new |= self._step(state, update, ctx)
        return {**new, "rules": rules} if rules else new

    def _step(self, state: State, update: Update, ctx: RoundContext) -> State:
        server = self.server
        donated = update.donated is update.update  # and not what an aggregate or a rule has put in its place
        step = server.step_in_place if donated and steps_in_place(server) else server.step
        # Kept states share these tensors with later ones.
        before = {"weights": self._weights(state["model"]), "state": state["server"]}
        inputs = Inputs(
            before if donated else {**before, "update": update.update}, contents=ctx.round <= FIRST_VISITS
        )
        stepped: Any = step(before["weights"], update.update, before["state"])
        inputs.refuse(f"`{step.__name__}` of {type(server).__name__}", place_of(step))
        if (
            not isinstance(stepped, tuple)
            or len(stepped) not in (2, 3)
            or not all(isinstance(s, Mapping) for s in stepped)
        ):
            raise calls.wrong(step, stepped, "two mappings: the new weights and the new state")
        weights, kept, *own = stepped
        ctx.metrics.update(*own)
        # Only trainable weights go through the server step; statistics and counters are replaced.
        return {"model": {**state["model"], **weights, **update.buffers, **update.counters}, "server": kept}

    def _weights(self, tree: Tree) -> dict[str, Tensor]:
        """The weights that the server step moves: trainable and not personal."""
        names = part(self.parts.spec, "weight", trainable=True)
        return select(tree, [name for name in names if name not in self.personal])

    def _sent(self, state: State) -> dict[str, Tensor]:
        """The global tree as clients get it: without leaves that stay at clients, and those that never change."""
        sent = self._sent_spec
        return {name: value for name, value in state["model"].items() if name in sent}

    @property
    def _sent_spec(self) -> TreeSpec:
        spec, model = self.parts.spec, self.parts.model
        at_clients = self.personal | self.parts.task.local_leaves(spec)
        return {name: leaf for name, leaf in spec.items() if name not in {*at_clients, *model.fixed}}

    @property
    def evaluation_asks(self) -> int:
        """The number of asks of `evaluate`: one to the server, one to the clients, or both."""
        return (not self.personal) + (self.measured != "none")

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """Evaluates centrally, and at the clients if set.

        A model with personal leaves has no central evaluation: there is no single model to test.
        """
        parts, who, metrics = self.parts, self.measured, {}
        varying = self.model(state)[0].varying
        if not self.personal:
            sent = parts.model.sent(state["model"])
            metrics = yield from central_metrics(sent, ctx.federation, parts.task, parts.measure, varying)
        if who == "none":
            return metrics
        shared: dict[str, Any] = {"model": self._sent(state), **varying}
        if self.tune is not None:
            shared |= self.tune.settings.shared_rate(max(ctx.round, 1), ctx.rounds)
        pooled = bool(self.personal) or not parts.measure  # nothing else measures the model
        at_clients = yield from everywhere(shared, ctx, parts.task, who, pooled)
        return {**metrics, **at_clients}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The global model."""
        return self.parts.model, state["model"]

    @property
    def training_op(self) -> str | None:
        """Local training, if replies hold the whole difference between the global and the local weights."""
        complete = not self.rule.traits.replaces_update and not self.personal and not self.blind
        return "train" if complete and not self.parts.task.local_leaves(self.parts.spec) else None

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models, if they hold none."""
        if self.blind:
            return "the server sees the sum over the clients alone"
        return "each client keeps a part of the model" if self.personal else "clients send something else"

    def local_model(self, state: State, reply: Payload) -> Tree:
        """w_k = w^t - tau Delta_k, with tau = 1 unless updates are normalized, and the client's statistics."""
        tau, before = reply.get("tau", 1.0), state["model"]
        weights = {name: before[name] - tau * update for name, update in reply["update"].items()}
        return {**weights, **reply["buffers"], **reply["counters"]}


def averaging(
    parts: Parts,
    *,
    select: Select | None = None,
    client: ClientRule | None = None,
    aggregate: Aggregate | None = None,
    server: ServerStep | None = None,
    personal: frozenset[str] = frozenset(),
    own_model: OwnModel | None = None,
) -> Averaging:
    """Makes an averaging algorithm from its components.

    A selection, an aggregate or a server step in the user's settings replaces that of the paper. Client rules in the
    user's settings are added to those of the paper, because they define the algorithm.

    Args:
        parts: the objects that the settings define.
        select, client, aggregate, server: the paper's components; by default those of FedAvg.
        personal: leaves of the model that stay at the clients; those that never change are left out.
        own_model: what is measured at each client: its state -> the leaves of its own model, {} before its first
            visit. It stays at the client; the test data are measured with the global model.

    Raises `ConfigError` with the reason if the components do not fit together.
    """
    plain_mean = Mean("examples" if parts.privacy is None else "uniform")
    aggregation = parts.aggregate or aggregate or plain_mean
    choose = parts.select or select or Uniform()
    step = parts.server or server or ServerSGD()
    own = client or ClientRule()
    components = (
        ("selection", choose),
        ("aggregate", aggregation),
        ("server step", step),
        ("client rule", own),
    )
    for kind, component in components:
        fit.refuse_foreign(component, kind)
        check_methods(component, kind)
    rule = fit.joined(own, parts.client)
    if rule.check is not None:
        rule.check(parts.local)
    scales = model_scales(parts.local, parts.model)
    fit.refuse_steep(rule, parts.local, max(scales, default=1.0))
    if parts.privacy is not None:
        rule, aggregation, choose = private_parts(parts, parts.privacy, rule, aggregation, choose, personal)
    if scales:
        fit.refuse_scaled(rule, aggregation)
    fit.refuse_task(rule, parts.task)
    if rule.fits is not None:
        rule.fits(parts.federation, parts.model)
    fit.refuse_twice(rule, aggregation, choose, parts.federation)
    fit.refuse_counted_twice(choose, aggregation, parts.local, parts.federation)
    refuse_all_dropped(parts.local, choose, parts.federation)
    if personal:
        personal = frozenset(name for name in personal if not parts.spec[name].fixed)
        fit.refuse_personal(rule, parts.federation, parts.measure, parts.measure_clients)
    at_clients = (parts.measure_clients or ("none" if own_model is None else "all")) != "none"
    if at_clients:
        what = "the model" if own_model is None else "a model of its own"
        refuse_unmeasured(parts.federation, f"`evaluation.clients` measures {what} at each client")
        refuse_too_many(parts.federation, parts.measure_clients)
    if aggregation.normalized:
        fit.refuse_unequal(rule, parts.local)
    fit.refuse_unprepared(aggregation, rule)
    fit.refuse_unsummed(aggregation, rule, choose, bool(personal), at_clients)
    fit.refuse_server_data(aggregation, rule, parts.federation, personal)
    fit.refuse_server_evaluation(aggregation, parts.task, parts.spec, parts.evaluation_size)
    train = BatchedTrain(
        parts.model,
        parts.task,
        parts.local,
        rule,
        aggregation.weighting,
        normalized=aggregation.normalized,
        personal=personal | parts.task.local_leaves(parts.spec),
    )
    if aggregation.blind:
        aggregation = aggregation.fitted(train, choose.size(parts.federation), parts.federation)
    more = {name: make(train) for name, make in {**rule.ops, **aggregation.ops}.items()}
    papers: dict[str, Any] = {"aggregate": aggregate or plain_mean, "server": server or ServerSGD()}
    replaced = {slot: part for slot, part in papers.items() if parts.slots[slot] is not None}
    return Averaging(
        parts, choose, train, aggregation, step, rule, personal, more, own_model=own_model, replaced=replaced
    )
