"""Engines on one Ray for all tests of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from fedlens.core.driver import Driver
from tests.unit.engines import engine_kit
from tests.unit.engines.engine_kit import OPS, opened

NEEDS_RAY = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install 'fedlens[ray]'"
)


def children() -> set[int]:
    """The running processes below this one.

    Zombies are left out: Ray does not wait for a process that it has to kill, so one may stay until this process ends.
    """
    return set(engine_kit.children(os.getpid()))


def made(**settings: Any) -> Any:
    from fedlens.engines.ray import ray

    return ray(**{"workers": 2, "connect_timeout": 300.0, **settings})


@contextmanager
def fresh(ops: Any = OPS, **settings: Any) -> Iterator[Driver]:
    """A driver over an engine of its own."""
    engine = made(**settings)
    try:
        engine.warm()
        yield Driver(*opened(engine, ops))
    finally:
        engine.close()


def all_ready(gate: Driver) -> None:
    """Waits until every worker of the engine has started."""
    engine: Any = gate.engine
    while len(engine._pool.ready) < len(engine._pool.workers):
        engine._pool.wait(None)


def pids(gate: Driver) -> list[int]:
    """The process ids of the workers, once all have started."""
    all_ready(gate)
    engine: Any = gate.engine
    import ray

    return [ray.get(worker.actor.__ray_call__.remote(_pid)) for worker in engine._pool.workers]


def _pid(actor: Any) -> int:
    return os.getpid()
