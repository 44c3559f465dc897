"""ADMM's settings: what is refused and why, what composes, what is counted."""

from typing import Any

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.admm import admm, ceadmm, dual, iceadmm, liadmm
from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.base.errors import ConfigError
from fedlens.core.tree import part
from fedlens.local.rules import proximal
from tests.identity.identity_kit import course, model, parts, same, world

FULL = {"lr": 0.1, "batch_size": "all"}
SOLVERS = [admm, ceadmm, iceadmm, liadmm]


@pytest.mark.parametrize("make", SOLVERS)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": "adam"}, "optimizer"),
        ({"momentum": 0.9}, "momentum"),
        ({"momentum": 0.9, "nesterov": True}, "momentum"),
        ({"epochs": 2}, "epochs"),
        ({"steps": 1}, "steps"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"epochs": 2, "stragglers": 0.5}, "epochs"),
    ],
)
def test_settings_of_local_steps_are_refused_where_a_solver_takes_none(make, changes, key: str) -> None:
    with pytest.raises(ConfigError, match=f"so local.{key} has no effect") as raised:
        make(parts(world(), FULL | changes))
    assert raised.value.where == f"local.{key}"


@pytest.mark.parametrize(
    ("make", "settings", "uses"),
    [
        (admm, {}, False),
        (ceadmm, {}, False),
        (iceadmm, {}, False),
        (liadmm, {}, True),
        (liadmm, {"gamma": 0.1}, False),
    ],
)
def test_a_decay_of_the_learning_rate_is_refused_where_that_is_not_used(make, settings, uses: bool) -> None:
    decaying = parts(world(), FULL | {"lr_decay": 0.9})
    if uses:
        make(decaying, **settings)
        return
    with pytest.raises(ConfigError, match=r"local\.lr_decay has no effect"):
        make(decaying, **settings)


@pytest.mark.parametrize("make", SOLVERS)
def test_one_epoch_and_the_usual_optimizer_may_be_written_down(make) -> None:
    make(parts(world(), FULL | {"epochs": 1, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.1}))


@pytest.mark.parametrize(("name", "value"), [("tolerance", 1e-4), ("max_iterations", 5)])
def test_settings_of_the_exact_solver_are_refused_beside_sgd(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' belongs to solver = 'exact'") as raised:
        admm(parts(world(), FULL), solver="sgd", **{name: value})  # type: ignore[arg-type]
    assert raised.value.where == f"algorithm.{name}"


def test_gamma_is_refused_where_it_would_drop_out() -> None:
    with pytest.raises(ConfigError, match="whatever gamma is") as raised:
        liadmm(parts(world(), FULL), gradient="training", gamma=0.1)
    assert raised.value.where == "algorithm.gamma"


@pytest.mark.parametrize(
    ("local", "limit"),
    [({}, 20.0), ({"momentum": 0.5}, 30.0), ({"momentum": 0.5, "nesterov": True}, 15.0)],
    ids=str,
)
def test_a_penalty_that_makes_the_steps_diverge_is_refused(local, limit: float) -> None:
    local = {"lr": 0.1, **local}
    admm(parts(world(), local), solver="sgd", sigma=0.99 * limit)
    with pytest.raises(ConfigError, match="SGD on that term alone diverges") as raised:
        admm(parts(world(), local), solver="sgd", sigma=1.001 * limit)
    assert raised.value.where == "local.lr"
    assert f"below {0.1 / 1.001:g}" in raised.value.hint
    for harmless in (
        {"lr": 0.1, "optimizer": "adam"},
        {"lr": 0.1, "steps": 1},
        {"lr": 0.1, "clip_norm": 1.0},
    ):
        admm(parts(world(), harmless), solver="sgd", sigma=1.001 * limit)


def test_with_equal_sigmas_the_smallest_client_decides_what_is_too_steep() -> None:
    there = world()
    steepest = there.info.sizes.mean() / there.info.sizes.min()  # rho_i of the smallest, for sigma = 1
    assert steepest > 1
    admm(parts(there, {"lr": 0.1}), solver="sgd", sigmas="equal", sigma=0.99 * 20 / steepest)
    with pytest.raises(ConfigError, match="diverges"):
        admm(parts(there, {"lr": 0.1}), solver="sgd", sigmas="equal", sigma=1.001 * 20 / steepest)


class Normalized(Mean):
    """As FedNova's."""

    @property
    def normalized(self) -> bool:
        return True


@pytest.mark.parametrize("make", SOLVERS)
def test_normalized_averaging_is_refused(make) -> None:
    with pytest.raises(ConfigError, match="do not send a sum of steps"):
        make(parts(world(), FULL, aggregate=Normalized()))


@pytest.mark.parametrize("make", SOLVERS)
def test_a_client_twice_in_a_round_is_refused_where_the_mean_is_over_all(make) -> None:
    twice = parts(world(), FULL, select=Twice((0, 0, 1)))
    make(twice)
    with pytest.raises(ConfigError, match="appear twice"):
        make(twice, absent="last")


class Twice(Fixed):
    """A selection that says so."""

    def repeats(self, federation: Any) -> bool:
        return True


def test_rules_that_bend_steps_go_with_steps_alone() -> None:
    bent = parts(world(), FULL, select=Uniform(3), client=proximal(mu=0.3))
    with pytest.raises(ConfigError, match="solves its subproblem directly"):
        admm(bent)
    both = course(admm(bent, solver="sgd", sigma=0.4), world(), rounds=2)
    alone = course(admm(parts(world(), FULL, select=Uniform(3)), solver="sgd", sigma=0.4), world(), rounds=2)
    assert same(both.steps[0].after["model"], alone.steps[0].after["model"])  # one step: nothing to pull yet
    assert same(both.final, alone.final)
    long = FULL | {"epochs": 3}
    bent, plain = (parts(world(), long, select=Uniform(3), client=rule) for rule in (proximal(mu=0.3), None))
    assert not same(*(course(admm(p, solver="sgd"), world(), rounds=1).final for p in (bent, plain)))


@pytest.mark.parametrize("make", SOLVERS)
def test_the_rule_of_the_same_name_on_top_is_refused(make) -> None:
    with pytest.raises(ConfigError, match="'dual' is set twice"):
        make(parts(world(), FULL, client=dual()))


def test_the_dual_variable_goes_on_top_of_fedavg_with_another_rule() -> None:
    made = parts(world(), {"lr": 0.1, "epochs": 2}, select=Uniform(3), client=dual(sigma=0.5))
    assert not same(
        course(fedavg(made), world()).final,
        course(fedavg(parts(world(), {"lr": 0.1, "epochs": 2}, select=Uniform(3))), world()).final,
    )


@pytest.mark.parametrize("absent", ["drop", "last"])
@pytest.mark.parametrize("make", SOLVERS)
def test_what_is_sent_is_what_fedavg_sends(make, absent: str) -> None:
    run = course(make(parts(world(), FULL, select=Uniform(3)), absent=absent), world(), rounds=1)
    plain = course(fedavg(parts(world(), FULL, select=Uniform(3))), world(), rounds=1)
    (step,), (usual,) = run.steps, plain.steps
    assert step.tally.bytes_down == usual.tally.bytes_down
    flags = 3 * 8 if absent == "last" else 0
    assert step.tally.bytes_up == usual.tally.bytes_up + flags


def test_what_is_kept_is_what_the_page_says() -> None:
    spec = model()
    weights = sum(p.numel() for p in spec.build().parameters())
    trainable = part(parts(world(), FULL).spec, "weight", trainable=True)
    for make, absent, clients, server in (
        (admm, "drop", 1, 0),
        (admm, "last", 2, 2),
        (ceadmm, "drop", 1, 0),
        (iceadmm, "drop", 2, 0),
        (iceadmm, "last", 3, 2),
        (liadmm, "drop", 1, 0),
        (liadmm, "last", 2, 2),
    ):
        algorithm = make(parts(world(), FULL, select=Fixed((2,))), absent=absent)
        assert algorithm.rule.traits.invariant == (absent == "last")
        kept = kept_by(algorithm)
        assert all(list(tree) == trainable for tree in kept.values())
        assert sum(t.numel() for tree in kept.values() for t in tree.values()) == clients * weights
        state = course(algorithm, world(), rounds=1).steps[-1].after.get("rules", {}).get("dual", {})
        assert sum(t.numel() for tree in state.values() for t in tree.values()) == server * weights


def kept_by(algorithm: Any) -> dict[str, Any]:
    from tests.unit.local.test_training import client, payload

    torch.manual_seed(0)
    outcome = algorithm.train(payload(model()), client(world().clients[2]), rng())
    assert algorithm.train.expect(algorithm.parts.spec, most=12).fault(outcome.payload) is None
    return dict(outcome.state)


def rng() -> Any:
    from fedlens.core.random import Rng

    return Rng((0,))


@pytest.mark.parametrize(
    ("make", "settings", "passes"),
    [
        (liadmm, {}, 1),
        (iceadmm, {"k_0": 4}, 4),
        (admm, {"tolerance": 10.0}, 2),
        (ceadmm, {"tolerance": 10.0}, 10),
    ],
)
def test_every_look_at_the_data_is_counted(make, settings, passes: int) -> None:
    """A start that is good enough costs one look, and the last pass another."""
    made = parts(world(), {"lr": 0.1, "batch_size": 5}, select=Fixed((4,)))
    (step,) = course(make(made, **settings), world(), rounds=1).steps
    assert step.tally.batches_max == 3 * passes  # 12 points by 5
    assert step.tally.sums["examples"] == 12 * passes


def test_the_loss_that_is_logged_is_the_tasks_not_the_subproblems() -> None:
    there = world()
    (step,) = course(
        liadmm(parts(there, FULL | {"weight_decay": 5.0}, select=Fixed((4,)))), there, rounds=1
    ).steps
    module = model().build()
    expected = torch.nn.functional.cross_entropy(module(there.clients[4].inputs), there.clients[4].targets)
    assert step.tally.sums["loss"] / step.tally.sums["examples"] == pytest.approx(
        float(expected.detach()), rel=1e-12
    )
