"""FedGKT against bare PyTorch, in float64: its losses, its batches, and teachers that belong to their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import BySize, Fixed
from fedlens.algorithms.fedgkt import FedGKT, fedgkt
from fedlens.algorithms.personal import local_only
from fedlens.base.errors import ConfigError
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, Letter, ModelSpec, Outcome, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.local.knowledge_transfer import LOGITS, REST, Distill, distillation
from fedlens.local.personal_leaves import PERSONAL
from fedlens.settings.memory_check import check_letters
from fedlens.tasks.classification import Classification
from tests.identity.identity_kit import CLASSES, EXACT, FEATURES, World, epoch, parts, world

T, LR, MOMENTUM = 3.0, 0.1, 0.5
LOCAL = {"lr": LR, "momentum": MOMENTUM, "epochs": 2, "batch_size": 4}
COHORT = [0, 4, 2]


def large(input_shape: Sequence[int], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, classes)
    ).double()  # fmt: skip


def small(input_shape: Sequence[int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def unlike(input_shape: Sequence[int], classes: int) -> nn.Module:
    """As `small`, with another function under the same names and shapes."""
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.Sigmoid(), nn.Linear(5, classes)).double()


def spec(factory: Any = large, classes: int = CLASSES) -> ModelSpec:
    return ModelSpec(factory, "net", {}, (FEATURES,), classes, 0)


def made(
    there: World, local: Mapping[str, Any] = LOCAL, select: Any = None, classes: int = CLASSES, **own: Any
):
    """The algorithm, with a client's network of this file."""
    own = {"client": f"{Path(__file__)}:small", "cut": "0", "temperature": T, **own}
    chosen = Fixed(tuple(COHORT)) if select is None else select
    return fedgkt(parts(there, local, spec(classes=classes), select=chosen), **own)


def run(
    algorithm: Any, there: World, rounds: int, ops: Mapping[str, Any] | None = None
) -> tuple[Any, Any, Tally]:
    """The last state of the server, the states of the clients, and the last round's tally."""
    engine, states = inline(), ClientStates()
    engine.open(Program({**algorithm.ops, **(ops or {})}, there, 0), states)
    state = algorithm.init(algorithm.parts.model, there.info)
    gate = Driver(engine, states)
    for round in range(1, rounds + 1):
        gate.tally = Tally()
        state = gate.drive(algorithm.round(state, context(there, round)), round)
    engine.close()
    return state, states, gate.tally


def context(there: World, round: int) -> RoundContext:
    return RoundContext(round, 9, there.info, Rng((0, "round", round)))


def test_the_losses_by_hand() -> None:
    draw = torch.Generator().manual_seed(0)
    teacher, own = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64).unbind()
    targets, alpha = torch.tensor([0, 2, 1, 1, 0]), 0.7
    p, q = (torch.exp(z / T) / torch.exp(z / T).sum(1, keepdim=True) for z in (teacher, own))
    by_hand = sum(float(T**2 * (p[i] * (p[i] / q[i]).log()).sum()) for i in range(5)) / 5
    assert abs(float(distillation(teacher, own, T)) - by_hand) < 1e-12
    plain = nn.functional.cross_entropy(own, targets)
    loss = Distill(Classification(), alpha, T)
    objective, logged = loss(own, targets, teacher)
    assert abs(float(objective - plain) - alpha * by_hand) < 1e-12
    assert torch.equal(logged, plain)
    assert torch.equal(loss(own, targets, None)[0], plain)
    assert torch.equal(Distill(Classification(), 0.0, T)(own, targets, teacher)[0], plain)


def descend(module: nn.Module, step: Any, data: Any, orders: Sequence[Tensor], alpha: float) -> float:
    """The bare loop; returns the sum of the cross-entropies."""
    inputs, targets, teacher = data
    module.train()
    total = 0.0
    for at in orders:
        out = module(inputs[at])
        loss = nn.functional.cross_entropy(out, targets[at])
        total += float(loss.detach()) * len(at)
        if teacher is not None:
            p, q = ((z / T).softmax(1) for z in (teacher[at], out))
            loss = loss + alpha * T**2 * (p * (p.log() - q.log())).sum(1).mean()
        step.zero_grad()
        loss.backward()
        step.step()
    return total


def drawn(n: int, size: int, epochs: int, key: tuple[Any, ...]) -> list[Tensor]:
    generator = Rng((0, "op", *key)).torch("batches")
    return [at for _ in range(epochs) for at in epoch(n, size, generator)]


@pytest.mark.parametrize("alpha", [0.7, 0.0], ids=["distilled", "alone"])
def test_three_rounds_are_a_bare_loop(alpha: float) -> None:
    """With alpha = 0 the reference is clients alone, and a network on features that are frozen within a round."""
    there = world()
    state, states, tally = run(made(there, alpha=alpha, server_epochs=3), there, 3)
    torch.manual_seed(0)
    server = spec().build()
    upper = nn.Sequential(*list(server)[2:])
    clients = {k: spec(small).build() for k in COHORT}
    steps: dict[Any, Any] = {}
    taught: dict[int, Tensor] = {}

    def step_of(who: Any, module: nn.Module, rate: float) -> Any:
        if who not in steps:  # both keep their optimizers
            steps[who] = torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM)
        return steps[who]

    for round in (1, 2, 3):
        sent, losses = [], 0.0
        for slot, k in enumerate(COHORT):
            x, y = there.clients[k].inputs, there.clients[k].targets
            orders = drawn(len(y), min(4, len(y)), 2, (round, 0, slot, k))
            losses += descend(clients[k], step_of(k, clients[k], LR), (x, y, taught.get(k)), orders, alpha)
            with torch.no_grad():
                features = clients[k][:2](x)
                sent.append((features, y, clients[k][2:](features)))
        h, y, z = (torch.cat(part) for part in zip(*sent, strict=True))
        orders = drawn(len(y), 4, 3, (round, 1, 0, "@server"))
        losses += descend(upper, step_of("@server", upper, LR), (h, y, z), orders, alpha)
        upper.eval()
        with torch.no_grad():
            taught = {k: upper(features) for k, (features, _, _) in zip(COHORT, sent, strict=True)}
    for name, value in server.state_dict().items():
        if not name.startswith("0."):
            torch.testing.assert_close(state["model"][name], value, **EXACT)
    for k in COHORT:
        own = {**states.get(k)[PERSONAL], **states.get(k)[REST]}
        for name, value in clients[k].state_dict().items():
            torch.testing.assert_close(own[name], value, **EXACT)
        torch.testing.assert_close(states.get(k)[LOGITS], taught[k], **EXACT)
    assert tally.sums["loss"] == pytest.approx(losses, rel=1e-12)  # the task's loss, of clients and server
    assert (tally.clients, state["trained"]) == (3, sorted(COHORT))


def test_without_the_teachers_term_clients_are_alone() -> None:
    """As 'local-only' with the client's network."""
    there = world()
    local = {**LOCAL, "momentum": 0.0}  # local-only begins with a new optimizer in every round
    _, states, _ = run(made(there, local, alpha=0.0), there, 3)
    given = parts(there, local, spec(small), select=Fixed(tuple(COHORT)))
    given = replace(given, federation=replace(there.info, held_out=there.info.sizes))  # it refuses otherwise
    _, alone, _ = run(local_only(given), there, 3)
    for k in COHORT:
        own = {**states.get(k)[PERSONAL], **states.get(k)[REST]}
        for name, value in alone.get(k)[PERSONAL].items():
            torch.testing.assert_close(own[name], value, **EXACT)


@pytest.mark.parametrize("batch", [500, 3])
def test_returned_logits_are_those_of_the_composed_network_image_by_image(batch: int) -> None:
    there = world()
    algorithm = made(there)
    algorithm = replace(algorithm, parts=replace(algorithm.parts, evaluation_batch=batch))
    state, states, _ = run(algorithm, there, 2)
    composed = spec().build(initial=False).eval()
    for k in COHORT:
        composed.load_state_dict({**state["model"], **states.get(k)[PERSONAL]})
        for image, logits in zip(there.clients[k].inputs, states.get(k)[LOGITS], strict=True):
            torch.testing.assert_close(composed(image[None])[0], logits, **EXACT)


@dataclass(frozen=True)
class Sometimes:
    """Client 0 is absent in round 2."""

    def cohort(self, ctx: RoundContext) -> list[int]:
        return [4, 2, 1] if ctx.round == 2 else [0, 4, 2]

    def size(self, federation: Any) -> int:
        return 3


@dataclass(frozen=True)
class Seen(Distill):
    """Remembers the labels and the teacher of each batch."""

    batches: list[Any] = field(default_factory=list)

    def __call__(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        self.batches.append((targets, teacher))
        return super().__call__(outputs, targets, teacher)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_teacher_that_encodes_the_position_comes_back_to_its_image(seed: int) -> None:
    """Each label is the position of its image, so a batch shows which images it has; logits are not keyed by batch."""
    there = world()
    there = World(tuple(replace(points, targets=torch.arange(len(points))) for points in there.clients))
    algorithm = made(there, select=Sometimes(), classes=12)
    seen = Seen(Classification(), 0.7, T)
    algorithm = replace(algorithm, loss=seen)
    assert isinstance(algorithm, FedGKT)

    def encoder(payload: Any, client: Any, rng: Rng) -> Outcome:
        back = []
        for sender, content in payload["letters"]:
            logits = torch.zeros(len(content["targets"]), 12, dtype=torch.float64)
            logits[:, 0] = content["targets"]
            logits[:, 1], logits[:, 2] = sender, client.state.get("round", 0) + 1
            back.append(Letter(sender, {LOGITS: logits}))
        return Outcome({"model": payload["model"]}, {"round": client.state.get("round", 0) + 1}, letters=back)

    engine, states = inline(), ClientStates()
    engine.open(Program({**algorithm.ops, "server": encoder}, there, seed), states)
    state, gate = algorithm.init(algorithm.parts.model, there.info), Driver(engine, states)
    for round in (1, 2, 3):
        seen.batches.clear()
        state = gate.drive(algorithm.round(state, context(there, round)), round)
        teachers = [(targets, teacher) for targets, teacher in seen.batches if teacher is not None]
        trained = [len(there.clients[k]) for k in Sometimes().cohort(context(there, round))]
        assert len(seen.batches) == sum(2 * -(-n // 4) for n in trained)
        for targets, teacher in teachers:
            assert torch.equal(teacher[:, 0], targets.double())
        came = {(int(t[0, 1]), int(t[0, 2])) for _, t in teachers}
        assert came == {1: set(), 2: {(4, 1), (2, 1)}, 3: {(0, 1), (4, 2), (2, 2)}}[round]
    shuffled = [targets.tolist() for targets, _ in seen.batches if len(targets) == 4]
    assert any(labels != sorted(labels) for labels in shuffled)
    engine.close()


def test_a_client_that_fails_leaves_the_others_as_if_it_had_not_been_there() -> None:
    there = world()
    algorithm = made(there)
    train = algorithm.ops["train"]

    def failing(payload: Any, client: Any, rng: Rng) -> Outcome:
        if client.id == 2:
            raise ConnectionError("no answer")
        return train(payload, client, rng)

    state, states, tally = run(algorithm, there, 2, {"train": failing})
    other, others, _ = run(made(there, select=Fixed((0, 4))), there, 2)
    assert (tally.clients, len(tally.failures), states.get(2)) == (2, 1, {})
    assert all(torch.equal(state["model"][name], value) for name, value in other["model"].items())
    assert all(torch.equal(states.get(k)[LOGITS], others.get(k)[LOGITS]) for k in (0, 4))


def test_a_client_that_misses_the_last_step_keeps_its_older_logits() -> None:
    there = world()
    algorithm = made(there)
    keep, before = algorithm.ops["store"], ClientStates()

    def failing(payload: Any, client: Any, rng: Rng) -> Outcome:
        if client.id == 2 and client.state.get(LOGITS) is not None:
            before.commit(2, client.state)
            raise ConnectionError("no answer")
        return keep(payload, client, rng)

    _, states, tally = run(algorithm, there, 2, {"store": failing})
    _, first, _ = run(made(there), there, 1)
    assert torch.equal(states.get(2)[LOGITS], first.get(2)[LOGITS])
    assert not torch.equal(states.get(0)[LOGITS], first.get(0)[LOGITS])
    assert tally.clients == 3


def test_the_test_metrics_are_the_mean_over_measured_extractors() -> None:
    there = world()
    algorithm = made(there, extractors=2)
    engine, states = inline(), ClientStates()
    engine.open(Program(algorithm.ops, there, 0), states)
    state, gate = algorithm.init(algorithm.parts.model, there.info), Driver(engine, states)
    state = gate.drive(algorithm.round(state, context(there, 1)), 1)
    gate.tally = Tally()
    found = gate.drive(algorithm.evaluate(state, context(there, 1)), 1)
    assert (gate.tally.bytes_up, gate.tally.clients) == (0, 0)
    engine.close()
    composed, test = spec().build(initial=False).eval(), there.pooled()
    chosen = context(there, 1).rng.numpy("extractors").permutation(sorted(COHORT))[:2]
    losses = []
    for k in chosen:
        composed.load_state_dict({**state["model"], **states.get(int(k))[PERSONAL]})
        losses.append(float(nn.functional.cross_entropy(composed(test.inputs).detach(), test.targets)))
    assert found["test_loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert losses[0] != losses[1]


def test_features_are_sent_in_the_chosen_format_and_priced() -> None:
    there = world()
    _, _, full = run(made(there), there, 1)
    algorithm = made(there, features="float16")
    _, _, half = run(algorithm, there, 1)
    images = sum(len(there.clients[k]) for k in COHORT)
    assert full.bytes_up - half.bytes_up == images * 5 * (8 - 2)
    assert full.bytes_up == images * (5 * 8 + CLASSES * 8 + 8)
    assert algorithm.letter_bytes(there.info) == images * 5 * 2
    assert "0.00977 KiB of features" in algorithm.notes[0]
    with pytest.raises(ConfigError, match="three copies"):
        check_letters(2**60, {"name": "processes"})
    with pytest.raises(ConfigError, match="one copy"):
        check_letters(2**60, {"name": "inline"})


def test_what_does_not_fit_is_refused_by_name() -> None:
    there, here = world(), str(Path(__file__))
    for own, where in (
        ({"cut": "9"}, "algorithm.cut"),
        ({"client": f"{here}:unlike"}, "algorithm.client"),
        ({"client": {"name": f"{here}:small", "depth": 2}}, "algorithm.client.depth"),
    ):
        with pytest.raises(ConfigError) as refused:
            _ = made(there, **own).networks
        assert refused.value.where == where
    for local in ({"examples": 4}, {"lr_scale": {"head": 2.0}}, {"stragglers": 0.5}):
        with pytest.raises(ConfigError, match="does not use local"):
            made(there, {**LOCAL, **local})
    with pytest.raises(ConfigError, match="may choose one twice"):
        made(there, select=BySize(3, method="replacement"))
    with pytest.raises(ConfigError, match="without class weights"):
        fedgkt(parts(there, LOCAL, spec(), task=Classification(class_weights="inverse")))


@dataclass(frozen=True)
class Short:
    """A client's operation that forgets one label of its images."""

    op: Any

    def __call__(self, payload: Any, client: Any, rng: Rng) -> Outcome:
        found: Outcome = self.op(payload, client, rng)
        if client.id != COHORT[1]:
            return found
        content = found.letters[0].content
        letter = Letter("@server", {**content, "targets": content["targets"][1:]})
        return found._replace(letters=[letter])


def test_a_letter_without_a_label_for_each_image_is_its_senders_failure() -> None:
    there = world()
    algorithm = made(there)
    state, _, tally = run(algorithm, there, 1, {"train": Short(algorithm.ops["train"])})
    images = len(there.clients[COHORT[1]])
    (said,) = tally.failures[COHORT[1]]
    assert said == f"its letter to @server: targets has {images - 1} rows where features has {images}"
    assert state["trained"] == sorted({*COHORT} - {COHORT[1]})
