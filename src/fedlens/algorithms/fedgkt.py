"""FedGKT, group knowledge transfer: He, Annavaram and Avestimehr 2020 (arXiv 2007.14513)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_evaluation import (
    EVALUATE_OWN,
    EvaluateOwn,
    Who,
    asked,
    disclosure,
    everywhere,
    refuse_too_many,
    refuse_unmeasured,
)
from fedlens.algorithms.client_sampling import Select, Uniform, candidates, refuse_repeats
from fedlens.algorithms.registry import refuse_unused
from fedlens.algorithms.splitfed import refuse_unfit
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    FederationInfo,
    ModelSpec,
    Op,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
)
from fedlens.core.schema import AskedField, Schema, TensorField, TreeField
from fedlens.core.tree import Leaf, Tree, spec_of, tree_of
from fedlens.core.wire.asked_fields import GroupField, ListField, RowField, TextField
from fedlens.local.knowledge_transfer import (
    LOGITS,
    SERVER,
    Distill,
    ShowExtractor,
    TrainAndSend,
    TrainServer,
    store,
)
from fedlens.local.settings import LocalSettings
from fedlens.local.training import asked_rate
from fedlens.models.registry import MODELS
from fedlens.models.stages import LayerName, stages
from fedlens.tasks.central_evaluation import Evaluate, central_metrics
from fedlens.tasks.task import Task


class Networks(NamedTuple):
    """The networks that a run trains, once they are known to fit together."""

    client: ModelSpec
    upper: ModelSpec  # of the server
    extractor: Mapping[str, Leaf]  # the client's leaves before the cut, which the composed model has too
    rest: frozenset[str]  # the client's leaves after it
    features: Tensor  # of one random image, [1, ...]


def networks(whole: ModelSpec, network: str | Mapping[str, Any], cut: str, task: Task) -> Networks:
    """Cuts both networks. Raises `ConfigError` if that cannot be done, or if they differ before the cut."""
    named: dict[str, Any] = {"name": network} if isinstance(network, str) else dict(network)
    factory = MODELS.find(name := str(named.pop("name", "")), where="algorithm.client.name")
    settings = read_settings(factory, named, "algorithm.client")
    whole = replace(whole, fixed={})  # what stays in one place needs no leaf to be left out
    own = replace(whole, factory=factory, name=name, settings=settings, prepare=None)
    (below, upper), (lower, rest) = stages(whole, cut), stages(own, cut)
    theirs, ours = below.build().eval(), lower.build(initial=False).eval()
    spec = spec_of(theirs)
    if spec == spec_of(ours):
        ours.load_state_dict(theirs.state_dict())
        image = task.random_inputs(1, whole.input_shape, torch.Generator().manual_seed(0))
        image = image.to(next(theirs.parameters()).dtype)
        with torch.no_grad():
            features = theirs(image)
            if isinstance(features, Tensor) and len(features) == 1 and torch.equal(features, ours(image)):
                return Networks(own, upper, spec, frozenset(spec_of(rest.build(initial=False))), features)
    raise ConfigError(
        f"up to '{cut}' the client's network differs from model.name = '{whole.name}', so what a client computes could "
        "not go through the server's layers",
        where="algorithm.client",
        hint="take two networks that begin alike, such as gkt-resnet8 and model.name = 'gkt-resnet56'",
    )


@dataclass(frozen=True)
class FedGKT(AlgorithmBase):
    """The rounds of FedGKT: clients train and send, the server trains, and clients store its logits.

    Its state: `model`, the whole large network, whose leaves before the cut stay at their initial values; and
    `trained`, the clients that have trained.
    """

    parts: Parts
    select: Select
    client: str | Mapping[str, Any]
    cut: str
    loss: Distill
    server: LocalSettings
    half: bool
    extractors: int
    tested_model = "the server's network behind some clients' layers"
    sends_single_examples = True

    @cached_property
    def networks(self) -> Networks:
        """Looked at when the algorithm is used, since its settings are also checked without the real model."""
        return networks(self.parts.model, self.client, self.cut, self.parts.task)

    @property
    def personal(self) -> frozenset[str]:  # type: ignore[override]
        """The extractor: each client's leaves before the cut."""
        return frozenset(self.networks.extractor)

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """Those of a round, and of measuring."""
        parts, found, size = self.parts, self.networks, self.parts.evaluation_batch
        own, rest, whole, sizes = found.client, found.rest, parts.model, parts.evaluation_size
        return {
            "train": TrainAndSend(
                whole, own, self.personal, rest, self.cut, parts.local, self.loss, self._dtype, size
            ),
            "server": TrainServer(found.upper, self.server, self.loss, size),
            "store": store,
            "extractor": ShowExtractor(whole, self.personal),
            "evaluate": Evaluate(whole, parts.task, size, sizes),
            EVALUATE_OWN: EvaluateOwn(whole, parts.task, size, self.personal, size=sizes),
        }

    @property
    def measured(self) -> Who:
        """Which clients are evaluated on their own held-out data: all, if they hold any out."""
        return self.parts.measure_clients or ("all" if len(self.parts.federation.holding_out) else "none")

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients."""
        return (
            f"Each client sends, in every round that it takes part in, the label of each of its images and what its "
            f"layers up to '{self.cut}' compute from it, from which images can be reconstructed.",
            "To test the model, the server reads the extractors of some clients, which counts no bytes.",
            *((disclosure(self.parts.task, self.parts.federation),) if self.measured != "none" else ()),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a round costs."""
        image, most = self._image_bytes, self.letter_bytes(self.parts.federation)
        return (
            f"each client sends {image / 2**10:,.3g} KiB of features for each of its images, in every round: up to "
            f"{most / 1e9:,.2g} GB a round for all clients that take part",
        )

    @property
    def evaluation_asks(self) -> int:
        """One for the extractors, one for each of them, and one of the clients if they are measured."""
        return 1 + self.extractors + (self.measured != "none")

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models."""
        return "a client's network is another than the server's"

    def clients_per_round(self, federation: FederationInfo) -> int:
        """The size of a cohort. Raises `ConfigError` if the population is smaller."""
        return self.select.size(federation)

    def candidates(self, federation: FederationInfo) -> list[int]:
        """Those that can be selected."""
        return list(candidates(self.select, federation))

    def letter_bytes(self, federation: FederationInfo) -> int:
        """The bytes of the features of the largest cohort."""
        largest = np.sort(federation.sizes[self.candidates(federation)])[-self.select.size(federation) :]
        return self._image_bytes * int(largest.sum())

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The initial weights. Raises `ConfigError` if the cohort is larger than the population."""
        self.select.size(federation)
        return {"model": {**tree_of(model.build()), **model.fixed}, "trained": []}

    def takes(self, op: str) -> Schema | None:
        """What `round` sends with "train" and "store", and `evaluate` to clients."""
        parts, logits = self.parts, GroupField({LOGITS: self._fields[LOGITS]})
        if op == EVALUATE_OWN and self.measured != "none":
            sent = parts.spec.keys() - parts.model.fixed.keys()
            return asked({name: parts.spec[name] for name in sent})
        asks: dict[str, dict[str, AskedField]] = {
            "train": asked_rate(parts.local, parts.rounds),
            "store": {"letters": ListField(RowField((TextField((SERVER,)), logits)), most=1)},
            "extractor": {},
        }
        return Schema(asks[op]) if op in asks else None

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Train and send; the server; store. Without a client that has sent, the server's network is kept."""
        cohort, rate = self.select.cohort(ctx), self.parts.local.shared_rate(ctx.round, ctx.rounds)
        ask = Ask(
            "train",
            [Request(k) for k in cohort],
            rate,
            expect=Schema({}),
            letter=Schema(self._fields, aligned=tuple(self._fields)),
        )
        sent = [int(answer.client) for answer in (yield ask) if isinstance(answer, Reply)]
        if not sent:
            return state
        upper = {name: value for name, value in state["model"].items() if name not in self.personal}
        back = Schema({LOGITS: self._fields[LOGITS]})
        ask = Ask("server", [Request(SERVER)], {**rate, "model": upper}, letter=back, deliver=True)
        (answer,) = yield ask  # a failure there has ended the run
        assert isinstance(answer, Reply)
        list((yield Ask("store", [Request(k) for k in sent], expect=Schema({}), deliver=True)))
        model = {**state["model"], **answer.payload["model"]}
        return {"model": model, "trained": sorted({*state["trained"], *sent})}

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The mean over some extractors of the server's metrics, and each client's own where clients are measured."""
        parts, trained = self.parts, state["trained"]
        draw = ctx.rng.numpy("extractors").permutation(trained)[: self.extractors]
        trees: list[Tree] = [{}]  # before the first round: the initial one, which all clients have
        if len(draw):
            expect = Schema({"extractor": TreeField.like(self.networks.extractor)})
            requests = [Request(int(k)) for k in sorted(draw)]
            answers = yield Ask("extractor", requests, expect=expect, counts=False, measuring=True)
            trees = [a.payload["extractor"] for a in answers if isinstance(a, Reply)] or trees
        each = []
        for tree in trees:
            model = parts.model.sent({**state["model"], **tree})
            each.append((yield from central_metrics(model, ctx.federation, parts.task, parts.measure)))
        names = [name for name in each[0] if all(name in metrics for metrics in each)]
        mean = {name: float(np.mean([metrics[name] for metrics in each])) for name in names}
        if self.measured == "none":
            return mean
        sent = parts.model.sent(state["model"])
        return {**mean, **(yield from everywhere({"model": sent}, ctx, parts.task, self.measured))}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The large network; before the cut it has the initial values, since the trained ones are the clients'."""
        return self.parts.model, state["model"]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.half else self.networks.features.dtype

    @property
    def _image_bytes(self) -> int:
        return self.networks.features.numel() * self._dtype.itemsize

    @property
    def _fields(self) -> dict[str, TensorField]:
        """What a client sends."""
        features, most = self.networks.features, self.parts.federation.largest
        classes, dtype = self.parts.model.classes, features.dtype
        sent = TensorField((-1, *features.shape[1:]), self._dtype, most=most * self._image_bytes)
        return {
            "features": sent,
            LOGITS: TensorField((-1, classes), dtype, most=most * classes * dtype.itemsize),
            "targets": TensorField((-1,), torch.int64, 0, classes - 1, most=most * 8),
        }


def fedgkt(
    parts: Parts,
    *,
    client: Annotated[
        str | dict[str, Any],
        Field(description="the network of the clients: its name, or a table with its name and settings"),
    ] = "gkt-resnet8",
    cut: Annotated[
        LayerName,
        Field(description="the layer after which both networks are cut; clients send what comes behind it"),
    ] = "bn1",
    alpha: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="weight of the teacher's term, on both sides")
    ] = 1.0,
    temperature: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="temperature T of both softmax functions")
    ] = 3.0,
    server_epochs: Annotated[
        int, Field(ge=1, description="epochs of the server over all sent images, every round")
    ] = 1,
    features: Annotated[
        Literal["float32", "float16"], Field(description="the format in which features are sent")
    ] = "float32",
    extractors: Annotated[
        int, Field(ge=1, description="how many clients' extractors the server's layers are tested with")
    ] = 4,
) -> FedGKT:
    """FedGKT: clients train small networks, the server a large one on their features, and both teach.

    A client's network has an extractor, up to `cut`, and a small rest. The server's layers are those of
    `[model]` after `cut`. Predictions come from a client's extractor followed by the server's layers.

    Fixes: For a network too large for clients to train: they train a small one, and the server the large one.

    Equation:
        client k:  min CE(z_k, y) + alpha T^2 KL(softmax(z_s / T) || softmax(z_k / T));  CE alone without z_s
        sent:      features h_k(x), logits z_k and label y of every image x of k, by position
        server:    min CE(z_s, y) + alpha T^2 KL(softmax(z_k / T) || softmax(z_s / T)),  z_s = f(h_k(x))
        returned:  z_s of every image of k

    Source: He, Annavaram and Avestimehr 2020 (arXiv 2007.14513), Algorithm 1 and equations 5 to 8. The
        published code differs: it adds 1e-7 to the teacher's probabilities, weighs CE by alpha and not KL,
        keeps logits by the number of a batch (here by image), and returns logits from training mode (here
        evaluation).

    Weighting: By examples: the server draws its batches from all sent images together.

    State: At each client its network, its optimizer, and the server's last logits. At the server its layers
        and their optimizer, no features.

    Sent: Features, logits and labels of all of a client's images up, every round; with `gkt-resnet8` and
        images of 32x32 64 KiB an image, or 3.3 GB for CIFAR-10. Logits down. No weights. The server learns
        every label, and features from which images can be reconstructed; a client learns only what the
        server's network says of its own images.

    Composes: Any `[select]` that does not choose a client twice. `[client]`, `[aggregate]` and `[server]` are
        refused, and of `[local]` `examples`, `lr_scale` and stragglers.

    Ranges:
        client: "gkt-resnet8" with `model.name` = "gkt-resnet56", as in the paper. Up to `cut` both have to be
            alike.
        cut: "bn1", as in the paper: clients compute one layer of the server's network. A later one sends less
            if its features are smaller.
        alpha: 1. At 0, clients are alone, and the server trains on frozen features.
        temperature: 3, as in the published code.
        server_epochs: 1 to 40.
        features: "float16" halves what is sent.
        extractors: 4. More estimate the mean better, each with one more evaluation.
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client": clients test the composed model.

    Try: model.name=gkt-resnet56

    Not when: What a client computes must not leave it. Or one model for all is wanted: `fedlens predict` and
        `export` need `--client`.

    Tests: tests/identity/test_fedgkt.py

    Example:
        >>> from fedlens.local.knowledge_transfer import distillation
        >>> task_loss = torch.nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
        >>> round(float(task_loss + distillation(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 2), 1.0)), 4)
        1.021
    """
    refuse_unused("fedgkt", parts.slots, parts.local)
    refuse_unfit(parts, "fedgkt")
    chosen = parts.select or Uniform()
    refuse_repeats(chosen, parts.federation, "fedgkt")
    if parts.measure_clients not in (None, "none"):
        refuse_unmeasured(parts.federation, "`evaluation.clients` measures each client's composed model")
        refuse_too_many(parts.federation, parts.measure_clients)
    server = parts.local.model_copy(update={"steps": None, "epochs": server_epochs})
    loss, half = Distill(parts.task, alpha, temperature), features == "float16"
    return FedGKT(parts, chosen, client, cut, loss, server, half, extractors)
