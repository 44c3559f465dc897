"""A fake Ray whose actors live in this process, and start, die and keep silent as a test says."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.base import interrupts
from fedlens.core.driver import Driver
from tests.unit.engines.engine_kit import OPS, opened


class RayError(Exception):
    """As in ray.exceptions."""


class RayTaskError(RayError):
    """As in ray.exceptions."""


class Promise:
    """The result of a call: a value or an error, or pending as long as its actor is silent."""

    def __init__(self, actor: Actor | None, value: Any = None, error: str = "", silent: bool = False) -> None:
        self._actor, self._value, self._error, self._silent = actor, value, error, silent

    def kept(self) -> bool:
        return not self._silent or (self._actor is not None and self._actor.dead)

    def get(self) -> Any:
        if self._error or self._silent:
            raise RayError(self._error or "gone")
        return self._value


class Actor:
    """One actor: a call is carried out at once. It is restarted by the next `hello`, as often as `restarts` says."""

    def __init__(self, ray: FakeRay, kind: type, restarts: int) -> None:
        self._ray, self._kind, self.restarts = ray, kind, restarts
        self.lives, self.dead = 0, True

    def __getattr__(self, name: str) -> Any:
        call = SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))
        call.options = lambda **_: call
        return call

    def _call(self, name: str, arguments: Sequence[Any]) -> Promise:
        if name == "hello":
            while self.dead:
                if self.lives > self.restarts:
                    return Promise(self, error="it died")
                self.made, self.lives, fate = self._kind(), self.lives + 1, self._ray.fate()
                self.dead = fate == "dies"
                if fate == "silent":
                    return Promise(self, silent=True)
                if fate == "odd":
                    return Promise(self, ({**arguments[0], "torch": "0.1"}, "", None))
        return (
            Promise(self, error="it is dead")
            if self.dead
            else Promise(self, getattr(self.made, name)(*arguments))
        )


class FakeRay:
    """Stands for the package. Actors start and restart as `fates` says, one after the other, and then as the last."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, *fates: str) -> None:
        self.fates = list(fates) or ["well"]
        self.actors: list[Actor] = []
        self.joined: list[str] = []
        self.connected = self.client = False
        self.place = "127.0.0.1:1"
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: self.client))
        )

    # -- the connection
    def init(self, address: str, **settings: Any) -> None:
        self.joined.append(address)
        self.connected = True
        self.node = socket.socket(socket.AF_UNIX)
        self.node.bind("")  # a name of the kernel's, and no file
        self.node.listen()

    def is_initialized(self) -> bool:
        return self.connected

    def shutdown(self) -> None:
        if self.connected:
            self.node.close()
        self.connected = False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.place, get_node_id=lambda: "one")

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 4.0}
        return [
            {
                "Alive": True,
                "NodeID": "one",
                "Resources": resources,
                "RayletSocketName": self.node.getsockname(),
            }
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    available_resources = cluster_resources

    # -- calls
    def put(self, value: Any) -> Any:
        return value if isinstance(value, tuple) and isinstance(value[0], bytes) else Promise(None, value)

    def remote(self, kind: type) -> Any:
        def made(max_restarts: int, **_: Any) -> Any:
            def remote() -> Actor:
                self.actors.append(Actor(self, kind, max_restarts))
                return self.actors[-1]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=made)

    def fate(self) -> str:
        """What comes of the next start of an actor."""
        return self.fates.pop(0) if len(self.fates) > 1 else self.fates[0]

    def get(self, promise: Any) -> Any:
        return promise.get() if isinstance(promise, Promise) else promise

    def wait(self, promises: list[Promise], num_returns: int, timeout: float) -> Any:
        kept = [promise for promise in promises if promise.kept()][:num_returns]
        if not kept:
            time.sleep(min(timeout, 0.02))
        return kept, [promise for promise in promises if promise not in kept]

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.dead = True
        actor.restarts = 0 if no_restart else actor.restarts


@contextmanager
def on_fake_ray(
    monkeypatch: pytest.MonkeyPatch, *fates: str, ops: Any = OPS, **settings: Any
) -> Iterator[tuple[Driver, FakeRay]]:
    """A driver over an engine whose workers start as `fates` says; one is ready."""
    fake = FakeRay(*fates)
    monkeypatch.setitem(sys.modules, "ray", fake)
    from fedlens.engines import ray as engines_ray
    from fedlens.engines import ray_cluster, ray_pool

    # A worker of Ray declares its whole process to be one; here that is the process of all further tests.
    monkeypatch.setattr(interrupts._Watch, "active", interrupts._Watch.active)
    monkeypatch.setattr(ray_cluster, "_shared", None)
    monkeypatch.setattr(ray_cluster.Cluster, "check", lambda *_: None)
    monkeypatch.setattr(ray_pool, "_TICK", 0.02)
    engine = engines_ray.ray(**{"connect_timeout": 20.0, **settings})
    try:
        yield Driver(*opened(engine, ops)), fake
    finally:
        engine.close()
