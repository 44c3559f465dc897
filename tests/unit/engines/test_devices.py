"""Devices and precisions: which are refused, what operations get, and the GPU of each worker."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Arithmetic, BatchedOp, Client, Outcome, Payload, Program
from fedlens.core.random import Rng
from fedlens.engines import devices as placing
from fedlens.engines.devices import (
    Computing,
    default_workers,
    devices_of,
    placed,
    resolved,
    share_of_gpu,
    show_only,
)
from fedlens.engines.hardware import Hardware
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.registry import ENGINES
from fedlens.engines.vectorized import vectorized
from fedlens.engines.worker_pool import Worker
from tests.unit.engines.engine_kit import NoData, answers_to, ask, opened

MADE = {"inline": inline, "vectorized": vectorized, "processes": lambda **how: processes(workers=1, **how)}


@pytest.mark.parametrize("engine", MADE)
@pytest.mark.parametrize(
    ("how", "where", "what"),
    [
        ({"device": "cuda"}, "engine.device", "finds no GPU"),
        ({"device": "cuda:1"}, "engine.device", "finds no GPU"),
        ({"precision": "tf32"}, "engine.precision", "a format of NVIDIA GPUs"),
        ({"precision": "fp16"}, "engine.precision", "not optimized on CPUs"),
    ],
)
def test_what_this_machine_has_not_is_refused_before_anything_runs(
    engine: str, how: dict[str, Any], where: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = MADE[engine](**how)
    with pytest.raises(ConfigError, match=what) as caught:
        made.check({})
    assert caught.value.where == where
    assert caught.value.hint


def test_a_gpu_that_there_is_not_is_told_from_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:0", "cuda:1"):
        Computing(device, "tf32").check()
    with pytest.raises(ConfigError, match="unknown device 'cuda:2'") as caught:
        Computing("cuda:2").check()
    assert caught.value.hint == "choose from: cuda:0, cuda:1"


def test_what_was_set_is_given_back_where_an_engine_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[str] = []

    @contextmanager
    def computing(self: Program) -> Iterator[None]:
        options.append("set")
        yield
        options.append("restored")

    monkeypatch.setattr(Program, "computing", computing)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for the images")

    monkeypatch.setattr("fedlens.engines.inline.Executor", full)
    engine = MADE["inline"]()
    with pytest.raises(torch.OutOfMemoryError):
        opened(engine, {"work": tell})
    engine.close()
    engine.close()
    assert options == ["set", "restored"]


def test_what_a_worker_says_is_wrong_keeps_its_parts() -> None:
    ours, theirs = Pipe()
    worker = Worker(ours, 0, "cpu")
    broken = RunFailed("the model cannot be stacked", where="engine.name", hint="take inline")
    theirs.send_bytes(pickle.dumps(("broken", broken)))
    with pytest.raises(RunFailed) as caught:
        worker.receive()
    assert (caught.value.what, caught.value.where) == ("the model cannot be stacked", "engine.name")
    assert caught.value.hint == "take inline"


def tell(payload: Payload, client: Client, rng: Rng) -> Outcome:
    how = client.arithmetic
    return Outcome({"device": str(client.device), "precision": how.precision, "last": how.channels_last})


class Joint(BatchedOp):
    """Lets `vectorized` take the operations; it is not asked."""

    def obstacle(self) -> None:
        return None


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("engine", MADE)
def test_operations_find_how_the_engine_computes(engine: str) -> None:
    last = engine != "vectorized"  # which has no such setting
    made = MADE[engine](precision="bf16", **({"channels_last": True} if last else {}))
    try:
        gate = Driver(*opened(made, {"work": tell, "joint": Joint()}))
        (answer,) = answers_to(gate, ask([{}]))
        assert answer.payload == {"device": "cpu", "precision": "bf16", "last": last}
    finally:
        made.close()


def test_a_program_is_plain_unless_the_engine_says_otherwise() -> None:
    program = Program({}, NoData(), 0)
    assert Computing().applied(program) == program
    assert Computing("cuda:1", "bf16").applied(program).arithmetic == Arithmetic("bf16")


@pytest.mark.parametrize(("shown", "left"), [(None, "1"), ("4,7", "7"), ("GPU-8f2e,GPU-11aa", "GPU-11aa")])
def test_a_process_can_be_left_with_one_gpu(
    shown: str | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown or "")
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    show_only("cpu")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown
    show_only("cuda:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_workers_go_where_the_most_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed([100], 3) == [0, 0, 0]
    assert placed([100, 100], 4) == [0, 1, 0, 1]
    assert placed([10, 90], 3) == [1, 1, 1]
    assert placed([30, 90], 4) == [1, 1, 0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placing, "free_memory_of", lambda device: [30, 90])
    monkeypatch.setattr(placing, "usable_cores", lambda: 16)
    assert devices_of("cuda", 3) == ["cuda:1", "cuda:1", "cuda:0"]
    assert devices_of("cuda:0", 2) == ["cuda:0"] * 2
    assert devices_of("cpu", 2) == ["cpu"] * 2
    assert share_of_gpu("cuda", 3) == 30
    assert share_of_gpu("cuda", 6) == 18
    assert default_workers(Computing("cuda"), 1) == 4
    assert default_workers(Computing("cuda:1"), 1) == 2
    assert default_workers(Computing(), 4) == 4


def have(gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, free: Sequence[int] = ()) -> None:
    """A machine with these GPUs and free bytes, and no others."""
    monkeypatch.setattr(placing, "hardware", lambda: Hardware(gpus))
    monkeypatch.setattr(placing, "free_memory_of", lambda device: list(free))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))


def test_auto_is_the_gpus_of_the_machine_or_else_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    have((), monkeypatch)
    assert resolved("auto") == resolved("auto", spread=True) == "cpu"
    have(("NVIDIA H100",), monkeypatch)
    assert resolved("auto") == resolved("auto", spread=True) == "cuda"
    assert resolved("cpu") == "cpu"
    have(("NVIDIA H100",) * 3, monkeypatch, [30, 90, 80])
    assert resolved("auto") == "cuda:1"
    assert resolved("auto", spread=True) == "cuda"
    assert resolved("cuda:0") == "cuda:0"


@pytest.mark.parametrize("engine", [*MADE, "default", "auto"])
@pytest.mark.parametrize("gpus", [(), ("NVIDIA H100",)])
def test_every_engine_takes_the_gpu_by_default(
    engine: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(gpus, monkeypatch)
    made = ENGINES.find(engine)()
    assert made.applied(Program({}, NoData(), 0)).device == ("cuda" if gpus else "cpu")
    made.close()
