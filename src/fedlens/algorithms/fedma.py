"""FedMA, federated matched averaging: Wang et al. 2020 (arXiv 2002.06440)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import refuse_repeats
from fedlens.algorithms.registry import refuse_unused
from fedlens.algorithms.splitfed import refuse_unfit
from fedlens.core.algorithm_base import AlgorithmBase, OwnCurve
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    FederationInfo,
    ModelSpec,
    Op,
    Payload,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
    Steps,
)
from fedlens.core.schema import Schema, TensorField, TreeField
from fedlens.core.tree import Tree
from fedlens.local import matching
from fedlens.local.knowledge_transfer import SERVER
from fedlens.local.layer_by_layer import MatchLayer, TrainLayers, average_last
from fedlens.models.chains import chain_layers, widths


@dataclass(frozen=True, kw_only=True)
class FedMA(Averaging):
    """The rounds of FedMA: each is one pass over the layers of the network.

    Its state besides that of averaging: `members`, the clients of the last pass; and `units`, for each hidden layer,
    int64 [members, units], which global units theirs are. Before the first pass there is no member, and one row.
    """

    prior: matching.UnitPrior
    own_start: bool
    grows = True
    takes = AlgorithmBase.takes  # none: no schema of fixed shapes holds layers that grow

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers with weights. Raises `ConfigError` if the model is not a chain; not known before the real one."""
        return tuple(chain_layers(self.parts.model.build(initial=False)))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The width of each hidden layer at a client."""
        return tuple(widths(self.parts.model.build(initial=False)))

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """The operations of a pass, and those of evaluation."""
        evaluation = {name: op for name, op in super().ops.items() if name != "train"}
        train = TrainLayers(self.train, self.layers)
        return {"train-layers": train, "match": MatchLayer(self.prior), "average": average_last, **evaluation}

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates."""
        counts = (
            "Each client sends how many examples of each class it has, in every round that it takes part in."
        )
        return (*super().discloses, counts)

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """The widths."""
        lines = {f"units_{name}": f"layer {name}" for name in self.layers[:-1]}
        return (OwnCurve("units", "each hidden layer", lines),) if lines else ()

    @property
    def training_op(self) -> str | None:
        """None: clients send layers."""
        return None

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models."""
        return "each client sends its layers one by one, as letters to the server"

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The initial network, of which each client has all units."""
        units = [torch.arange(width)[None] for width in self.widths]
        return {**super().init(model, federation), "members": [], "units": units}

    def round(self, state: State, ctx: RoundContext) -> Round:
        """A pass. If no client is left in the middle of it, the network is kept."""
        rate = self.parts.local.shared_rate(ctx.round, ctx.rounds)
        requests = [Request(k, self._start(state, k)) for k in self.select.cohort(ctx)]
        units: dict[Any, list[Tensor]] = {request.client: [] for request in requests}
        tree: dict[str, Tensor] = {}
        shared: dict[str, Any] = dict(rate)
        for at, name in enumerate(self.layers):
            sent = yield from self._trained(requests, {**shared, "layer": at}, self._model(tree, frozen=True))
            if not sent:
                return state
            units = {client: units[client] for client in sent}
            if at == len(self.layers) - 1:
                break
            (answer,) = yield Ask("match", [Request(SERVER)], deliver=True)
            assert isinstance(answer, Reply)  # a failure there has ended the run
            layer = dict(answer.payload)
            for mine, row in zip(units.values(), layer.pop("units"), strict=True):
                mine.append(row)
            requests = [Request(client, {"units": mine[-1]}) for client, mine in units.items()]
            shared, tree = {**rate, "before": layer}, tree | matching.named(layer, name)
        kept = self._kept(state, units, tree)
        (answer,) = yield Ask("average", [Request(SERVER)], {"kept": kept}, deliver=True)
        assert isinstance(answer, Reply)
        rows = [torch.stack(of_layer) for of_layer in zip(*units.values(), strict=True)]
        return {
            **state,
            "model": tree | matching.named(answer.payload, self.layers[-1]),
            "members": list(units),
            "units": rows,
        }

    def _trained(self, requests: Sequence[Request], shared: Payload, model: ModelSpec) -> Steps:
        """Has these clients train and send a layer of this model; returns those that did."""
        prefix = f"{self.layers[shared['layer']]}."
        sent = {n.removeprefix(prefix): leaf for n, leaf in model.leaves.items() if n.startswith(prefix)}
        fields: dict[str, Any] = {"layer": TreeField.like(sent)}
        if shared["layer"] == len(self.layers) - 1:
            fields["counts"] = TensorField((model.classes,), torch.int64, low=0)
        answers = yield Ask(
            "train-layers", requests, {**shared, **model.varying}, expect=Schema({}), letter=Schema(fields)
        )
        return [int(answer.client) for answer in answers if isinstance(answer, Reply)]

    def _start(self, state: State, client: int) -> Payload:
        """What a client starts a pass from: its own initial network, or its units of the global one."""
        if self.own_start and not state["members"]:
            return {}
        return {"model": matching.narrow(state["model"], self.layers, self._units(state, client))}

    def _units(self, state: State, client: int) -> list[Tensor]:
        """The client's units of each hidden layer; of one that missed the last pass those that most clients share."""
        if client in state["members"]:
            return [units[state["members"].index(client)] for units in state["units"]]
        return [
            torch.bincount(units.flatten()).argsort(descending=True, stable=True)[: units.shape[1]]
            for units in state["units"]
        ]

    def _kept(self, state: State, units: Mapping[int, Sequence[Tensor]], tree: Tree) -> matching.Layer:
        """The global last layer behind the new units: the mean of what each client's units had of it."""
        last = matching.layer_in(state["model"], self.layers[-1])
        if not self.widths:
            return last
        old, new = (len(network[f"{self.layers[-2]}.weight"]) for network in (state["model"], tree))
        carried = [
            matching.widen_inputs(
                matching.narrow_inputs(last, self._units(state, client)[-1], old), mine[-1], new
            )
            for client, mine in units.items()
        ]
        return matching.mean_rows(carried, torch.ones(len(carried), len(last["weight"])))

    def _model(self, tree: Tree, frozen: bool = False) -> ModelSpec:
        """The network whose first layers are those of this tree; they may be `frozen`."""
        done = [name for name in self.layers[:-1] if f"{name}.weight" in tree]
        hidden = [len(tree[f"{name}.weight"]) for name in done] + list(self.widths[len(done) :])
        keys: dict[str, Any] = {"hidden_widths": hidden} if hidden != list(self.widths) else {}
        keys |= {"freeze": done} if done and frozen else {}
        return self.parts.model.varied(prepare=keys) if keys else self.parts.model

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The evaluation of averaging, and the width of each hidden layer."""
        metrics = yield from super().evaluate(state, ctx)
        hidden = {n: len(state["model"][f"{n}.weight"]) for n in self.layers[:-1]}
        return {**metrics, **{f"units_{name}": float(width) for name, width in hidden.items()}}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The global network, with its widths."""
        return self._model(state["model"]), state["model"]


def fedma(
    parts: Parts,
    *,
    init: Annotated[
        Literal["own", "common"],
        Field(description="what clients start from: initial weights of their own, or the same for all"),
    ] = "own",
    sigma: Annotated[
        float, Field(gt=0, description="variance of a client's unit around its global unit")
    ] = 1.0,
    sigma0: Annotated[float, Field(gt=0, description="variance of global units around 0")] = 1.0,
    gamma: Annotated[float, Field(gt=0, description="mass of new units: more of it lets layers grow")] = 7.0,
    passes: Annotated[
        int,
        Field(ge=0, description="how often each client's units are matched again, the others as they are"),
    ] = 5,
    max_width: Annotated[
        float | None,
        Field(ge=1, description="the largest width of a hidden layer, in multiples of that in [model]"),
    ] = None,
) -> FedMA:
    """FedMA: units of the clients' networks are matched before they are averaged, layer by layer.

    A round is a pass over the layers. Clients train and send their first layer. The server matches their
    units, one client's to another's or to a new one, and averages the matched ones, so a layer may grow.
    Clients freeze the global layer in place of theirs, permute and pad the next one to fit, train the others
    and send the next. The last layer has a unit a class, and is averaged class by class.

    Fixes: A hidden unit has no fixed place: networks that compute the same with permuted units have a mean
        that computes nothing. Clients that start apart, or train long, cannot be averaged weight by weight.

    Equation:
        client j:  min F_j over the layers n, n + 1, ...,  with 1 ... n - 1 frozen;  sends layer n
        server:    a unit w of a client, as one that m of J clients share, with the sum s, r = sigma / sigma0:
                   gain = |w + s|^2 / (sigma (r + m + 1)) - |s|^2 / (sigma (r + m)) + 2 log(m / (J - m))
                   and as new unit k:  |w|^2 / (sigma (r + 1)) + 2 log(gamma / J) - 2 log k
                   the assignment of most gain, client by client; then the unit is s / (r + m)
        last:      row c = sum_j n_jc / n_c row_jc

    Source: Wang et al. 2020 (arXiv 2002.06440), Algorithm 1, with its communication by rounds; the matching
        is BBP-MAP of Yurochkin et al. 2019 (arXiv 1905.12022), Proposition 2. The papers' code counts log(m /
        (J - m)) once, and popularity up to 10. As there, a layer is the posterior mean; Algorithm 1 prints
        the plain mean.

    Weighting: Uniform over the clients in hidden layers; in the last one by their examples of each class. A
        class that nobody has keeps its global row.

    State: The server keeps which global units the clients of the last round had: with these they start their
        next round, in the widths of [model]; others start with the units that most clients share. One that
        misses an ask is out until the next round.

    Sent: Each layer up and down once a round, and from the second round on a client's part of the global
        network down. The server learns each client's layers, as FedAvg's does, and its number of examples of
        each class. Clients learn the global layers but the last, nothing of one another.

    Composes: Any `[select]` that does not choose a client twice. `[client]`, `[aggregate]` and `[server]` are
        refused, and of `[local]` `examples`, `lr_scale` and stragglers. The model is one sequence of
        convolutions and linear layers with pointwise functions, pooling, dropout and flattening between them.
        Only for classification without class weights.

    Ranges:
        local.epochs: of each training: a round has as many as the network has layers with weights.
        sigma: 1, as in the authors' code.
        sigma0: 1, as there. One client's units are halved in every round; a large value averages without
            shrinking.
        gamma: 7, as there. Up to J / (J - 1) copies of a network match without growth, for J clients.
        passes: 5, as there.
        max_width: 1 for layers that do not grow; 2 where clients are many.
        init: "common" is the control: clients begin as FedAvg's do. With `model.weights` all begin from that
            file.

    Try: model=mlp model.hidden=32 local.epochs=1 rounds=3

    Not when: The model has normalization or residual sums; or clients train together from common weights with
        few local steps: units keep their places, and FedAvg sends less in one exchange.

    Tests: tests/identity/test_fedma.py tests/identity/test_matching.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(fedma).model_fields)
        ['init', 'sigma', 'sigma0', 'gamma', 'passes', 'max_width']
    """
    refuse_unused("fedma", parts.slots, parts.local)
    refuse_unfit(parts, "fedma")
    made = averaging(parts)
    refuse_repeats(made.select, parts.federation, "fedma")
    prior = matching.UnitPrior(sigma, sigma0, gamma, passes, max_width)
    return FedMA(**vars(made), prior=prior, own_start=init == "own")
