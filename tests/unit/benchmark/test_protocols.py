"""The bare loops of `benchmarks.protocols` do the work that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import protocols
from benchmarks.protocols import (
    CASES,
    MATCHED,
    SPLIT,
    VERTICAL,
    Case,
    Steps,
    gkt_client,
    gkt_server,
    match,
    mix,
    nas,
    said,
    split,
    timed,
    vertical,
)
from fedlens.benchmark.federation import Federation
from fedlens.core.arithmetic import PLAIN
from fedlens.core.protocol import ModelSpec
from fedlens.local.knowledge_transfer import REST
from fedlens.local.layer_by_layer import MatchLayer
from fedlens.local.personal_leaves import PERSONAL
from fedlens.models.darts import darts_search
from fedlens.models.resnet import resnet20
from fedlens.models.stages import cut


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a case makes, by its name; and few images in it, all in one batch, in one layout."""
    found: dict[str, Any] = {}

    def noted(name: str, make: Any) -> None:
        monkeypatch.setattr(
            protocols, name, lambda *given, **named: found.setdefault(name, make(*given, **named))
        )

    noted("Federation", Federation)
    noted("Steps", Steps)
    noted("cut", cut)
    monkeypatch.setattr(protocols, "IMAGES", 8)
    monkeypatch.setattr(protocols, "LAYOUT", PLAIN)
    return found


def equal(trained: Mapping[str, Tensor], bare: Mapping[str, Tensor]) -> None:
    assert trained.keys() >= bare.keys() > set()
    for name, value in bare.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


def test_the_bare_loop_of_split_learning_ends_at_the_weights_of_a_round(made: dict[str, Any]) -> None:
    # One client, and all its images in each batch: the order in which batches are drawn does not matter.
    workload = replace(SPLIT[2], clients=1, cohort=1, examples=8, batch=8, epochs=2, lr=0.5)
    case = split(workload)
    initial = made["Federation"].state["model"]
    case.ours(), case.bare()
    made["Federation"].close()
    trained = made["Federation"].state["model"]
    assert max(float((trained[name] - initial[name]).abs().max()) for name in trained) > 1e-3
    equal(trained, {name: v for half in made["cut"] for name, v in half.state_dict().items()})
    assert case.requests == 4


def test_the_bare_loop_of_vertical_learning_ends_at_the_weights_of_a_round(made: dict[str, Any]) -> None:
    case = vertical(replace(VERTICAL[0], examples=8, batch=8, epochs=2, lr=0.5))
    initial = made["Federation"].state["model"]
    bottoms, top = case.bare()  # type: ignore[misc]
    case.ours()
    made["Federation"].close()
    trained = made["Federation"].state["model"]
    assert max(float((trained[name] - initial[name]).abs().max()) for name in trained) > 1e-3
    bare = {f"bottoms.{k}.{n}": v for k, bottom in enumerate(bottoms) for n, v in bottom.state_dict().items()}
    equal(trained, bare | {f"top.{name}": value for name, value in top.state_dict().items()})


def test_the_bare_steps_of_fedgkt_end_at_the_weights_of_its_operations(made: dict[str, Any]) -> None:
    case = gkt_client()
    state = case.ours().state
    case.bare()
    equal({**state[PERSONAL], **state[REST]}, made.pop("Steps").module.state_dict())
    case = gkt_server()
    model = case.ours().payload["model"]
    case.bare()
    equal(model, made["Steps"].module.state_dict())


def test_the_bare_loop_of_fednas_ends_at_the_weights_of_a_client(made: dict[str, Any]) -> None:
    case = nas()
    bare = dict(case.bare().named_parameters())  # type: ignore[attr-defined]
    model = ModelSpec(partial(darts_search, channels=4, cells=3, nodes=2), "", {}, (3, 32, 32), 10, 0)
    update = case.ours().payload["update"]  # type: ignore[attr-defined]
    moved = {name: value - update[name] for name, value in model.build().named_parameters()}
    equal({n: v.detach() for n, v in moved.items()}, {n: v.detach() for n, v in bare.items()})


def test_the_case_of_mixing_mixes_three_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "MIXINGS", 2)
    mixed = mix(resnet20).ours().state["after"][PERSONAL]
    models = [
        ModelSpec(resnet20, "resnet20", {}, (3, 32, 32), 10, seed).build().state_dict() for seed in range(3)
    ]
    equal(
        mixed, {name: sum(m[name] for m in models) / 3 for name in mixed if mixed[name].is_floating_point()}
    )


def test_a_pass_with_known_matches_ends_at_the_network_of_a_pass_that_matches(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    matching = MatchLayer.__call__
    monkeypatch.setattr(MatchLayer, "__call__", lambda *given: calls.append(1) or matching(*given))
    case = match(replace(MATCHED[1], clients=2, cohort=2, examples=8, epochs=1))
    networks = []
    for work, times in ((case.ours, 2), (case.bare, 2), (case.ours, 4)):
        work()
        assert len(calls) == times
        networks.append(made["Federation"].state["model"])
    made["Federation"].close()
    equal(networks[0], networks[1])
    equal(networks[0], networks[2])


def test_a_line_says_whether_the_goal_is_met_and_what_a_request_adds() -> None:
    assert said("a", "wall", Case(int, float, 2.0), [3.0], [2.0]).endswith(
        "1.500 [1.500, 1.500]; goal 2.00 met"
    )
    steps = Case(int, float, 1.1, requests=200)
    assert said("a", "wall", steps, [2.4], [2.0]).endswith(" 2.00 ms a request; goal 1.10 and 1 ms met")
    assert said("a", "wall", steps, [2.41], [2.0]).endswith("missed")


def test_a_pair_times_both_sides_and_the_first_pair_warms_up() -> None:
    calls: list[str] = []
    ours, bare = timed(Case(lambda: calls.append("ours"), lambda: calls.append("bare"), 1.0), 2)
    assert (len(ours), len(bare)) == (2, 2)
    assert calls == ["bare", "ours", "ours", "bare", "bare", "ours"]
    assert len(CASES) == 12
