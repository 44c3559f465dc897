"""The connection of the engine `ray`: through Ray Client, shared by engines, and its thread; on a Ray that is none."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.registry import read_settings
from fedlens.engines import ray_cluster
from fedlens.engines.ray import ray
from fedlens.engines.ray_cluster import Cluster, Lasting
from tests.unit.engines.engine_kit import answers_to, ask
from tests.unit.engines.fake_ray import FakeRay, on_fake_ray


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_ours", None)
    return made


@pytest.fixture
def peer() -> Iterator[str]:
    """An address where somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def joined(address: str | None, memory: int | None = None) -> Cluster:
    return Cluster(address, cpus=1, memory=memory, threads=1, timeout=1.0)


# -- through Ray Client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["auto", "ray://"])
def test_a_cluster_through_ray_client_is_watched_where_it_listens(
    fake: FakeRay, peer: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    knocked: list[str] = []
    monkeypatch.setattr(ray_cluster, "_knock", lambda place, _: knocked.append(place))
    monkeypatch.setattr(ray_cluster, "_PATIENCE", 1.0)
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{peer}")
    fake.client = True
    cluster = joined(address + peer if address == "ray://" else address)
    try:
        assert knocked == [peer]
        assert str(cluster) == f"the Ray cluster at {peer}"
        for second in range(5):
            cluster.check(float(second))
        monkeypatch.setattr(
            ray_cluster, "_connected", lambda *_: socket.create_connection(("127.0.0.1", 1), 1.0)
        )
        cluster.check(5.0)
        with pytest.raises(
            RunFailed, match=rf"^the Ray cluster at {peer} is gone: nothing has answered at {peer}"
        ):
            cluster.check(7.0)
    finally:
        cluster.close()


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_connection_of_ray_client_that_somebody_else_made_is_asked_whether_it_is_there(
    fake: FakeRay, address: str | None
) -> None:
    fake.client = fake.connected = True
    cluster = joined(address)
    cluster.check(0.0)
    fake.client = False
    with pytest.raises(
        RunFailed, match=r"^the Ray cluster at 127.0.0.1:1 is gone: the connection of Ray Client"
    ):
        cluster.check(1.0)
    cluster.close()
    assert fake.connected  # it is not ours to end


@pytest.mark.parametrize("call", ["put", "wait", "get", "work", "forget"])
def test_a_connection_that_ends_in_a_round_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Ray Client raises at whatever it is asked for next."""

    def ended(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Client is shutting down.")

    with on_fake_ray(monkeypatch, workers=1) as (gate, fake):
        if call in ("work", "forget"):
            monkeypatch.setattr(fake.actors[0], call, SimpleNamespace(remote=ended), raising=False)
        else:
            monkeypatch.setattr(fake, call, ended)
        if call == "forget":  # nothing was lost with it
            assert len(answers_to(gate, ask([{}]))) == 1
            return
        with pytest.raises(RunFailed, match=r"^the local Ray is gone: Client is shutting down; "):
            answers_to(gate, ask([{}]))


def test_an_address_in_the_environment_that_has_no_port_is_left_to_ray(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere://else:then")
    joined("auto").close()
    assert fake.joined == ["auto"]


# -- shared by engines --------------------------------------------------------------------------------------------


def test_another_object_store_than_the_one_that_is_there_is_told(
    fake: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    first = joined(None, 200 * 2**20)
    same, none = joined(None, 200 * 2**20), joined(None)
    assert capsys.readouterr().err == ""
    other = joined(None, 300 * 2**20)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "already, and goes on with the object store that it has: engine.object_store = 300 says nothing"
        in said
    )
    for cluster in (first, same, none, other):
        assert fake.connected
        cluster.close()
    assert not fake.connected


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fedlens-ray"]


def none_left() -> bool:
    end = time.monotonic() + 5
    while running() and time.monotonic() < end:
        time.sleep(0.005)
    return not running()


def test_the_thread_that_started_ray_stays_as_long_as_ray_does(fake: FakeRay) -> None:
    """Also where its engine is closed before another one that shares its Ray."""
    first: Any = ray(workers=1)
    first.warm()
    assert first._connecting.result() is None
    second: Any = ray(workers=1)
    second.warm()
    assert second._connecting.result() is None
    first.close()
    time.sleep(0.05)
    assert len(running()) == 1
    assert fake.connected
    second.close()
    assert not fake.connected
    assert none_left()


def test_a_thread_that_has_started_no_ray_ends_at_once(fake: FakeRay) -> None:
    def breaks() -> None:
        raise ValueError("no")

    assert isinstance(Lasting(breaks).result(), ValueError)
    assert Lasting(lambda: None).result() is None
    assert none_left()
    fake.connected = True  # by somebody else
    engine: Any = ray(workers=1)
    engine.warm()
    engine._connecting.result()
    assert none_left()
    engine.close()


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "where", "hint"),
    [
        ({"gpus": 2.0}, "gpus", "take gpus=1, and more workers"),
        ({"gpus": 1.5}, "gpus", "take gpus=1, and more workers"),
        ({"gpus": 0.00005}, "gpus", "Ray counts in parts of 0.0001"),
        ({"cpus": 0.00001}, "cpus", "Ray counts in parts of 0.0001"),
        ({"object_store": 10}, "object_store", "give it 100 or more, or leave it out"),
        ({"object_store": 200, "address": "auto"}, "object_store", "leave it out, and start the nodes with"),
    ],
)
def test_settings_that_ray_would_not_take(
    fake: FakeRay, settings: dict[str, Any], where: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ray(**settings)
    assert caught.value.where == where
    assert hint in str(caught.value)


@pytest.mark.parametrize("settings", [{"gpus": 1.0}, {"gpus": 0.0001, "cpus": 0.0001}, {"object_store": 100}])
def test_settings_that_ray_takes(fake: FakeRay, settings: dict[str, Any]) -> None:
    ray(**settings).close()


@pytest.mark.parametrize(
    "address",
    ["10.0.0.7", "nonsense", "host:port", "http://head:6379", "", "fe80::1:6379", "host:1 x"],
)
def test_what_is_no_address(fake: FakeRay, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ray, {"address": address}, "engine")
    assert str(caught.value).startswith(
        f"'address' is {address!r}: 'host:port', 'ray://host:port' or 'auto' is wanted"
    )
    assert caught.value.where == "engine.address"


@pytest.mark.parametrize(
    "address", ["auto", "head:6379", "ray://head:10001", "[fe80::1]:6379", "ray://[::1]:1", None]
)
def test_what_is_an_address(fake: FakeRay, address: str | None) -> None:
    assert read_settings(ray, {"address": address}, "engine")["address"] == address
