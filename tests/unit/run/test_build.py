"""From settings to objects: what is found, filled in, and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedlens.algorithms.averaging import Parts, averaging
from fedlens.base.errors import ConfigError, DataError
from fedlens.core.algorithm_base import AlgorithmBase, BareAlgorithm
from fedlens.core.tree import digest
from fedlens.engines.default import Default
from fedlens.engines.inline import Inline
from fedlens.run.build import Built, build, data_directory, located
from fedlens.run.run_description import data_digest
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.plan import plan

LEAST: dict[str, Any] = {
    "rounds": 3,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {
        "dataset": {"name": "synthetic", "train": 60, "test": 20, "shape": [1, 4, 4]},
        "partition": {"name": "iid", "clients": 4},
    },
}


def made(*changes: str, **more: Any) -> Built:
    source = override(Source({**LEAST, **more}), changes)
    return build(plan(read_config(source.values, source.locate), source), Path("nowhere"), False)


def planned(*changes: str, **more: Any) -> dict[str, Any]:
    source = override(Source({**LEAST, **more}), changes)
    return plan(read_config(source.values, source.locate), source).config.model_dump()


def test_a_plan_has_every_setting_filled_in_and_loads_nothing() -> None:
    config = planned(
        "model.name=mlp", "algorithm=fedavgm", "engine=processes", "server=momentum", "select.fraction=0.5"
    )
    assert config["model"] == {"name": "mlp", "hidden": 200}
    assert config["algorithm"] == {"name": "fedavgm", "lr": 1.0, "momentum": 0.9, "nesterov": False}
    assert config["engine"] == {
        "name": "processes",
        "workers": 0,
        "threads": 1,
        "group": 1,
        "device": "auto",
        "precision": "fp32",
        "channels_last": "auto",
        "window": 512,
        "timeout": 3600.0,
        "state_memory": 1024,
        "verify": 0,
    }
    assert config["server"] == {"name": "momentum", "lr": 1.0, "momentum": 0.9, "nesterov": False}
    assert config["select"] == {"name": "uniform", "clients_per_round": None, "fraction": 0.5}
    assert config["data"]["dataset"]["noise"] == 0.5


def test_settings_of_what_was_named_before_are_dropped_unless_they_fit_or_were_asked_for() -> None:
    given = {"algorithm": {"name": "fedprox", "mu": 1.0, "lr": 0.5}}
    assert planned("algorithm.name=fedavg", **given)["algorithm"] == {"name": "fedavg", "lr": 0.5}
    with pytest.raises(ConfigError, match="the algorithm 'fedavg' has no setting 'mu'"):
        planned("algorithm.name=fedavg", "algorithm.mu=2", **given)
    with pytest.raises(ConfigError, match="the algorithm 'fedavg' has no setting 'mu'"):
        planned(algorithm={"name": "fedavg", "mu": 1.0})


def test_what_is_built_fits_together() -> None:
    built = made("data.validation=0.25", "select.clients_per_round=3", "evaluation.train=true")
    assert built.federation.clients == len(built.partition) == 4
    assert built.federation.held == {"@test": 20, "@train": 45, "@validation": 15}
    assert built.clients_per_round == 3
    assert built.parameters == 16 * 10 + 10
    assert built.partition.census is not None
    assert built.partition.census.dense().shape == (4, 10)
    assert built.partition.census.totals().sum() == 45
    assert built.algorithm.parts.measure == ("@test", "@validation", "@train")  # type: ignore[attr-defined]
    assert isinstance(built.engine, Default)


def test_each_seed_moves_its_own_thing() -> None:
    def trees(**seeds: int) -> tuple[str, str, str]:
        built = made(seeds=seeds)
        return data_digest(built), built.partition.digest, digest(dict(built.model.build().state_dict()))

    base = trees()
    assert trees() == base
    for at, name in enumerate(("data", "partition", "initialization")):
        changed = trees(**{name: 5})
        assert [a == b for a, b in zip(changed, base, strict=True)] == [k != at for k in range(3)], name
    assert trees(selection=5, training=5) == base


def test_the_digest_of_the_data_sees_every_image_and_label() -> None:
    built = made()
    before = data_digest(built)
    for split in (built.client_data.dataset.train, built.client_data.dataset.test):
        for tensor in (split.inputs, split.targets):
            old = tensor.view(-1)[-1].item()
            tensor.view(-1)[-1] = (old + 1) % 10
            assert data_digest(built) != before
            tensor.view(-1)[-1] = old
    assert data_digest(built) == before


def test_functions_of_ones_own_in_every_place() -> None:
    def algorithm(parts: Parts, *, mu: float = 0.5) -> Any:
        assert mu == 2.0
        return averaging(parts)

    def model(shape: Any, classes: int, *, width: int = 3) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Linear(width, classes))

    built = made(algorithm={"name": algorithm, "mu": 2}, model=model, engine=lambda: Inline())
    assert built.parameters == 16 * 3 + 3 + 3 * 10 + 10
    assert "algorithm" in built.config.algorithm["name"]


class Minimal:
    """An algorithm with the members of `Algorithm` and no base class; its round() returns another's generator."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.ops = inner, inner.ops

    def init(self, model: Any, federation: Any) -> Any:
        return self.inner.init(model, federation)

    def round(self, state: Any, ctx: Any) -> Any:
        return self.inner.round(state, ctx)

    def evaluate(self, state: Any, ctx: Any) -> Any:
        return self.inner.evaluate(state, ctx)

    def model(self, state: Any) -> Any:
        return self.inner.model(state)


class Declared(Minimal, AlgorithmBase):
    """The same, and it declares what it can tell a run about itself."""

    ops: Any = None
    discloses = ("Each client sends a postcard.",)
    evaluation_asks = 2

    def clients_per_round(self, federation: Any) -> int:
        return self.inner.clients_per_round(federation)


class Undeclared(Minimal):
    """It discloses something, and nobody would ask it what."""

    discloses = ("Each client sends a postcard.",)


class HalfBatched:
    """An operation with one of the members of `BatchedOp`."""

    def __call__(self, *given: Any) -> Any: ...
    def together(self, calls: Any) -> Any: ...


def test_an_algorithm_of_the_minimal_members_has_the_defaults() -> None:
    built = made(algorithm=lambda parts: Minimal(averaging(parts)))
    assert isinstance(built.algorithm, BareAlgorithm)
    assert (built.clients_per_round, built.algorithm.discloses, built.algorithm.evaluation_asks) == (
        None,
        (),
        1,
    )
    assert built.algorithm.ops.keys() == averaging(built.algorithm.algorithm.inner.parts).ops.keys()  # type: ignore[attr-defined]


def test_an_algorithm_that_inherits_from_the_base_class_is_asked_for_more() -> None:
    algorithm = made(algorithm=lambda parts: Declared(averaging(parts))).algorithm
    assert algorithm.discloses == Declared.discloses
    assert made(algorithm=lambda parts: Declared(averaging(parts))).clients_per_round == 4
    with pytest.raises(ConfigError, match="an evaluation asks 2 times here"):
        made(
            "evaluation.overlap=true", "engine=processes", algorithm=lambda parts: Declared(averaging(parts))
        )


class SilentEngine:
    """An engine that would not be asked for its `check`."""

    def open(self, *given: Any) -> None: ...
    def answer(self, *given: Any) -> Any: ...
    def close(self) -> None: ...
    def check(self, ops: Any) -> None: ...


def half_batched(parts: Parts) -> Any:
    return dataclasses.replace(averaging(parts), more_ops={"odd": HalfBatched()})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"algorithm": lambda parts: Undeclared(averaging(parts))},
            "the algorithm Undeclared has 'discloses', which is only used if its class inherits from AlgorithmBase "
            "(algorithm.name); inherit from fedlens.core.algorithm_base.AlgorithmBase, or rename 'discloses'.",
        ),
        (
            {"engine": SilentEngine},
            "the engine SilentEngine has 'check', which is only used if its class inherits from EngineBase "
            "(engine.name); inherit from fedlens.core.engine_base.EngineBase, or rename 'check'.",
        ),
        (
            {"algorithm": half_batched},
            "the operation 'odd' (HalfBatched) has 'together' and not all of BatchedOp's methods, so it would never be "
            "called for several clients at once (algorithm.name); add 'together', 'obstacle', 'footprint' and 'trial' "
            "(see fedlens.core.protocol.BatchedOp), or rename 'together'.",
        ),
        (
            {"aggregate": lambda: SimpleNamespace(weighting="examples", reduce=None, aggregate=None)},
            "has no 'exchange' (aggregate.name); inherit from fedlens.aggregate.mean.Aggregate.",
        ),
        (
            {"aggregate": lambda: SimpleNamespace(weighting="examples", exchange=None)},
            "has no 'normalized' (aggregate.name); inherit from fedlens.aggregate.mean.Aggregate.",
        ),
        (
            {"aggregate": lambda: SimpleNamespace(weighting="examples", exchange=None, normalized=False)},
            "has no 'ops' (aggregate.name); inherit from fedlens.aggregate.mean.Aggregate.",
        ),
    ],
    ids=["algorithm", "engine", "operation", "aggregate", "normalized", "ops"],
)
def test_what_would_silently_not_be_used_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**more)
    assert told in str(refused.value).replace("\n", " ")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"model": lambda shape, classes: None},
            "returned None (model.name); end it with: return the model.",
        ),
        ({"model": lambda shape, classes: 3}, "returned a int, which has no 'state_dict' (model.name)."),
        ({"model": lambda shape, classes: nn.Linear(-1, 2)}, "failed: RuntimeError: "),
        ({"algorithm": lambda parts: object()}, "returned a object, which has no 'ops' (algorithm.name)."),
        (
            {"algorithm": lambda parts: [][1]},
            "failed: IndexError: list index out of range (test_build.py, line ",
        ),
        ({"select": lambda: None}, "returned None (select.name)"),
        (
            {"engine": lambda: 3},
            "returned a int, which has no 'open' (engine.name); it needs open(program, states) and ",
        ),
        (
            {"data": {**LEAST["data"], "partition": lambda labels, seed: labels}},
            "returned a Table, which has no 'ids'",
        ),
    ],
)
def test_what_a_users_own_function_does_wrong_is_one_sentence(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**more)
    assert said in str(caught.value)
    assert str(caught.value).startswith("the ")


def test_a_signature_without_types_is_explained() -> None:
    def bare(parts, *, mu=1.0):  # type: ignore[no-untyped-def]
        return averaging(parts)

    with pytest.raises(
        ConfigError, match="cannot be read from its signature: TypeError: the parameter 'mu' has no type"
    ):
        planned(algorithm=bare)


def test_an_infinite_alpha_is_a_partition_and_an_infinite_mu_is_none() -> None:
    partition = {"name": "dirichlet", "clients": 2, "alpha": float("inf")}
    assert len(made(data={**LEAST["data"], "partition": partition}).partition) == 2
    with pytest.raises(ConfigError, match=r"'mu' is inf, but must be a finite number \(algorithm\.mu\)"):
        planned(algorithm={"name": "fedprox", "mu": float("inf")})


@pytest.mark.parametrize(
    ("where", "key", "wanted"),
    [
        ("clients", "data.partition", "data.partition.clients"),
        ("select.clients", "select", "select.clients"),
        ("data.validation", "", "data.validation"),
        (None, "model", "model"),
        (None, "", None),
    ],
)
def test_an_error_from_further_down_gets_its_whole_key(
    where: str | None, key: str, wanted: str | None
) -> None:
    error = located(ConfigError("wrong", where=where, hint="right"), key, str)
    assert (error.what, error.where, error.hint) == ("wrong", wanted, "right")


def test_data_errors_keep_the_file_that_they_name() -> None:
    with pytest.raises(
        DataError, match="MNIST not found in nowhere: looked for MNIST/raw/train-images-idx3-ubyte"
    ):
        made("data.dataset=mnist")


def test_where_the_data_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_DATA", "~/here")
    assert data_directory(Path("given")) == Path("given")
    assert data_directory(None) == Path("~/here").expanduser()
    monkeypatch.delenv("FEDLENS_DATA")
    assert data_directory(None) == Path("~/.cache/fedlens").expanduser()


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    built = made()
    assert torch.equal(torch.get_rng_state(), before)
    assert dataclasses.is_dataclass(built)


def test_another_algorithm_leaves_the_recipes_slots_behind() -> None:
    source = read_source("digits", ["algorithm.name=centralized"])
    made = plan(read_config(source.values), source)
    assert made.config.select is None
    assert made.notes == ("'centralized' does not use the recipe's table [select]: it is left out",)
    source = read_source("digits", ["algorithm.name=centralized", "select.clients_per_round=3"])
    with pytest.raises(ConfigError, match=r"does not use the table \[select\] .*select.clients_per_round"):
        plan(read_config(source.values), source)


def test_a_file_of_the_users_is_found_again_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedlens.models.simple import linear\ndef net(shape, classes):\n    return linear(shape, classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    source = read_source("digits", ["model.name=mine.py:net"])
    assert plan(read_config(source.values), source).config.model["name"] == f"{tmp_path / 'mine.py'}:net"


@pytest.mark.parametrize(
    ("changes", "slot", "table"),
    [
        (["algorithm=fednova", "aggregate.weighting=uniform"], "aggregate", ("normalized", "uniform")),
        (["algorithm=scaffold", "aggregate.weighting=examples"], "aggregate", ("mean", "examples")),
        (["algorithm=fedadam", "server.lr=0.5"], "server", ("adam", 0.5)),
        (["algorithm=fedavgm", "server.lr=0.5"], "server", ("momentum", 0.5)),
        (["algorithm=fedprox", "server.lr=0.5"], "server", ("plain", 0.5)),
        (["algorithm=fedvc", "select.fraction=0.5"], "select", ("by-size", 0.5)),
    ],
)
def test_a_slot_without_a_name_is_what_the_algorithm_fills_it_with(
    changes: list[str], slot: str, table: tuple[Any, ...]
) -> None:
    found = planned(*changes)[slot]
    assert found["name"] == table[0]
    assert table[1] in found.values()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (["algorithm.name=fedavg", "algorithm.lr=0.5", "server.name=momentum"], "lr"),
        (["algorithm.name=fedavgm", "algorithm.momentum=0.5", "server.name=adam"], "momentum"),
        (["algorithm.name=fedadam", "algorithm.tau=0.1", "server.lr=0.1"], "tau"),
        (["algorithm.name=fedprox", "algorithm.mu=0.5", "algorithm.lr=0.1", "server.lr=0.2"], "lr"),
        (["algorithm.name=fednova", "algorithm.tau_eff=50", "aggregate.weighting=uniform"], "tau_eff"),
        # At their defaults, and asked for all the same.
        (["algorithm.name=fedadam", "algorithm.lr=0.01", "server.name=plain"], "lr"),
        (
            ["algorithm.name=fedadam", "algorithm.bias_correction=false", "server.name=plain"],
            "bias_correction",
        ),
    ],
)
def test_a_setting_that_a_table_server_would_pass_over_is_refused(changes: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"replaces .* sets up with '{name}'") as refused:
        made(*changes)
    assert refused.value.where == f"--set algorithm.{name}"


def test_a_runs_own_config_in_which_all_defaults_stand_is_not_refused() -> None:
    config = plan(
        read_config({**LEAST, "algorithm": "fedadam", "server": {"name": "plain"}}), Source({})
    ).config
    written = config.model_dump()
    assert written["algorithm"]["lr"] == 0.01
    assert made(**written).algorithm.server.lr == 1.0


@pytest.mark.parametrize("given", ["scaffold", "moon", "local-only"])
@pytest.mark.parametrize("client", ["plain", ["plain"], [{"name": "plain"}, {"name": "plain"}]])
def test_a_plain_client_does_not_undo_the_algorithms_own_rule(given: str, client: Any) -> None:
    data = {**LEAST["data"], "validation": 0.2, "validation_from": "client"}
    if given == "local-only":
        assert made(algorithm=given, client=client, data=data).algorithm.rule.plain
        return
    with pytest.raises(ConfigError, match="'plain' has no effect, because the algorithm keeps its own rule"):
        made(algorithm=given, client=client, model={"name": "mlp"})


def test_a_plain_client_beside_another_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="'plain' has no effect beside 'proximal'"):
        made(client=["proximal", "plain"])


def test_more_clients_than_hold_something_out_are_not_measured() -> None:
    data = {**LEAST["data"], "validation": 0.2, "validation_from": "client"}
    assert made(data=data, evaluation={"clients": 4}).algorithm.measured == 4
    with pytest.raises(ConfigError, match="5 clients are to be measured, but only 4 hold out") as refused:
        made(data=data, evaluation={"clients": 5})
    assert refused.value.where == "evaluation.clients"


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (["model.name=small-cnn", "model.norm=batch"], "--set model.name", "the layer '1' normalizes over"),
        (
            ["algorithm.name=iceadmm", "local.batch_size=all"],
            "client",
            "'dual' solves each client's problem separately",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_said_before_there_is_a_run(
    changes: list[str], where: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        made("engine.name=vectorized", *changes)
    assert refused.value.where == where


def test_a_selection_of_the_users_keeps_what_it_says_beside_another_algorithm() -> None:
    given = {"select": {"clients_per_round": 2, "name": "uniform"}}
    changes = ["algorithm.name=fedprox", "algorithm.scheme=algorithm-2", "select.method=systematic"]
    expected = {"name": "by-size", "method": "systematic", "clients_per_round": 2, "fraction": None}
    assert planned(*changes, **given)["select"] == expected


def test_a_table_server_goes_with_settings_that_are_for_something_else() -> None:
    assert made("algorithm.name=fedprox", "algorithm.mu=0.5", "server.lr=0.1").algorithm.server.lr == 0.1
    assert made("algorithm.name=fedavgm", "server.name=adam").algorithm.rule.plain


def test_an_evaluation_of_two_asks_cannot_go_on_beside_the_next_round() -> None:
    changes = ("data.validation=0.2", "data.validation_from=client", "evaluation.clients=all")
    beside = ("evaluation.overlap=true", "engine.name=processes")
    with pytest.raises(ConfigError, match="asks 2 times") as caught:
        made(*changes, *beside)
    assert caught.value.where is not None
    assert "evaluation.overlap" in caught.value.where
    made(*changes, *beside, "engine.name=inline")  # which evaluates at once
    made(*changes[:2], *beside)
