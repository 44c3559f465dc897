"""A Ray cluster of two nodes: one is lost, then the head."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedlens.api import Experiment, resume
from fedlens.base.errors import RunFailed
from fedlens.core.protocol import Reply
from fedlens.engines import ray_cluster
from fedlens.run.progress import ProgressBase
from tests.contract.contract_kit import outcome
from tests.unit.engines.engine_kit import answers_to, ask, expected, same, vectors
from tests.unit.engines.ray_kit import NEEDS_RAY, all_ready, fresh

pytestmark = NEEDS_RAY


@pytest.mark.nightly  # on a fake Ray in test_ray_workers; the loss of this machine's node is below
def test_a_node_that_vanishes_and_a_cluster_that_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One test, because a cluster takes long to start."""
    ray_cluster.import_ray()
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
        shutdown_at_exit=False,
    )
    try:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        address = cluster.address
        capfd.readouterr()  # what Ray's own test cluster says
        with fresh(address=address, workers=0) as gate:
            engine: Any = gate.engine
            all_ready(gate)
            assert len(engine._pool.ready) == 2  # one for each CPU of both
            wanted = ask([{"seconds": 0.2}] * 40)  # long enough for its end to be noticed on a busy machine
            timer = threading.Timer(0.5, lambda: cluster.remove_node(node, allow_graceful=False))
            timer.start()
            found = answers_to(gate, wanted)
            timer.join()
            assert same(vectors(found), expected(wanted))
            assert len({answer.metrics["pid"] for answer in found if isinstance(answer, Reply)}) == 2
            assert len(engine._pool.ready) == 1  # the other has no room
            said = capfd.readouterr()
            assert said.out == ""
            assert "raylet" not in said.err
            cluster.add_node(num_cpus=1)
            all_ready(gate)
            again = ask([{}] * 4)
            assert same(vectors(answers_to(gate, again, 2)), expected(again, 2))

            monkeypatch.setattr(ray_cluster, "_PATIENCE", 1.0)
            cluster.head_node.kill_gcs_server(check_alive=False)
            began = time.monotonic()
            with pytest.raises(RunFailed, match=rf"^the Ray cluster at {address} is no longer available: "):
                answers_to(gate, ask([{"seconds": 0.3}] * 60), 3)
            assert time.monotonic() - began < 50  # Ray would end this process after 60
    finally:
        cluster.shutdown()


class Sawing(ProgressBase):
    """Kills the node of this machine after a round."""

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            for child in psutil.Process().children(recursive=True):
                if child.name() == "raylet":
                    child.kill()
                    child.wait()


@pytest.mark.nightly  # on a fake Ray in test_ray_connection
def test_a_run_whose_ray_is_gone_is_saved_and_goes_on_without_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small: dict[str, Any] = {
        "rounds": 4,
        "select": {"clients_per_round": 3},
        "local": {"lr": 0.05},
        "model": "linear",
    }
    small["record"] = {"clients": True}
    small["data"] = {"dataset": "digits", "partition": {"name": "iid", "clients": 6}}
    whole = Experiment(**small).run(tmp_path / "whole")
    on_ray = Experiment(**small, engine={"name": "ray", "workers": 1, "connect_timeout": 200.0})
    with pytest.raises(
        RunFailed, match=r"^the local Ray is no longer available: the Ray node of this machine has stopped; "
    ):
        on_ray.run(tmp_path / "run", progress=Sawing())
    assert "raylet" not in "".join(capfd.readouterr())
    config = tmp_path / "run" / "config.toml"
    config.write_text(
        re.sub(r"\[engine\].*?\n\n", '[engine]\nname = "inline"\n\n', config.read_text(), flags=re.S)
    )
    assert outcome(resume(tmp_path / "run")) == outcome(whole)
