"""FedVC's settings: what it makes of them, and what is refused with the reason."""

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.client_sampling import BySize, Everyone, Fixed, Uniform
from fedlens.algorithms.fedvc import fedvc
from fedlens.base.errors import ConfigError
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.plan import plan
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1, "batch_size": 4}


def test_what_the_paper_fills_and_what_a_table_puts_in_its_place() -> None:
    given = parts(world(), LOCAL)
    made = fedvc(given, examples=8, lr=0.5)
    assert (made.select, made.aggregate, made.server) == (BySize(), Mean("uniform"), ServerSGD(0.5))
    assert made.train.settings == given.local.model_copy(update={"examples": 8})
    assert made.parts.local == made.train.settings
    assert given.local.examples is None
    assert made.train.rule.plain
    tables = {"select": BySize(2, method="replacement"), "aggregate": Mean(), "server": Momentum()}
    made = fedvc(parts(world(), LOCAL, **tables), examples=8)
    assert (made.select, made.aggregate, made.server) == tuple(tables.values())
    assert fedvc(parts(world(), LOCAL, select=Fixed((1,))), examples=8).select == Fixed((1,))


@pytest.mark.parametrize(
    ("local", "n_vc"),
    [
        ({"batch_size": 64}, 256),
        ({"batch_size": 10}, 260),
        ({"batch_size": "all"}, 256),
        ({"examples": 12, "batch_size": 4}, 12),
    ],
    ids=str,
)
def test_unless_it_is_set_n_vc_is_about_that_of_hsu2020_in_whole_batches(local, n_vc: int) -> None:
    assert fedvc(parts(world(), {"lr": 0.1, **local})).train.settings.examples == n_vc


@pytest.mark.parametrize(
    ("local", "where", "said"),
    [
        ({"examples": 16}, "local.examples", "contradict each other"),
        ({"steps": 3}, "local.steps", "local.steps must not be set"),
        ({"batch_size": 3}, "algorithm.examples", "8 examples are not a whole number of batches of 3"),
        ({"batch_size": 16}, "algorithm.examples", "not a whole number of batches of 16"),
    ],
)
def test_local_settings_that_say_otherwise(local, where: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        fedvc(parts(world(), LOCAL | local), examples=8)
    assert caught.value.where == where
    assert caught.value.hint


@pytest.mark.parametrize("local", [{"examples": 8}, {"batch_size": "all"}, {"epochs": 2}, {"batch_size": 8}])
def test_local_settings_that_agree(local) -> None:
    made = fedvc(parts(world(), LOCAL | local), examples=8)
    assert made.train.settings.examples == 8


@pytest.mark.parametrize("select", [Uniform(2), Uniform(), Everyone()])
def test_selections_of_equal_chances_are_refused(select) -> None:
    with pytest.raises(ConfigError, match="FedVC selects clients in proportion") as caught:
        fedvc(parts(world(), LOCAL, select=select), examples=8)
    assert caught.value.where == "select.name"


# -- a table [select] without a name is the algorithm's usual one --------------------------------------------

LEAST = {
    "rounds": 1,
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
    "model": "linear",
    "local": {"lr": 0.1},
}


def selection(*changes: str, **more) -> dict:
    source = override(Source({**LEAST, **more}), changes)
    table = plan(read_config(source.values, source.locate), source).config.select
    return {name: value for name, value in (table or {}).items() if value is not None}


BY_SIZE = {"name": "by-size", "method": "systematic", "clients_per_round": 3}
ALGORITHM_2 = {"name": "by-size", "method": "replacement", "clients_per_round": 3}
UNIFORM = {"name": "uniform", "clients_per_round": 3}


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ("fedvc", BY_SIZE),
        ({"name": "fedvc", "examples": 64}, BY_SIZE),
        ({"name": "fedprox", "scheme": "algorithm-2"}, ALGORITHM_2),
        ({"name": "fedprox"}, UNIFORM),
        ("fedavg", UNIFORM),
    ],
)
def test_without_a_name(algorithm, wanted) -> None:
    assert selection(algorithm=algorithm, select={"clients_per_round": 3}) == wanted
    assert selection("select.clients_per_round=3", algorithm=algorithm) == wanted


def test_a_name_stays() -> None:
    for name in ("uniform", "by-size"):
        given = {"name": name, "clients_per_round": 3}
        assert selection(algorithm="fedvc", select=given)["name"] == name
        assert selection(algorithm="fedavg", select=given)["name"] == name
    assert selection(algorithm="fedvc") == {}
    prox = {"name": "fedprox", "scheme": "algorithm-2"}
    assert selection(algorithm=prox, select=UNIFORM) == UNIFORM  # nothing of the usual one is left in it
    assert selection(algorithm=prox, select={"name": "by-size", "clients_per_round": 3}) == BY_SIZE


def test_another_algorithm_by_an_override_brings_its_selection_in_place_of_the_recipes_usual_one() -> None:
    recipe = {"select": {"name": "uniform", "clients_per_round": 3}, "algorithm": "fedavg"}
    assert selection("algorithm.name=fedvc", **recipe) == BY_SIZE
    assert selection("algorithm.name=fedprox", "algorithm.scheme=algorithm-2", **recipe) == ALGORITHM_2
    assert selection("algorithm.name=fedprox", **recipe) == UNIFORM
    assert (
        selection("algorithm.name=fedvc", "select.name=uniform", **recipe) == UNIFORM
    )  # refused when it is built
    source = read_source("digits", ["algorithm.name=fedvc"])
    assert plan(read_config(source.values), source).config.select == BY_SIZE | {
        "clients_per_round": 10,
        "fraction": None,
    }
