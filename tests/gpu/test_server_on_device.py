"""The server on a GPU: the results of the processor, whether its code follows the device or knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment, Result, resume
from fedlens.core.schema import tensors_in
from fedlens.core.states import ClientStates, Store
from fedlens.engines import inline
from fedlens.run import checkpoint
from tests.contract.contract_kit import nightly_but, outcome
from tests.gpu.device_kit import agree

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class Unaware:
    """A server step whose code is for the processor alone."""

    def init(self, weights: Any) -> Any:
        return {"m": {name: torch.zeros(value.shape) for name, value in weights.items()}}

    def step(self, weights: Any, update: Any, state: Any) -> Any:
        m = {n: state["m"][n] + torch.from_numpy(update[n].numpy()) for n in update}
        return {n: value - torch.full(value.shape, 0.5) * m[n] for n, value in weights.items()}, {"m": m}


def unaware() -> Unaware:
    """The step of a user who has never seen a GPU."""
    return Unaware()


OWN: dict[str, dict[str, Any]] = {
    "unaware": {"server": unaware},
    "server-step": {"server": f"{EXAMPLES}/own_server_step.py:signed"},
    "median": {"aggregate": f"{EXAMPLES}/own_aggregate.py:Median"},
    "top-k": {"aggregate": f"{EXAMPLES}/top_k.py:top_k"},
    "loss-weighted": {"aggregate": f"{EXAMPLES}/loss_weighted.py:loss_weighted"},
    "optimal-convex": {"aggregate": {"name": "optimal-convex", "on": "test"}},
    "quantized": {
        "aggregate": {"name": "quantized", "bits": 30, "range": 64.0},
        "record": {"clients": False},
    },
    "asynchronous": {
        "algorithm": {"name": f"{EXAMPLES}/asynchronous.py:asynchronous", "buffer": 2, "running": 3}
    },
    "ditto": {"algorithm": f"{EXAMPLES}/ditto.py:ditto", "evaluation": {"clients": "none"}},
}


SMALL = {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 60, "test": 20}


def small(device: str, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {"dataset": SMALL, "partition": {"name": "iid", "clients": 4}},
        "model": "mlp",
        "local": {"lr": 0.05, "batch_size": 5},
        "select": {"clients_per_round": 2},
        "record": {"clients": True},
        "engine": {"name": "inline", "device": device, "channels_last": False},
    }
    return Experiment(**settings | changes)


def both(folder: Path, **changes: Any) -> tuple[Result, Result]:
    """The runs on the GPU and on the processor."""
    there, here = (small(device, **changes).run(folder / device, report=False) for device in ("cuda", "cpu"))
    return there, here


@pytest.mark.parametrize("own", nightly_but({"unaware"}, OWN))
def test_code_that_does_not_follow_the_device_gets_what_it_gets_on_the_processor(
    own: str, tmp_path: Path
) -> None:
    agree(*both(tmp_path, **OWN[own]))


def test_a_run_resumed_on_a_gpu_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": "scaffold", "server": "adam"}
    at_once = small("cuda", **changes).run(tmp_path / "once", report=False)
    small("cuda", **changes).run(tmp_path / "parts", until=1, report=False)
    resumed = resume(tmp_path / "parts", report=False)
    assert outcome(resumed) == outcome(at_once)
    saved = checkpoint.load_latest(tmp_path / "parts" / "checkpoint")
    assert saved is not None
    assert {tensor.device.type for tensor in tensors_in(saved.payload)} == {"cpu"}


@pytest.mark.nightly
def test_a_state_too_large_for_the_gpu_stays_in_ordinary_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "GPU_SHARE", 10**9)
    agree(*both(tmp_path, algorithm="fedadam"))


class Shelf(dict[str, Any]):
    """A store of states."""

    def put(self, payload: Any) -> str:
        self[str(len(self))] = payload
        return str(len(self) - 1)

    def get(self, key: str) -> Any:
        return self[key]

    def drop(self, key: str) -> None:
        del self[key]


def test_states_beyond_the_memory_of_a_gpu_go_to_ordinary_memory_the_least_recently_used_first() -> None:
    store: Store = Shelf()
    states = ClientStates(store, memory=2**20)
    states.gpu_memory = 3 * 8
    for client in range(3):
        states.commit(client, {"w": torch.full((2,), float(client), device="cuda")})
    states.get(0)
    states.commit(3, {"w": torch.ones(2, device="cuda")})
    where = {client: state["w"].device.type for client, state in states.snapshot().items()}
    assert where == {0: "cuda", 1: "cpu", 2: "cuda", 3: "cuda"}
    assert states.get(1)["w"].tolist() == [1.0, 1.0]
    assert states.used == 4 * 8
    assert not store
