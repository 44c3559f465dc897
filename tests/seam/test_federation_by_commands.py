"""The commands of a federation, with a server and two sites as processes: the bits of a simulation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedlens import Experiment
from fedlens.cli.main import app
from fedlens.data.datasets.digits import digits
from fedlens.data.partition.partition import Partition
from fedlens.identity.federation_folder import FederationFolder
from tests.faults.run_kit import environment
from tests.seam.test_sites import lines
from tests.unit.identity.federation_kit import HOST, federation_in
from tests.unit.site.site_kit import write_images
from tests.unit.site.test_workplace import COMMON, SPLIT, at_sites

SITES = ("ward-a", "ward-b")
OWNERS = np.random.default_rng(0).integers(0, len(SITES), 1437)
# As systemd hands over a socket: at descriptor 3, to the process that is named.
BY_SOCKET = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def ran(*arguments: str | Path) -> str:
    """What a command that succeeds prints."""
    answer = CliRunner().invoke(app, list(map(str, arguments)))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


@contextmanager
def process(name: str, *arguments: str, socket_at: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, whose output is in NAME.txt; it is killed at the end of the block."""
    command = [sys.executable, "-m", "fedlens", *arguments]
    if socket_at is not None:
        command = [sys.executable, "-c", BY_SOCKET, str(socket_at), *command[1:]]
    with open(f"{name}.txt", "wb") as said:
        started = subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[] if socket_at is None else [socket_at],
        )
        try:
            yield started
        finally:
            started.kill()
            started.wait()


def ended(name: str, started: subprocess.Popen[bytes]) -> None:
    """Waits for the good end of a process."""
    assert started.wait(300) == 0, Path(f"{name}.txt").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a server with a federation, an experiment, and the images of two sites."""
    monkeypatch.chdir(tmp_path)
    federation_in(tmp_path)
    train = digits(Path(), False, 0).train
    for k, name in enumerate(SITES):
        mine = k == OWNERS
        write_images(tmp_path / f"{name}-scans", train.inputs[mine, 0], [str(t) for t in train.targets[mine]])
    settings = at_sites(algorithm="scaffold", checkpoint={"seconds": 0})
    settings["engine"] = {"name": "network", "max_share": 1.0}
    Path("experiment.toml").write_text(tomli_w.dumps(settings))
    return tmp_path


def joins(name: str) -> None:
    """A site joins, and is accepted by its words."""
    Path(f"{name}.invitation").write_text(ran("federation", "invite", "hospitals", name))
    ran("site", "join", f"{name}.invitation", "--data", f"{name}-scans", "--folder", name)
    federation = FederationFolder(Path("hospitals"))
    words = federation.words(federation.site(name))
    ran("federation", "accept", "hospitals", name, "--fingerprint", words)


def approves(name: str) -> None:
    """A site approves the experiment once the server knows all sites; it looks for them once a second."""
    shown: dict[str, Any] = {"experiment": None}
    while shown["experiment"] is None or len(shown["experiment"]["peers"]) < len(SITES):
        shown = json.loads(ran("site", "review", "--json", "--folder", name))
    assert not shown["approved"]
    ran("site", "review", "--approve", shown["experiment"]["digest"], "--folder", name)


@pytest.mark.nightly
def test_the_commands_of_a_federation_give_the_bits_of_a_simulation(here: Path) -> None:
    with ExitStack() as running:
        listener = running.enter_context(socket.create_server((HOST, 0), backlog=512))
        about = Path("hospitals/federation.json")
        about.write_text(json.dumps({**json.loads(about.read_text()), "port": listener.getsockname()[1]}))
        ran("federation", "invite", "hospitals", "later")  # it never joins
        serve = ["serve", "experiment.toml", "--federation", "hospitals", "--sites", "2", "--out", "run"]
        server = running.enter_context(process("server", *serve, socket_at=listener.fileno()))
        until = time.monotonic() + 300
        while "listening at" not in Path("server.txt").read_text():
            assert server.poll() is None, Path("server.txt").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        for name in SITES:
            joins(name)
        for name in SITES:
            approves(name)
        sites = [
            running.enter_context(process(name, "site", "start", "--once", "--folder", name))
            for name in SITES
        ]
        ended("server", server)
        for name, site in zip(SITES, sites, strict=True):
            ended(name, site)
    Partition.of_owners(OWNERS, SITES, dataset="digits").save(here / "split.npz")
    data = {"dataset": "digits", "partition": {"name": "file", "path": str(here / "split.npz")}, **SPLIT}
    expected = Experiment(**{**COMMON, "algorithm": "scaffold", "data": data, "engine": "inline"}).run(
        here / "here"
    )
    assert lines(here / "run") == lines(expected.directory)
    one, other = (load_file(path / "model.safetensors") for path in (here / "run", expected.directory))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in other)
    assert (here / "run" / "report.html").is_file()
    said = Path("server.txt").read_text()
    assert "2 sites: 2 online (ward-a, ward-b)" in said
    assert os.stat("run/serve.log.jsonl").st_mode & 0o777 == 0o600
