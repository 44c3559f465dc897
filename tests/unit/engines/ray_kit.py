"""Engines on one Ray for all tests of a file, and a Ray of several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedlens.core.gate import Gate
from tests.unit.engines.engine_kit import OPS, opened


def leftovers() -> tuple[set[int], set[str], set[str]]:
    """What a local Ray could leave behind: processes (zombies too), named shared memory, folders."""
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    folders = {path.name for path in Path("/tmp").glob("fedlens-ray-*")}
    return below, {path.name for path in Path("/dev/shm").iterdir()}, folders


def made(**settings: Any) -> Any:
    from fedlens.engines.ray import ray

    return ray(**{"workers": 2, "timeout": 300.0, **settings})


@contextmanager
def fresh(ops: Any = OPS, **settings: Any) -> Iterator[Gate]:
    """A gate over an engine of its own."""
    engine = made(**settings)
    try:
        yield Gate(*opened(engine, ops))
    finally:
        engine.close()


def all_ready(gate: Gate) -> None:
    """Waits until every worker of the engine has started."""
    engine: Any = gate.engine
    while engine.ready < len(engine._workers):
        engine._wait(None)


def pids(gate: Gate) -> list[int]:
    """The process ids of the workers that have started."""
    engine: Any = gate.engine
    ray = pytest.importorskip("ray")
    return [ray.get(worker.actor.__ray_call__.remote(_pid)) for worker in engine._workers]


def _pid(actor: Any) -> int:
    import os

    return os.getpid()
