"""The connection of the engine `ray`: addresses, lost heads and nodes, sharing, leftovers; on a fake Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.base.registry import read_settings
from fedlens.engines import ray_cluster
from fedlens.engines.ray import ray
from fedlens.engines.ray_cluster import Cluster, connect
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
    """An address that accepts connections."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def joined(address: str | None, memory: int | None = None) -> Cluster:
    return connect(address, cpus=1, memory=memory, threads=1, timeout=1.0)


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
        monkeypatch.setattr(cluster, "address", "127.0.0.1:1")
        cluster.check(5.0)
        cluster.check(24.0)
        with pytest.raises(
            RunFailed, match=r"is no longer available: 127.0.0.1:1 has not answered for 20 seconds"
        ):
            cluster.check(26.0)
    finally:
        cluster.close()


def test_a_node_that_ends_ends_the_run_before_anything_is_asked_of_ray(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end this process without a message."""
    cluster = joined(None)
    for _ in range(3):
        cluster.check_node()
    connection, _ = fake.node.accept()
    fake.node.setblocking(False)
    with pytest.raises(BlockingIOError):  # one connection for all calls: ports do not run out
        fake.node.accept()
    connection.close()
    for _ in range(2):  # also when it was reported before
        with pytest.raises(
            RunFailed,
            match=r"^the local Ray is no longer available: the Ray node of this machine has stopped; ",
        ):
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
    assert f"this process already uses Ray at {fake.place}: engine.object_store is ignored" in said
    for cluster in (first, same, none, other):
        assert fake.connected
        cluster.close()
    assert not fake.connected


def test_two_engines_share_a_local_ray(fake: FakeRay) -> None:
    first, second = ray(workers=1), ray(workers=1)
    for engine in (first, second):
        engine.warm()
    assert fake.joined == ["local"]
    first.close()
    first.close()
    assert fake.connected
    second.close()
    assert not fake.connected


def test_a_ray_of_somebody_else_is_used_and_left_running(fake: FakeRay) -> None:
    fake.init("theirs")
    engine = ray(workers=1)
    engine.warm()
    engine.close()
    assert fake.connected
    fake.shutdown()


def test_a_ray_that_does_not_start_says_so(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(fake, "init", breaks)
    engine: Any = ray(workers=1)
    with pytest.raises(RunFailed, match=r"^Ray did not start on this machine: no room"):
        engine.warm()
    engine.close()


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
    ("name", "value", "rule"),
    [
        ("gpus", 2.0, "at most 1"),
        ("gpus", 1.5, "at most 1"),
        ("gpus", 0.00005, "use 0, or at least 0.0001"),
        ("cpus", 0.00001, "use 0, or at least 0.0001"),
        ("object_store", 10, "use 0, or at least 100"),
    ],
)
def test_settings_that_ray_would_not_take(fake: FakeRay, name: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        read_settings(ray, {name: value}, "engine")
    assert caught.value.where == f"engine.{name}"


def test_the_object_store_of_a_cluster_is_not_ours_to_set(fake: FakeRay) -> None:
    with pytest.raises(ConfigError, match="leave it out, and start the nodes with") as caught:
        ray(object_store=200, address="auto")
    assert caught.value.where == "engine.object_store"


@pytest.mark.parametrize("settings", [{"gpus": 1.0}, {"gpus": 0.0001, "cpus": 0.0001}, {"object_store": 100}])
def test_settings_that_ray_takes(fake: FakeRay, settings: dict[str, Any]) -> None:
    ray(**read_settings(ray, settings, "engine")).close()


@pytest.mark.parametrize(
    "address",
    ["10.0.0.7", "nonsense", "host:port", "http://head:6379", "", "fe80::1:6379", "host:1 x"],
)
def test_what_is_no_address(fake: FakeRay, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ray, {"address": address}, "engine")
    assert str(caught.value).startswith(f"'address' is {address!r}, but use 'host:port' or 'auto'")
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
