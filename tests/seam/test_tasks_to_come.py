"""Tasks that are not written yet, as test doubles: they fit without a change of training, engines or algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms.averaging import Averaging, Parts
from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.moon import moon
from fedlens.base.errors import ConfigError
from fedlens.core.driver import Driver, Tally
from fedlens.core.measured import Measured
from fedlens.core.modules import loadable
from fedlens.core.protocol import (
    Ask,
    Client,
    ClientDataSource,
    ClientExamples,
    ClientStates,
    FederationInfo,
    ModelSpec,
    Outcome,
    Payload,
    Program,
    Request,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.tree import Tree, tree_of
from fedlens.local.settings import LocalSettings
from fedlens.tasks.classification import Classification
from fedlens.tasks.task import Task
from tests.seam.seam_kit import ENGINES

SIZES = (6, 9)
LOCAL = LocalSettings(lr=0.05, epochs=2, batch_size=4, momentum=0.5)


@dataclass(frozen=True)
class Boxes:
    """A ragged target: box k of example i is `boxes[offsets[i] + k]`."""

    boxes: Tensor  # [m, 4]
    offsets: Tensor  # int64 [n + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, at: Tensor) -> Boxes:
        parts = [self.boxes[self.offsets[i] : self.offsets[i + 1]] for i in at.tolist()]
        counts = torch.tensor([0, *map(len, parts)])
        return Boxes(torch.cat(parts), counts.cumsum(0))

    def to_payload(self) -> Payload:
        return {"boxes": self.boxes, "offsets": self.offsets}

    @classmethod
    def from_payload(cls, payload: Payload) -> Boxes:
        return cls(payload["boxes"], payload["offsets"])


@dataclass(frozen=True)
class Holder(ClientExamples):
    """A client's examples, in their order again and again."""

    inputs: Tensor
    answers: Any

    def __len__(self) -> int:
        return len(self.inputs)

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Any]:
        at = torch.arange(start, min(stop, len(self)))
        answers = self.answers.take(at) if isinstance(self.answers, Boxes) else self.answers[at]
        return self.inputs[at], answers

    def batches(self, size: int, rng: Rng, drop_last: bool = False) -> Iterator[tuple[Tensor, Any]]:
        while True:
            for start in range(0, len(self), size):
                yield self.stretch(start, start + size)


@dataclass(frozen=True)
class World(ClientDataSource):
    shape: tuple[int, ...]
    ragged: bool = False

    @property
    def info(self) -> FederationInfo:
        held = {"@test": 7}
        return FederationInfo(
            np.array(SIZES), 3, self.shape, held, kind="detection" if self.ragged else "classification"
        )

    def data_of(self, client: int | str) -> Holder:
        n = 7 if isinstance(client, str) else SIZES[client]
        g = torch.Generator().manual_seed(n)
        inputs = torch.randn(n, *self.shape, generator=g)
        if not self.ragged:
            return Holder(inputs, torch.randint(0, 3, (n,), generator=g))
        counts = torch.randint(0, 3, (n,), generator=g)  # also examples without a box
        boxes = torch.rand(int(counts.sum()), 4, generator=g)
        return Holder(inputs, Boxes(boxes, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])))


def train(
    task: Task, spec: ModelSpec, there: World, engine: str, rounds: int = 2
) -> tuple[Averaging, Payload, dict]:
    """The algorithm, its last state and its last metrics."""
    model = task.wrap(spec)
    algorithm = fedavg(Parts(model, task, LOCAL, there.info, evaluation_batch=3, select=Everyone()))
    made, states = ENGINES[engine](), ClientStates()
    made.open(Program(algorithm.ops, there, 0), states)
    driver, state = Driver(made, states), algorithm.init(model, there.info)
    try:
        for round in range(1, rounds + 1):
            driver.tally = Tally()
            context = RoundContext(round, rounds, there.info, Rng((0, "round", round)))
            state = driver.drive(algorithm.round(state, context), round)
            assert not driver.tally.failures, driver.tally.failures
            metrics = driver.drive(algorithm.evaluate(state, context), round)
    finally:
        made.close()
    return algorithm, state, metrics


# -- a detector: called with its targets, which are ragged ---------------------------------------------------


class Detector(nn.Module):
    """Gives its losses where it is trained, and boxes where it is not, as those of torchvision do."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Linear(5, 4)

    def forward(self, images: Tensor, targets: Boxes) -> Any:
        boxes = self.box(images)
        if not self.training:
            return [{"boxes": row[None]} for row in boxes]
        counts = targets.offsets.diff()
        return {
            "box": (boxes.repeat_interleave(counts, 0) - targets.boxes).square().sum()
            / max(1, len(targets.boxes))
        }


class Detection(Task):
    """Boxes; what is measured is kept box by box, as average precision needs it."""

    kind = "detection"
    score = "close"
    takes_targets = True

    def loss(self, outputs, targets, weights=None, normalize=True) -> Tensor:
        return sum(outputs.values())

    def measure(self, outputs, targets: Boxes) -> Measured:
        rows = [
            row["boxes"].expand(int(k), 4) for row, k in zip(outputs, targets.offsets.diff(), strict=True)
        ]
        distance = (torch.cat(rows) - targets.boxes).abs().amax(1)
        return Measured({"examples": torch.tensor(len(targets))}, {"distance": distance})

    def metrics(self, measured: Measured) -> dict[str, float]:
        distance = measured.rows["distance"]
        return {"close": float((distance < 0.5).double().mean()), "median": float(distance.median())}


def detector(input_shape, classes) -> nn.Module:
    return Detector()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_detector_that_takes_ragged_targets_trains_and_is_measured(engine: str) -> None:
    there = World((5,), ragged=True)
    spec = ModelSpec(detector, "detector", {}, (5,), 3, 0)
    algorithm, state, metrics = train(Detection(), spec, there, engine, rounds=3)
    start = algorithm.init(spec, there.info)["model"]
    assert not torch.equal(state["model"]["box.weight"], start["box.weight"])
    module = spec.build().eval()
    module.load_state_dict(dict(state["model"]))
    test = there.data_of("@test")
    with torch.no_grad():
        expected = Detection().metrics(Detection().measure(module(test.inputs, test.answers), test.answers))
    assert metrics == {f"test_{name}": pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_a_detector_cannot_train_stacked_and_the_reason_is_said() -> None:
    there = World((5,), ragged=True)
    spec = ModelSpec(detector, "detector", {}, (5,), 3, 0)
    algorithm = fedavg(Parts(spec, Detection(), LOCAL, there.info, select=Everyone()))
    assert "the loss of a batch is not the mean" in algorithm.train.obstacle().what


def test_a_rule_that_compares_features_is_refused_for_a_detector() -> None:
    there = World((5,), ragged=True)
    spec = ModelSpec(detector, "detector", {}, (5,), 3, 0)
    with pytest.raises(ConfigError, match=r"compares one feature vector per example"):
        moon(Parts(spec, Detection(), LOCAL, there.info, select=Everyone()))


def test_ragged_targets_cross_the_wire() -> None:
    there = World((5,), ragged=True)

    def send(payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({"targets": client.data.answers.to_payload()})

    def ask() -> Any:
        (reply,) = yield Ask("send", [Request(1)])
        return Boxes.from_payload(reply.payload["targets"])

    made, states = ENGINES["inline"](), ClientStates()
    made.open(Program({"send": send}, there, 0), states)
    got = Driver(made, states).drive(ask(), 1)
    made.close()
    kept = there.data_of(1).answers
    assert torch.equal(got.boxes, kept.boxes)
    assert torch.equal(got.offsets, kept.offsets)


# -- self-supervision: two views, a projector around the model, and a momentum encoder among the buffers ------


class Siamese(nn.Module):
    """A backbone with a projector, and a copy of both in buffers that follows with momentum in the forward pass."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.projector = backbone, nn.Linear(width, 3)
        for name, value in list(self.named_parameters()):
            self.register_buffer(f"key_{name.replace('.', '_')}", value.detach().clone())

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        own = dict(self.named_parameters())
        keys = {name: getattr(self, f"key_{name.replace('.', '_')}") for name in own}
        if self.training:
            with torch.no_grad():
                for name, key in keys.items():
                    key.lerp_(own[name], 0.1)
        query = self.projector(self.backbone(views[:, 0]))
        with torch.no_grad():
            hidden = F.linear(views[:, 1], keys["backbone.weight"], keys["backbone.bias"])
            key = F.linear(hidden, keys["projector.weight"], keys["projector.bias"])
        return query, key


def siamese(inner, input_shape, classes, **settings) -> nn.Module:
    backbone = inner(input_shape[1:], classes, **settings)
    return Siamese(backbone, classes)


class SelfSupervised(Task):
    kind = "classification"
    views = 2

    def wrap(self, model: ModelSpec) -> ModelSpec:
        return replace(model, factory=partial(siamese, model.factory))

    def export(self, tree: Tree) -> Tree:
        prefix = "backbone."
        return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}

    def loss(self, outputs, targets, weights=None, normalize=True) -> Tensor:
        query, key = outputs
        return -F.cosine_similarity(query, key.detach()).mean()

    def measure(self, outputs, targets) -> Measured:
        return Measured(
            {
                "loss": self.loss(outputs, targets).double() * len(targets),
                "examples": torch.tensor(len(targets)),
            }
        )

    def metrics(self, measured: Measured) -> dict[str, float]:
        return {"loss": float(measured.sums["loss"]) / int(measured.sums["examples"])}


def backbone(input_shape, classes) -> nn.Module:
    return nn.Linear(input_shape[0], classes)


@pytest.mark.parametrize("engine", ENGINES)
def test_self_supervision_averages_its_momentum_encoder_and_exports_the_backbone(engine: str) -> None:
    there, task = World((2, 5)), SelfSupervised()
    spec = ModelSpec(backbone, "backbone", {}, (2, 5), 3, 0)
    _, state, metrics = train(task, spec, there, engine)
    exported = task.export(state["model"])
    assert exported.keys() == spec.build().state_dict().keys() == {"weight", "bias"}
    spec_of_backbone = replace(spec, input_shape=(5,))
    spec_of_backbone.build().load_state_dict(dict(exported))
    # The followers have moved from the first weights, and are not the weights themselves.
    start = task.wrap(spec).build().state_dict()
    key = "key_backbone_weight"
    assert not torch.equal(state["model"][key], start[key])
    assert not torch.allclose(state["model"][key], state["model"]["backbone.weight"])
    assert metrics["test_loss"] < 0


def test_both_engines_give_the_same_bits_of_self_supervision() -> None:
    spec = ModelSpec(backbone, "backbone", {}, (2, 5), 3, 0)
    states = [train(SelfSupervised(), spec, World((2, 5)), engine)[1]["model"] for engine in ENGINES]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# -- knowledge transfer: clients send what they answer on public images --------------------------------------


@dataclass(frozen=True)
class Answers:
    """Sends the outputs of the client's own model on the server's public inputs."""

    model: ModelSpec
    task: Task

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        learner = loadable(self.model, client)
        learner.load(client.state.get("model", payload["model"]))
        with torch.no_grad():
            outputs = self.task.outputs(learner.module.eval(), payload["inputs"], None)
        return Outcome({"outputs": outputs + client.id})


def test_knowledge_transfer_averages_outputs_through_the_same_task() -> None:
    there, task = World((5,)), Classification()
    spec = ModelSpec(backbone, "backbone", {}, (5,), 3, 0)
    inputs, tree = there.data_of("@test").inputs, spec.build().state_dict()

    def round() -> Any:
        ask = Ask("answers", [Request(0), Request(1)], {"inputs": inputs, "model": dict(tree)})
        replies = [reply.payload["outputs"].clone() for reply in (yield ask)]
        return torch.stack(replies).mean(0)

    made, states = ENGINES["inline"](), ClientStates()
    made.open(Program({"answers": Answers(spec, task)}, there, 0), states)
    taught = Driver(made, states).drive(round(), 1)
    made.close()
    torch.testing.assert_close(taught, spec.build()(inputs).detach() + 0.5)
    # What was taught is measured as any other output is.
    assert 0 <= task.metrics(task.measure(taught, there.data_of("@test").answers))["accuracy"] <= 1


# -- split learning: the client keeps the first layers, and sends features and targets -------------------------


@dataclass(frozen=True)
class Forward:
    """Sends the features of the client's first examples, and their targets."""

    model: ModelSpec

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        learner = loadable(self.model, client)
        learner.load(payload["model"])
        inputs, targets = client.data.stretch(0, payload["size"])
        sent = targets.to_payload() if isinstance(targets, Boxes) else targets
        return Outcome({"features": learner.module(inputs).detach(), "targets": sent})


@dataclass(frozen=True)
class Backward:
    """Sends the client's layers after a step on the gradient of the loss by the features."""

    model: ModelSpec

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        learner = loadable(self.model, client)
        learner.load(payload["model"])
        inputs, _ = client.data.stretch(0, payload["size"])
        names, weights = zip(*learner.trainable.items(), strict=True)
        slopes = torch.autograd.grad(learner.module(inputs), weights, payload["slope"])
        moved = [weight.detach() - LR * slope for weight, slope in zip(weights, slopes, strict=True)]
        return Outcome({"model": dict(zip(names, moved, strict=True))})


LR = 0.5


@pytest.mark.parametrize("ragged", [False, True])
def test_split_learning_is_a_step_of_the_whole_model(ragged: bool) -> None:
    there, size = World((5,), ragged), 4
    task: Task = Detection() if ragged else Classification()
    body = ModelSpec(hidden, "hidden", {}, (5,), 3, 0)
    head = Detector() if ragged else nn.Linear(5, 3)
    own = [value.detach().clone() for value in head.parameters()]
    tree = tree_of(body.build())

    def round() -> Any:
        shared = {"model": tree, "size": size}
        (sent,) = yield Ask("forward", [Request(1)], shared)
        features = sent.payload["features"].clone().requires_grad_()
        targets = sent.payload["targets"]
        targets = Boxes.from_payload(targets) if ragged else targets
        task.loss(task.outputs(head, features, targets), targets).backward()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter -= LR * parameter.grad
        (moved,) = yield Ask("backward", [Request(1)], {**shared, "slope": features.grad})
        return moved.payload["model"]

    made, states = ENGINES["inline"](), ClientStates()
    made.open(Program({"forward": Forward(body), "backward": Backward(body)}, there, 0), states)
    moved = Driver(made, states).drive(round(), 1)
    made.close()

    whole = nn.Sequential(body.build(), Detector() if ragged else nn.Linear(5, 3))
    with torch.no_grad():
        for parameter, value in zip(whole[1].parameters(), own, strict=True):
            parameter.copy_(value)
    inputs, targets = there.data_of(1).stretch(0, size)
    outputs = task.outputs(whole[1], whole[0](inputs), targets)
    task.loss(outputs, targets).backward()
    expected = [parameter.detach() - LR * parameter.grad for parameter in whole.parameters()]
    for got, right in zip([*moved.values(), *head.parameters()], expected, strict=True):
        torch.testing.assert_close(got.detach(), right)


def hidden(input_shape, classes) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh())
