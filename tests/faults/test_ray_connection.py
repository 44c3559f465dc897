"""The connection of the engine `ray`: refused, watched, shared by engines, and swept up; on a fake Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.registry import read_settings
from fedlens.engines import ray_cluster
from fedlens.engines.ray import ray
from fedlens.engines.ray_cluster import Cluster
from tests.unit.engines.fake_ray import FakeRay

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_shared", None)
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


# -- an address ---------------------------------------------------------------------------------------------------


def test_a_head_that_stops_answering_ends_the_run_after_some_time(
    fake: FakeRay, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_check_health", lambda *_: None)
    monkeypatch.setattr(fake, "place", peer)
    cluster = joined(peer)
    try:
        for second in range(5):
            cluster.check(float(second))
        monkeypatch.setattr(cluster, "_address", "127.0.0.1:1")
        cluster.check(5.0)
        cluster.check(24.0)
        with pytest.raises(RunFailed, match=r"is gone: nothing has answered at 127.0.0.1:1 for 20 seconds"):
            cluster.check(26.0)
    finally:
        cluster.close()


def test_a_node_that_ends_ends_the_run_before_anything_is_asked_of_ray(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end this process without a word."""
    with socket.socket() as node:
        node.bind(("127.0.0.1", 0))
        node.listen()
        host, port = node.getsockname()
        known = [{"NodeID": "none", "NodeManagerAddress": host, "NodeManagerPort": port}]
        monkeypatch.setattr(fake, "nodes", lambda: known)
        cluster = joined(None)
        cluster.check_node()
    with pytest.raises(RunFailed, match=r"^the local Ray is gone: the node of this machine has ended; "):
        cluster.check_node()
    cluster.close()


def test_an_address_of_ray_client_in_the_environment_is_refused(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS is ray://head:10001 .*ray job submit"):
        joined("auto")
    assert fake.joined == []


def test_a_process_that_is_connected_through_ray_client_is_refused(fake: FakeRay) -> None:
    fake.client = fake.connected = True
    with pytest.raises(ConfigError, match=r"^this process is connected through Ray Client.*ray job submit"):
        joined(None)
    assert fake.connected  # somebody else's connection is left alone


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
    assert "already, with the object store that it has: engine.object_store = 300 is ignored" in said
    for cluster in (first, same, none, other):
        assert fake.connected
        cluster.close()
    assert not fake.connected


def test_a_ray_that_is_started_in_the_background_is_shared_too(fake: FakeRay) -> None:
    first: Any = ray(workers=1)
    first.warm()
    second: Any = ray(workers=1)
    second.warm()
    for engine in (first, second):
        engine._wait_for_connection()
    first.close()
    assert fake.connected
    assert any(thread.name.startswith("fedlens-ray") for thread in threading.enumerate())  # that started it
    second.close()
    assert not fake.connected


def test_a_ray_that_does_not_start_in_the_background_says_so_when_it_is_needed(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(fake, "init", breaks)
    engine: Any = ray(workers=1)
    engine.warm()
    with pytest.raises(RunFailed, match=r"^Ray did not start on this machine: no room"):
        engine._wait_for_connection()
    engine.warm()
    engine.close()  # says nothing


# -- the folder of a local Ray ------------------------------------------------------------------------------------

KILLED = """
import os, signal
from fedlens.engines.ray_cluster import make_folder
print(make_folder()[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_leaves_is_deleted_at_the_next_start(
    fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "_SHORT_PATH", 1000)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    if len(str(tmp_path)) + 20 > 40:  # the other process takes /tmp for a path as long as this
        environment["TMPDIR"] = "/tmp"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, timeout=100
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    (left / "session").mkdir()
    alive, lock = ray_cluster.make_folder()
    foreign = tmp_path / "fedlens-ray-foreign"
    foreign.mkdir()
    joined(None).close()
    assert not left.exists()
    assert foreign.is_dir()  # nobody knows whose it is
    assert Path(alive).is_dir()
    os.close(lock)
    joined(None).close()
    assert list(tmp_path.iterdir()) == [foreign]


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
    assert str(caught.value).startswith(f"'address' is {address!r}: use 'host:port' or 'auto'")
    assert caught.value.where == "engine.address"


@pytest.mark.parametrize("address", ["auto", "head:6379", "[fe80::1]:6379", None])
def test_what_is_an_address(fake: FakeRay, address: str | None) -> None:
    assert read_settings(ray, {"address": address}, "engine")["address"] == address


@pytest.mark.parametrize("address", ["ray://head:10001", "ray://[::1]:1", "ray://"])
def test_an_address_of_ray_client_is_refused_with_the_better_way(fake: FakeRay, address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"through Ray Client .*engine\.address=auto, or submit it"
    ) as caught:
        read_settings(ray, {"address": address}, "engine")
    assert caught.value.where == "engine.address"
