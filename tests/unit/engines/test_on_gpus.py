"""Which engine a run on GPUs gets that names none. No test needs a GPU: nothing is trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.core.engine_base import EngineBase, EngineWork
from fedlens.engines import default as module
from fedlens.engines import devices as placing
from fedlens.engines.default import Default, OnGpus, default
from fedlens.engines.hardware import Hardware
from tests.identity.identity_kit import model, parts, world

LONG, SHORT = 2e6, 1e3  # images of a run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a machine of GPUs with these free bytes and 16 cores."""

    def with_gpus(free: Sequence[float]) -> None:
        gpus = Hardware(("NVIDIA H100",) * len(free))
        monkeypatch.setattr(placing, "hardware", lambda: gpus)
        monkeypatch.setattr(placing, "usable_cores", lambda: 16)
        monkeypatch.setattr(placing, "free_memory_of", lambda device: [int(each) for each in free])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free[-1]), int(80e9)))

    return with_gpus


def chosen(
    images: float = LONG, cohort: int | None = 4, norm: bool = False, **settings: Any
) -> tuple[EngineBase, str]:
    made = ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}, model(norm=norm)))
    engine = default(**settings)
    work = EngineWork(made.ops, world(), range(6), cohort, 10, images, made.train.trial)
    return engine, str(engine.choose(work))


@pytest.mark.parametrize(
    ("free", "how", "line", "table"),
    [
        ([8e9], {}, "vectorized, groups of 4 clients", {"device": "cuda", "group": 4}),
        ([8e9], {"norm": True}, "inline, one client at a time, as ", {"device": "cuda"}),
        ([8e9], {"cohort": 1}, "inline, one client at a time, as no process has several", {}),
        ([8e9], {"cohort": None}, "inline, one client at a time, as no process has several", {}),
        ([8e9], {"channels_last": True}, "inline, one client at a time, as ", {"channels_last": True}),
        ([1e3], {}, "inline, one client at a time, as the free memory of the GPU holds no group", {}),
        ([8e9], {"workers": 2}, "processes, 2 workers, groups of 2 clients", {"workers": 2, "group": 2}),
        ([8e9, 8e9], {"cohort": 12}, "processes, 4 workers, groups of 3 clients", {"workers": 4, "group": 3}),
        ([8e9, 8e9], {}, "processes, 4 workers, one client at a time, as no process has", {"group": 1}),
        ([8e9, 8e9], {"norm": True}, "processes, 4 workers, one client at a time", {"device": "cuda"}),
        (
            [1e9, 8e9],
            {"images": SHORT},
            "vectorized on cuda:1, as the run is short, groups of 4 clients",
            {"device": "cuda:1", "group": 4},
        ),
        ([1e9, 8e9], {"workers": 1}, "vectorized on cuda:1, as engine.workers is 1", {"device": "cuda:1"}),
        ([1e9, 8e9], {"device": "cuda:0"}, "vectorized, groups of 4 clients", {"device": "cuda:0"}),
    ],
)
def test_clients_train_together_where_they_can(
    free: Sequence[float], how: dict[str, Any], line: str, table: dict[str, Any], machine: Any
) -> None:
    machine(free)
    engine, said = chosen(**how)
    assert said.startswith(f"engine: {line}")
    assert engine.table is not None
    assert engine.table["name"] == line.split(",")[0].split(" ")[0]
    assert table.items() <= engine.table.items()


def test_a_single_client_on_one_of_several_gpus_has_one_reason(machine: Any) -> None:
    machine([1e9, 8e9])
    assert chosen(cohort=1)[1] == "engine: inline on cuda:1, as one client trains at a time"


def test_a_little_more_free_memory_gives_the_same_groups(machine: Any) -> None:
    sizes = []
    for free in (2**21 - 1, 2**21, 2**21 + 2**20):
        machine([free])
        engine, _ = chosen(cohort=1000)
        assert engine.table is not None
        sizes.append(engine.table.get("group"))
    assert sizes[0] != sizes[1] == sizes[2] < 1000


def test_the_choice_keeps_all_settings_of_the_engine(machine: Any) -> None:
    machine([8e9, 8e9])
    settings = {
        "threads": 2,
        "timeout": 7.0,
        "window": 9,
        "precision": "bf16",
        "state_memory": 5,
        "verify": 1,
    }
    engine, _ = chosen(cohort=16, **settings)
    assert engine.table is not None
    assert settings.items() <= engine.table.items()


def test_operations_that_cannot_be_sent_stay_in_this_process(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([8e9, 8e9])

    def refuse(*_: object, **__: object) -> None:
        raise TypeError("cannot pickle 'generator' object")

    monkeypatch.setattr(module, "Packer", refuse)
    assert "vectorized on cuda:0, as the operations cannot be sent to workers" in chosen()[1]
    monkeypatch.setattr(sys, "platform", "win32")
    assert "vectorized on cuda:0, as workers need Linux or macOS" in chosen()[1]


def test_on_the_processor_nothing_is_new(machine: Any) -> None:
    machine([])
    assert isinstance(default(), Default)
    machine([8e9])
    assert isinstance(default(device="cpu"), Default)
    assert isinstance(default(), OnGpus)
