"""`engine.verify`: clients computed again by the reference, and a run whose numbers do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import HookError
from fedlens.engines.default import default
from fedlens.engines.verify import difference
from fedlens.local.vectorized.batched_train import BatchedTrain

FILE = str(Path(__file__))


@dataclass(frozen=True)
class Wrong(BatchedTrain):
    """Training that sends twice the update where clients train together, and remembers visits at the worker."""

    how: str = "together"

    def together(self, calls: Any) -> Any:
        outcomes = list(replace(self, how="").together(calls)) if self.how else super().together(calls)
        return [self._doubled(outcome) for outcome in outcomes] if self.how == "together" else outcomes

    def __call__(self, payload: Any, client: Any, rng: Any) -> Any:
        outcome = super().__call__(payload, client, rng)
        visits = client.scratch["visits"] = client.scratch.get("visits", 0) + 1
        if self.how == "scratch" and visits == 3:
            return self._doubled(outcome)
        return outcome

    def _doubled(self, outcome: Any) -> Any:
        update = {name: 2 * value for name, value in outcome.payload["update"].items()}
        return outcome._replace(payload={**outcome.payload, "update": update})


def algorithm(parts: Parts, *, how: str = "together") -> Averaging:
    plain = averaging(parts)
    fields = {name: getattr(plain.train, name) for name in BatchedTrain.__dataclass_fields__}
    return replace(plain, train=Wrong(**fields, how=how))


def run(out: Path, clients: int = 4, engine: Any = "vectorized", **more: Any) -> Any:
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 80}},
        "select": {"clients_per_round": clients},
        "model": "linear",
        "local": {"lr": 0.1, "batch_size": 10},
        "engine": engine,
        "evaluation": {"every": 2},
    }
    return Experiment(**{**settings, **more}).run(out, report=False)


@pytest.mark.parametrize("clients", [4, 70])  # 70 are added up where the work ran
def test_the_numbers_of_a_run_do_not_depend_on_verify(tmp_path: Path, clients: int) -> None:
    compared = run(tmp_path / "compared", clients, {"name": "vectorized", "verify": 2})
    plain = run(tmp_path / "plain", clients)
    expected = plain.model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in compared.model.state_dict().items())
    timeless = [{**line, "seconds": 0, "elapsed": 0} for line in compared.metrics]
    assert timeless == [{**line, "seconds": 0, "elapsed": 0} for line in plain.metrics]


@pytest.mark.parametrize("clients", [4, 70])
def test_clients_that_differ_together_are_named(tmp_path: Path, clients: int) -> None:
    own = {"name": f"{FILE}:algorithm"}
    with pytest.raises(HookError) as caught:
        run(tmp_path / "run", clients, {"name": "vectorized", "verify": 1}, algorithm=own)
    assert (
        "differs from 'inline' in round 1, operation 'train': reply['update']['1.weight'] differs by up to 0."
        in str(caught.value)
    )
    assert str(caught.value).startswith("client ")
    assert "to 0.01 of the norm (engine.verify)" in str(caught.value)


def test_an_operation_that_depends_on_its_worker_is_found(tmp_path: Path) -> None:
    own = {"name": f"{FILE}:algorithm", "how": "scratch"}
    # `default` computes so short a run in this process; the reference has a cache of its own.
    with pytest.raises(
        HookError, match=r"differs from 'inline' .* to the bit .* client\.state and rng alone"
    ):
        run(tmp_path / "run", 6, {"name": "default", "verify": 1}, algorithm=own, rounds=6)


@pytest.mark.nightly
@pytest.mark.parametrize("clients", [4, 70])
def test_workers_have_the_bits_of_the_reference(tmp_path: Path, clients: int) -> None:
    for engine in ({"workers": 2}, {"workers": 2, "group": 2}):
        table = {"name": "processes", **engine}
        there = run(tmp_path / f"v{len(engine)}", clients, {**table, "verify": 3}).model.state_dict()
        plain = run(tmp_path / f"p{len(engine)}", clients, table).model.state_dict()
        assert all(torch.equal(plain[name], value) for name, value in there.items())


def test_the_engine_that_auto_chooses_is_compared_after_a_resume_too(tmp_path: Path) -> None:
    result = run(tmp_path / "run", engine={"name": "auto", "verify": 1}, rounds=1)
    table = result.config["engine"]
    assert table.get("verify") == (None if table["name"] == "inline" else 1)


@pytest.mark.parametrize(
    ("here", "there", "scale", "said"),
    [
        ({"a": 1.0}, {"a": 1.0}, None, ""),
        ({"a": 1.0}, {"b": 1.0}, None, "reply has ['a'], but ['b'] with 'inline'"),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(3)},
            1.0,
            "reply['a'] is torch.float32 [2], but torch.float32 [3]",
        ),
        ({"a": [1, 2]}, {"a": [1, 3]}, None, "reply['a'][1] is 2, and 3 with 'inline'"),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0 + 1e-6])}, None, "reply['a'] differs by up to "),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0 + 1e-6])}, 1.0, ""),
        (
            {"a": torch.tensor([torch.nan])},
            {"a": torch.tensor([1.0])},
            1.0,
            "reply['a'] differs by up to inf",
        ),
        (None, {"a": 1}, None, "reply is None, and {'a': 1} with 'inline'"),
    ],
)
def test_what_differs_is_named(here: Any, there: Any, scale: float | None, said: str) -> None:
    found = difference("reply", here, there, scale)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_the_steps_of_the_engine_are_counted() -> None:
    assert default(verify=1).local_steps is not None
