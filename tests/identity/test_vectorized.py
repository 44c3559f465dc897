"""Several clients as one computation: every client takes exactly its own steps.

In float64 and with smooth activations what is left are the last bits, so that a wrong weight, order or mask would show.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import BySize, Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.moon import contrastive
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.arithmetic import Arithmetic
from fedlens.core.modules import module_in
from fedlens.core.protocol import Call, Client, ModelSpec
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.engines.vectorized import Vectorized, vectorized
from fedlens.local.chain import chain
from fedlens.local.problem import LocalProblem
from fedlens.local.rules import ClientRule, Traits, proximal
from fedlens.local.vectorized.batched_train import obstacle
from fedlens.local.vectorized.model import StackedModel
from tests.covering import covering
from tests.identity.identity_kit import (
    CLASSES,
    FEATURES,
    IN_TWO_PARTS,
    PEERS,
    Course,
    Points,
    World,
    course,
    model,
    parts,
    same,
    world,
)
from tests.identity.stacked_kit import CLOSE, LOCAL, STEPS, agree

FAMILY: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedavgm": {}, "fedprox": {"mu": 0.5}, "fedir": {}, "fedvc": {"examples": 8},
    "fedadagrad": {}, "fedadam": {}, "fedyogi": {}, "fednova": {}, "scaffold": {}, "feddyn": {"alpha": 0.5},
    "mime": {"beta": 0.5}, "mimelite": {"beta": 0.5}, "feddane": {"mu": 0.3},
    "moon": {"mu": 3.0}, "admm": {"solver": "sgd", "sigma": 0.5, "absent": "last"}, "liadmm": {"gradient": "training"},
}  # fmt: skip
OTHERS = {"ceadmm", "iceadmm", "fedbn", "local-only", "finetune", "centralized"} | IN_TWO_PARTS | PEERS
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "scaffold I": ("scaffold", {"option": "I"}),
    "feddyn by examples": ("feddyn", {"alpha": 0.5, "weighting": "examples"}),
    "mime, adam": ("mime", {"optimizer": "adam", "beta": 0.5, "eps": 0.1, "v0": 1.0}),
    "admm, equal sigmas": ("admm", {"solver": "sgd", "sigma": 0.2, "sigmas": "equal"}),
    "fedir, population": ("fedir", {"target": "population", "normalize": False}),
}


def test_every_algorithm_is_tried_here_or_says_why_it_cannot() -> None:
    assert FAMILY.keys() | OTHERS == set(ALGORITHMS)


@pytest.mark.parametrize("name", [*FAMILY, *MORE])
def test_it_is_the_algorithm_of_one_client_after_the_other(name: str) -> None:
    algorithm, settings = MORE.get(name, (name, FAMILY.get(name, {})))
    local = STEPS | ({"momentum": 0.4} if algorithm in ("fedavg", "scaffold", "fednova", "feddyn") else {})
    select = BySize(3) if algorithm == "fedvc" else Uniform(4)
    agree(ALGORITHMS.find(algorithm)(parts(world(), local, select=select), **settings), world())


@pytest.mark.parametrize("name", LOCAL)
def test_every_local_setting_is_each_clients_own(name: str) -> None:
    agree(fedavg(parts(world(), STEPS | LOCAL[name], select=Uniform(4))), world())


def convolutional(input_shape: Sequence[int], classes: int, *, dropout: float = 0.3) -> nn.Module:
    """Convolutions, group normalization, both kinds of dropout, a frozen layer and a shared input."""
    layers = [
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Dropout2d(dropout),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(12, classes),
    ]
    module = nn.Sequential(*layers).double()
    module[6].requires_grad_(False)
    return module


class Scaling(nn.Module):
    """A layer that fedlens does not know: such a model runs under vmap."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def unknown(input_shape: Sequence[int], classes: int, *, dropout: float = 0.3) -> nn.Module:
    """Every kind of layer that has another form under vmap, and one that is the user's own."""
    layers = [
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Dropout2d(dropout), nn.Flatten(), Scaling(36), nn.Dropout(dropout), nn.Linear(36, 6), nn.Tanh(),
        nn.Linear(6, classes),
    ]  # fmt: skip
    module = nn.Sequential(*layers).double()
    module[8].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("spec", "name"),
    covering(
        {
            "dropout": model(dropout=0.4),
            "frozen": model(frozen=True),
            "all dropped": model(dropout=1.0),
            "convolutions": model(factory=convolutional),
            "convolutions without dropout": model(factory=convolutional, dropout=0.0),
            "vmap": model(factory=unknown),
        },
        ["fedavg", "mime", "scaffold I", "moon", "mimelite"],
    ),
)
def test_dropout_masks_frozen_layers_and_convolutions_are_each_clients_own(
    spec: ModelSpec, name: str
) -> None:
    algorithm, settings = MORE.get(name, (name, {}))
    agree(ALGORITHMS.find(algorithm)(parts(world(), STEPS, spec, select=Uniform(4)), **settings), world())


def test_which_of_these_models_are_one_large_batch() -> None:
    """The others have the same numbers under vmap, and would hide that a fast form is lost."""
    for factory, flat in ((convolutional, True), (unknown, False)):
        spec, scratch = model(factory=factory), dict[Any, Any]()
        assert StackedModel(module_in(spec, scratch, torch.device("cpu")), scratch).flat == flat


@pytest.mark.parametrize("name", ["mime", "mimelite", "feddane", "scaffold I"])
def test_full_gradients_are_taken_together(name: str, monkeypatch) -> None:
    """None of these takes one client's by itself, in an operation of its own or before the first step."""
    algorithm, settings = MORE.get(name, (name, FAMILY.get(name, {})))
    made = ALGORITHMS.find(algorithm)(parts(world(), STEPS, select=Uniform(4)), **settings)
    expected = course(made, world())
    monkeypatch.setattr(LocalProblem, "objective", lambda *given, **more: pytest.fail("one by one"))
    found = course(made, world(), engine=Vectorized())
    torch.testing.assert_close(dict(found.final), dict(expected.final), **CLOSE)
    assert found.steps[-1].tally.sums["batches"] == expected.steps[-1].tally.sums["batches"]


@pytest.mark.parametrize("name", ["mime", "feddane"])
def test_a_client_whose_gradient_fails_takes_no_other_with_it(name: str) -> None:
    class Torn(Points):
        def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
            raise OSError("the disk is gone")

    there = world()
    bad = there.clients[4]
    torn = World((*there.clients[:4], Torn(bad.inputs, bad.targets), there.clients[5]))
    made = ALGORITHMS.find(name)(parts(there, STEPS, select=Fixed((0, 4, 2))), **FAMILY[name])
    one, many = (course(made, torn, engine=engine) for engine in (None, vectorized()))
    torch.testing.assert_close(dict(many.final), dict(one.final), **CLOSE)
    assert [s.tally.failed for s in many.steps] == [s.tally.failed for s in one.steps]
    assert many.steps[0].tally.failed


@pytest.mark.parametrize(
    "local",
    [
        {"momentum": 0.5},
        {"stragglers": 0.6},
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ({}, {"clip_norm": 0.8})),
    ],
)
def test_the_contrastive_term_is_stacked_beside_other_rules_and_settings(local: dict[str, Any]) -> None:
    """Clients come back in later rounds beside others that are there for the first time."""
    rule = chain(proximal(mu=0.3), contrastive(mu=2.0))
    made = ALGORITHMS.find("fedir")(parts(world(), STEPS | local, select=Uniform(4), client=rule))
    agree(made, world())
    agree(made, world(), rounds=3, group=2)


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_the_size_of_a_group_changes_nothing_but_the_last_bits(group: int) -> None:
    agree(fedavg(parts(world(), STEPS | {"momentum": 0.5})), world(), group=group)


def test_it_repeats_to_the_bit() -> None:
    made = ALGORITHMS.find("scaffold")(parts(world(), STEPS, model(dropout=0.3), select=Uniform(4)))
    runs = [course(made, world(), engine=vectorized()) for _ in range(2)]
    assert same(*[run.final for run in runs])


def test_a_client_may_appear_twice_and_trains_on_draws_of_its_own() -> None:
    local = {"lr": 0.2, "examples": 4, "batch_size": 2}
    agree(fedavg(parts(world(), local, select=Fixed((1, 4, 1)), aggregate=Mean("uniform"))), world())


def test_a_large_cohort_is_reduced_in_the_same_blocks() -> None:
    there = world([1 + k % 5 for k in range(100)])
    for group in (1, 7, 64):
        agree(
            fedavg(parts(there, {"lr": 0.2, "batch_size": 2}, select=Everyone())),
            there,
            rounds=2,
            group=group,
        )


# ---- requests and number formats


@pytest.mark.parametrize("brought", ["model", "lr"])
def test_what_a_request_brings_itself_is_that_clients_alone(brought: str) -> None:
    train = fedavg(parts(world(), STEPS)).train
    trees = [tree_of(model(seed).build()) for seed in range(3)]
    calls = [
        Call(
            {
                "model": trees[k] if brought == "model" else trees[0],
                "lr": 0.1 * (k + 1) if brought == "lr" else 0.1,
            },
            Client(k, world().clients[k], {}, Secrets((k,)), {}, torch.device("cpu")),
            Rng((k, "a")),
        )
        for k in range(3)
    ]
    for found, call in zip(train.together(calls), calls, strict=True):
        torch.testing.assert_close(
            dict(found.payload["update"]), dict(train(*call).payload["update"]), **CLOSE
        )


def perceptron(input_shape: Sequence[int], classes: int) -> nn.Module:
    """In float32."""
    return nn.Sequential(nn.Linear(*input_shape, 5), nn.Tanh(), nn.Linear(5, classes))


def test_in_fp16_a_client_that_diverges_leaves_the_others_their_small_gradients() -> None:
    """A loss that is scaled up keeps gradients of 1e-7, and those of this one client allow no such scale."""
    train = fedavg(parts(world(), {"lr": 0.2, "steps": 1}, model(factory=perceptron))).train
    tree, g = tree_of(train.model.build()), torch.Generator().manual_seed(2)
    tree["0.weight"] = torch.zeros_like(tree["0.weight"])  # so that an update of 1e-8 is not rounded away
    datas = [
        Points(size * torch.randn(4, FEATURES, generator=g), torch.arange(4) % 3)
        for size in (1e-6, 1e-6, 6e4)
    ]

    def updates(clients: Sequence[int]) -> list[Tensor]:
        there = [
            Client(k, datas[k], {}, Secrets((k,)), {}, torch.device("cpu"), Arithmetic("fp16"))
            for k in clients
        ]
        found = train.together(
            [Call({"model": tree, "lr": 0.2}, client, Rng((client.id,))) for client in there]
        )
        return [one.payload["update"]["0.weight"] for one in found]  # type: ignore[union-attr]

    for found, expected in zip(updates((2, 0, 1))[1:], updates((0, 1)), strict=True):
        assert 0 < expected.abs().max() < 1e-6
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-12)


# ---- failures


class Broken(Points):
    """Data that cannot be read any more after the first batch."""

    def batches(self, size: int, rng: Rng, drop_last: bool = False):
        stream = super().batches(size, rng)
        yield next(stream)
        raise OSError("the disk is gone")


class Absent(Points):
    """Data that are not there at all."""

    def batches(self, size: int, rng: Rng, drop_last: bool = False):
        raise OSError("the disk is not there")


@pytest.mark.parametrize("fault", [Broken, Absent])
def test_a_client_that_fails_takes_no_other_with_it(fault: type[Points]) -> None:
    there = world()
    bad = there.clients[4]
    broken = World((*there.clients[:4], fault(bad.inputs, bad.targets), there.clients[5]))
    made = fedavg(parts(there, STEPS, select=Fixed((0, 4, 2))))
    run = course(made, broken, engine=vectorized())
    assert [step.tally.failed for step in run.steps] == [1] * 4
    assert all("OSError: the disk is" in reason for reason in run.steps[0].tally.failures[4])
    without = course(fedavg(parts(there, STEPS, select=Fixed((0, 2)))), there)
    # The slot, and with it the order of batches, is another: only the first client is told by it.
    assert run.steps[0].tally.per_client[0] == pytest.approx(without.steps[0].tally.per_client[0])


class Missing(World):
    """One client's data cannot be found."""

    def data_of(self, client: int | str) -> Points:
        if client == 4:
            raise OSError("no such folder")
        return super().data_of(client)


def test_a_client_without_data_fails_by_itself_and_the_others_stay_together(monkeypatch) -> None:
    from fedlens.engines.executor import Executor

    made = fedavg(parts(world(), STEPS, select=Fixed((0, 4, 2))))
    monkeypatch.setattr(Executor, "alone", None)  # nobody is trained again
    run = course(made, Missing(world().clients), engine=vectorized(group=3))
    assert [step.tally.failed for step in run.steps] == [1] * 4
    assert all("OSError: no such folder" in reason for reason in run.steps[0].tally.failures[4])
    assert [row["client"] for row in run.steps[0].tally.per_client] == [0, 2]


def test_a_client_whose_weights_run_away_is_refused_and_the_others_stay() -> None:
    there = world()
    far = there.clients[4]
    wild = World((*there.clients[:4], Points(far.inputs * torch.inf, far.targets), there.clients[5]))
    made = fedavg(parts(there, STEPS, select=Fixed((0, 4, 2))))
    one, many = (course(made, wild, engine=engine) for engine in (None, vectorized()))
    torch.testing.assert_close(dict(many.final), dict(one.final), **CLOSE)
    assert [s.tally.failed for s in many.steps] == [s.tally.failed for s in one.steps] == [1] * 4


def test_a_passing_fault_of_nobody_costs_nothing_and_one_that_stays_is_told(monkeypatch) -> None:
    """What is answered one after the other is copied at once: a rule may hand out the memory that it works in."""
    from fedlens.local.vectorized import batched_train as training

    def faulty(train: Any, calls: Any) -> Any:
        raise OSError("for a moment")

    rule = ClientRule(
        name="mine", traits=Traits(stackable=True), finish=lambda p, context: ({}, {"last": list(p)})
    )
    made = fedavg(parts(world(), STEPS, client=rule))
    engine = vectorized()
    engine.check(made.ops)
    monkeypatch.setattr(training, "train_together", faulty)
    run = Course(made, world(), engine=engine).run(2)
    assert same(run.final, course(made, world(), 2).final)
    with pytest.raises(RunFailed, match="with the client rule 'mine': OSError: for a moment"):
        course(made, world(), 3, engine=engine)


def test_where_memory_runs_out_the_group_is_halved_and_tried_again(monkeypatch, capsys) -> None:
    from fedlens.local.vectorized import batched_train as training

    sizes: list[int] = []
    real = training.train_together

    def scarce(train: Any, calls: Any) -> Any:
        sizes.append(len(calls))
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no more")
        return real(train, calls)

    monkeypatch.setattr(training, "train_together", scarce)
    agree(fedavg(parts(world(), STEPS, select=Everyone())), world(), rounds=2)
    assert sizes == [6, 3, 2, 1, 3, 2, 1, 2, 2, 2]  # and from then on in the size that went
    said = capsys.readouterr().err  # once, however often it is halved
    assert said == "out of memory with 6 clients at once; trying 3 at once, and fewer if necessary\n"


def test_where_memory_runs_out_for_one_it_is_answered_alone_from_then_on(monkeypatch) -> None:
    from fedlens.local.vectorized import batched_train as training

    sizes: list[int] = []

    def scarce(train: Any, calls: Any) -> Any:
        sizes.append(len(calls))
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(training, "train_together", scarce)
    made = fedavg(parts(world(), STEPS, select=Everyone()))
    run = Course(made, world(), engine=vectorized()).run(5)
    assert same(run.final, course(made, world(), 5).final)
    assert 1 in sizes
    assert len(sizes) <= 12, "and nothing is tried again that there is no memory for"


def test_what_a_group_held_is_free_when_half_of_it_is_tried(monkeypatch) -> None:
    from fedlens.local.vectorized import batched_train as training

    held: list[weakref.ref[Any]] = []
    real = training.train_together

    def scarce(train: Any, calls: Any) -> Any:
        gc.collect()
        assert not any(ref() is not None for ref in held)
        memory = torch.zeros(10)
        held.append(weakref.ref(memory))
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no more")
        return real(train, calls)

    monkeypatch.setattr(training, "train_together", scarce)
    course(fedavg(parts(world(), STEPS, select=Everyone())), world(), 1, engine=vectorized())
    assert len(held) > 3


# ---- what cannot be done


class Peculiar(nn.Module):
    """A linear model, after something that stacked clients cannot do, or do in another way."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "moody":
            x = x if x.sum() > 0 else 2 * x
        elif self.what == "mixing":
            x = x - x.mean(0)
        elif self.what == "counting":
            self.steps += 1
        elif self.what == "dropping by itself":
            x = nn.functional.dropout(x, 0.5)
        elif self.what == "dropping tokens":
            x = self.dropout(x.reshape(-1, 2)).reshape(-1, FEATURES)
        elif self.what == "dropping turned":
            x = self.dropout(x.t()).t()
        elif self.what == "dropping weights":
            return nn.functional.linear(x, self.dropout(self.layer.weight), self.layer.bias)
        out: Tensor = self.layer(x)
        return out


PECULIAR = ["moody", "mixing", "counting", "dropping by itself", "dropping tokens", "dropping turned"]


@pytest.mark.parametrize("what", [*PECULIAR, "dropping weights"])
def test_models_that_cannot_be_stacked_are_found_out_before_anything_runs(what: str) -> None:
    made = fedavg(parts(world(), STEPS, model(factory=lambda shape, classes: Peculiar(what))))
    with pytest.raises(
        ConfigError, match=r"the model (cannot train|computes other results for) several clients"
    ) as caught:
        course(made, world(), engine=vectorized())
    assert caught.value.where == "model"
    assert "'inline'" in caught.value.hint


def test_a_model_like_it_that_does_nothing_peculiar_is_not() -> None:
    agree(fedavg(parts(world(), STEPS, model(factory=lambda shape, classes: Peculiar("")))), world())


def test_what_the_trial_draws_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert obstacle(fedavg(parts(world(), STEPS, model(dropout=0.3))).train) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_normalization_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="the layer '1' normalizes over the examples of a batch") as caught:
        course(fedavg(parts(world(), STEPS, model(norm=True))), world(), engine=vectorized())
    assert "group normalization" in caught.value.hint


def test_training_that_is_one_client_after_the_other_is_refused_with_the_reason() -> None:
    made = fedavg(parts(world(), STEPS))
    solver = ClientRule(name="s", solve=lambda context: None)  # type: ignore[arg-type,return-value]
    for change, said in (
        ({"rule": solver}, "'s' solves each client's problem"),
        ({"personal": frozenset({"0.weight"})}, "stay at the clients"),
        ({"keep_optimizer": True}, "the optimizer's state is kept"),
    ):
        found = obstacle(replace(made.train, **change))
        assert found is not None
        assert said in found.what
    assert obstacle(made.train) is None
