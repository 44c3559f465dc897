"""Personal models: what is a client's own never leaves it, and everything else is averaged as if it were all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.normalized import Normalized
from fedlens.algorithms.admm import dual
from fedlens.algorithms.averaging import Averaging
from fedlens.algorithms.centralized import centralized
from fedlens.algorithms.client_evaluation import disclosure, spread
from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedbn import fedbn
from fedlens.algorithms.fedir import reweighted
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.moon import contrastive
from fedlens.algorithms.personal import finetune, local_only
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, ModelSpec, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.local.rules import ClientRule, proximal
from fedlens.models.simple import small_cnn
from tests.identity.identity_kit import (
    Points,
    World,
    bare_client,
    close,
    course,
    mean,
    model,
    parts,
    same,
    world,
)

LOCAL = {"lr": 0.2, "epochs": 2, "batch_size": 3}
SIZES = (
    4,
    9,
    5,
    3,
    12,
    8,
)  # less what is held out, never one example over in a batch: normalization needs two
OWN = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


@dataclass(frozen=True)
class Owner(Points):
    """Points of which some are held out."""

    validation: Points | None = None


def divided(held: dict[int, int]) -> World:
    """The usual clients, who hold out so many of their points; the last of them."""
    clients = []
    for k, points in enumerate(world(SIZES).clients):
        n = len(points) - held.get(k, 0)
        rest = Points(points.inputs[n:], points.targets[n:]) if k in held else None
        clients.append(Owner(points.inputs[:n], points.targets[:n], rest))
    return World(tuple(clients))


HELD = {0: 1, 1: 3, 4: 4, 5: 2}


def given(there: World, **rest: Any) -> Any:
    held_out = np.array([HELD.get(k, 0) for k in range(len(there.clients))])
    made = parts(there, LOCAL, rest.pop("spec", None) or model(norm=True), **rest)
    return replace(made, federation=replace(made.federation, held_out=held_out))


@dataclass
class Driven:
    """An algorithm with the clients' states at hand."""

    algorithm: Averaging
    there: World

    def run(self, rounds: int) -> Driven:
        engine, self.states = inline(), ClientStates()
        engine.open(Program(self.algorithm.ops, self.there, 0), self.states)
        self.gate = Driver(engine, self.states)
        self.state = self.algorithm.init(self.algorithm.parts.model, self.algorithm.parts.federation)
        self.cohorts: list[tuple[int, ...]] = []
        self.before: list[Any] = []
        try:
            for round in range(1, rounds + 1):
                self.gate.tally = Tally()
                self.before.append(self.state)
                context = RoundContext(
                    round, rounds, self.algorithm.parts.federation, Rng((0, "round", round))
                )
                self.state = self.gate.drive(self.algorithm.round(self.state, context), round)
                self.cohorts.append(tuple(row["client"] for row in self.gate.tally.per_client))
                self.tally = self.gate.tally
            self.gate.tally = Tally()
            self.metrics = self.gate.drive(self.algorithm.evaluate(self.state, context), rounds)
        finally:
            engine.close()
        return self


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.2)


def test_fedbn_is_a_bare_loop_in_which_normalization_never_moves_between_clients() -> None:
    there = divided(HELD)
    run = Driven(fedbn(given(there, select=Uniform(3))), there).run(5)
    tree = model(norm=True).build().state_dict()
    own = {k: {n: tree[n] for n in OWN} for k in range(6)}
    for round, cohort in enumerate(run.cohorts, 1):
        assert len(cohort) == 3
        trained = [
            bare_client(
                model(norm=True),
                {**tree, **own[k]},
                there.clients[k],
                Rng((0, "op", round, 0, slot, k)),
                optimizer=sgd,
                epochs=2,
                batch_size=3,
            )
            for slot, k in enumerate(cohort)
        ]
        own |= {k: {n: t[n] for n in OWN} for k, t in zip(cohort, trained, strict=True)}
        averaged = mean(trained, [len(there.clients[k]) for k in cohort])
        tree = {n: v if n in OWN else averaged[n] for n, v in tree.items()}
    close(
        {n: v for n, v in run.state["model"].items() if n not in OWN},
        {n: v for n, v in tree.items() if n not in OWN},
    )
    for k in {k for cohort in run.cohorts for k in cohort}:
        close(run.states.get(k)["personal"], own[k])


def test_fedbn_sends_and_changes_no_normalization() -> None:
    there = divided(HELD)
    run = Driven(fedbn(given(there, select=Fixed((1, 4)))), there).run(2)
    assert same({n: run.state["model"][n] for n in OWN}, {n: run.before[0]["model"][n] for n in OWN})
    rest = sum(v.numel() * v.element_size() for n, v in run.state["model"].items() if n not in OWN)
    assert (run.tally.bytes_up, run.tally.bytes_down) == (2 * (rest + 8), 2 * (rest + 8))
    personal = [run.states.get(k)["personal"] for k in (1, 4)]
    assert set(personal[0]) == OWN
    assert not torch.equal(personal[0]["1.running_mean"], personal[1]["1.running_mean"])
    assert run.states.get(0) == {}


def test_fedbn_measures_each_client_with_its_own_normalization() -> None:
    there = divided(HELD)
    run = Driven(fedbn(given(there, select=Fixed((1, 4)))), there).run(3)
    right, sizes = [], []
    for k, held in HELD.items():
        module = model(norm=True).build().eval()
        module.load_state_dict({**run.state["model"], **run.states.get(k).get("personal", {})})
        points = there.clients[k].validation
        right.append(float((module(points.inputs).argmax(1) == points.targets).sum()))
        sizes.append(held)
    shares = np.array(right) / np.array(sizes)
    assert run.metrics["validation_accuracy"] == pytest.approx(sum(right) / sum(sizes))
    assert run.metrics["clients_accuracy_mean"] == pytest.approx(shares.mean())
    assert run.metrics["clients_accuracy_worst_decile"] == pytest.approx(shares.min())
    assert not any(name.startswith("test_") for name in run.metrics)


def test_alone_every_client_is_a_bare_loop_of_its_own_and_nothing_is_sent() -> None:
    there = divided(HELD)
    run = Driven(local_only(given(there, select=Uniform(3))), there).run(4)
    trees = {k: model(norm=True).build().state_dict() for k in range(6)}
    for round, cohort in enumerate(run.cohorts, 1):
        for slot, k in enumerate(cohort):
            trees[k] = bare_client(
                model(norm=True),
                trees[k],
                there.clients[k],
                Rng((0, "op", round, 0, slot, k)),
                optimizer=sgd,
                epochs=2,
                batch_size=3,
            )
    took_part = {k for cohort in run.cohorts for k in cohort}
    assert 3 < len(took_part) <= 6
    for k in took_part:
        close(run.states.get(k)["personal"], trees[k])
    assert same(run.state["model"], run.before[0]["model"])
    assert run.tally.bytes_up == 3 * 8  # the weight, a number
    assert run.tally.bytes_down == 3 * 8  # the learning rate


def test_tuning_begins_at_the_global_model_and_is_forgotten() -> None:
    there = divided(HELD)
    tuned = Driven(finetune(given(there, select=Uniform(3)), epochs=3, local_lr=0.05), there).run(3)
    plain = Driven(fedavg(given(there, select=Uniform(3))), there).run(3)
    assert same(tuned.state["model"], plain.state["model"])
    assert all(tuned.states.get(k) == {} for k in range(6))
    assert {n: v for n, v in tuned.metrics.items() if n.startswith("test_")} == {
        n: v for n, v in plain.metrics.items() if n.startswith("test_")
    }
    after, before = [], []
    exchange = 1  # after the central evaluation
    for slot, k in enumerate(HELD):
        held = there.clients[k].validation
        tree = bare_client(
            model(norm=True),
            tuned.state["model"],
            there.clients[k],
            Rng((0, "op", 3, 1 + exchange, slot, k)),
            optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05),
            epochs=3,
            batch_size=3,
        )
        for found, weights in ((after, tree), (before, tuned.state["model"])):
            module = model(norm=True).build().eval()
            module.load_state_dict(dict(weights))
            loss = torch.nn.functional.cross_entropy(module(held.inputs), held.targets)
            found.append(float(loss.detach()))
    assert tuned.metrics["clients_loss_mean"] == pytest.approx(np.mean(after), rel=1e-9)
    assert tuned.metrics["clients_loss_mean_before"] == pytest.approx(np.mean(before), rel=1e-9)
    assert tuned.metrics["clients_loss_worst_decile"] == pytest.approx(max(after), rel=1e-9)


def test_tuning_has_nothing_of_the_slots_that_make_the_global_model() -> None:
    there = divided(HELD)
    plain = Driven(finetune(given(there, select=Fixed(())), epochs=2), there).run(1).metrics
    for bent in ({"aggregate": Normalized()}, {"client": proximal(mu=3.0)}):
        other = Driven(finetune(given(there, select=Fixed(()), **bent), epochs=2), there).run(1).metrics
        assert other == plain


def test_tuning_follows_the_schedule_of_the_learning_rate_unless_it_has_its_own() -> None:
    there = divided(HELD)

    def tuned(decay: float, local_lr: float | None) -> float:
        made = given(there, select=Fixed(()))
        made = replace(made, local=made.local.model_copy(update={"lr_decay": decay}))
        return Driven(finetune(made, epochs=1, local_lr=local_lr), there).run(3).metrics["clients_loss_mean"]

    assert tuned(0.1, None) == tuned(1.0, 0.2 * 0.1 * 0.1)
    assert tuned(0.1, 0.3) == tuned(1.0, 0.3)


def test_tuning_that_ends_in_no_number_is_a_failure_that_is_told() -> None:
    there = divided(HELD)
    with pytest.raises(
        RunFailed, match=r"no client could be measured: ValueError: tuning failed: \w+ holds NaN"
    ):
        Driven(finetune(given(there, select=Fixed((1,))), local_lr=1e300), there).run(1)


def test_what_a_measured_client_tells_is_disclosed() -> None:
    there = divided(HELD)
    said = (disclosure(given(there).task, given(there).federation),)
    assert "how much was right" in said[0]
    assert finetune(given(there)).discloses == said == fedbn(given(there)).discloses
    assert fedavg(given(there)).discloses == ()
    assert fedavg(given(there, measure_clients=2)).discloses == said


def test_any_algorithm_can_be_measured_at_clients_drawn_anew() -> None:
    there = divided(HELD)
    run = Driven(fedprox(given(there, select=Uniform(3), measure_clients=2), mu=0.1), there).run(2)
    assert {"test_accuracy", "clients_accuracy_mean", "clients_accuracy_std"} <= set(run.metrics)
    everyone = Driven(fedprox(given(there, select=Uniform(3), measure_clients="all"), mu=0.1), there).run(2)
    assert everyone.metrics["test_loss"] == run.metrics["test_loss"]
    assert everyone.metrics["clients_loss_mean"] != run.metrics["clients_loss_mean"]


def test_the_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up() -> None:
    rows = [{"accuracy": a / 100, "loss": a / 10} for a in range(11)]
    found = spread(rows[::-1])
    assert found["clients_accuracy_worst_decile"] == pytest.approx(0.005)
    assert found["clients_loss_worst_decile"] == pytest.approx(0.95)
    assert found["clients_accuracy_mean"] == pytest.approx(0.05)
    assert found["clients_accuracy_std"] == pytest.approx(np.std(np.arange(11) / 100))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: fedbn(given(divided(HELD), spec=model())),
            "has no batch normalization.*name = 'small-cnn', norm",
        ),
        (
            lambda: fedbn(given(divided(HELD), spec=ModelSpec(small_cnn, "small-cnn", {}, (1, 8, 8), 10, 0))),
            "set model.norm = 'batch', as the recipe digits-personal does, or choose",
        ),
        (lambda: fedbn(parts(world(), LOCAL, model(norm=True))), "no client holds out"),
        (lambda: finetune(parts(world(), LOCAL)), "no client holds out"),
        (lambda: fedavg(parts(world(), LOCAL, measure_clients="all")), "no client holds out"),
        (
            lambda: fedbn(given(divided(HELD), measure=("@test", "@train"))),
            "evaluation.train needs one global model",
        ),
        (
            lambda: fedbn(given(divided(HELD), measure_clients="none")),
            "only per-client evaluation can measure it",
        ),
        (lambda: local_only(given(divided(HELD), server=object())), r"does not use the table \[server\]"),
        (
            lambda: fedbn(given(divided(HELD), client=ClientRule(name="all", fields={"x": "sum"}))),
            "'all' needs all weights at the server",
        ),
        (lambda: fedbn(given(divided(HELD), client=dual())), "'dual' needs all weights at the server"),
        (lambda: local_only(given(divided(HELD), client=contrastive())), "'contrastive' compares"),
        (lambda: finetune(given(divided(HELD), measure_clients="none")), "evaluation.clients is 'none'"),
        (lambda: centralized(parts(world(), LOCAL, measure_clients="all")), "no client holds out"),
        (lambda: centralized(given(divided(HELD), measure_clients=5)), "only 4 hold out"),
    ],
)
def test_what_could_not_be_measured_or_would_leave_a_client_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_target_that_all_clients_were_asked_for_goes_with_personal_parts() -> None:
    there = divided(HELD)
    run = Driven(fedbn(given(there, select=Uniform(3), client=reweighted(target="population"))), there).run(2)
    assert set(run.state["rules"]) == {"reweighted"}


def test_a_rule_without_a_servers_half_goes_with_personal_parts() -> None:
    there = divided(HELD)
    bent = course(fedbn(given(there, select=Uniform(3), client=proximal(mu=5.0))), there).final
    assert not same(bent, course(fedbn(given(there, select=Uniform(3))), there).final)
