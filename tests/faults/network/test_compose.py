"""The scripts of docs/deploy/compose.yaml as processes: from the invitations to the model, and the run repeated.

A minute or two; `pytest -m nightly tests/faults/network/test_compose.py`. The steps of people are those of
docs/services.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "docs" / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SITES = ("site-a", "site-b", "site-c")
PATIENCE = 900.0  # seconds after which something hangs


class Machine:
    """A folder for each service, and what runs there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tools, invitations = root / "bin", root / "invitations"
        for folder in (tools, invitations, *(root / name for name in COMPOSE["services"])):
            folder.mkdir()
        for name, arguments in (("fedlens", "-m fedlens"), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (tools / name).chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.here = {"HOST": "127.0.0.1", "PORT": str(port), "BIND": f"127.0.0.1:{port}"}
        self.here |= {"INVITATIONS": str(invitations), "DEPLOY": str(DEPLOY)}
        self.env = {
            **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Starts the script of a service, with the places of this machine in its environment."""
        service = COMPOSE["services"][name]
        own = {key: self.here.get(key, value) for key, value in service["environment"].items()}
        words = [word.replace("$$", "$") for word in service["command"]]
        with (self.root / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                words,
                cwd=self.root / name,
                env={**self.env, **own},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def call(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of a person at a service, as `docker compose exec` runs it."""
        return subprocess.run(
            ["fedlens", *words],
            cwd=self.root / name,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )

    def told(self, site: str, command: str, key: str) -> Any:
        """A value of what `fedlens site COMMAND --json` prints at a site; None if it fails."""
        found = self.call(site, "site", command, "--json")
        return json.loads(found.stdout)[key] if found.returncode == 0 else None

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """What `look` returns once it is true; fails with the logs if a service has ended, or after a long time."""
        ends = time.monotonic() + PATIENCE
        while not (found := look()):
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > ends:
                logs = "\n".join(
                    f"{path.name}: {path.read_text()[-3000:]}" for path in self.root.glob("*.log")
                )
                pytest.fail(f"{what}: {ended} ended\n{logs}")
            time.sleep(1)
        return found

    def close(self) -> None:
        """Ends what is still running."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def asked(machine: Machine, site: str) -> Any:
    """The experiment that a site reviews, once the server knows all sites; it looks for them once a second."""
    shown = machine.told(site, "review", "experiment")
    return shown if shown and len(shown["peers"]) == len(SITES) else None


def test_the_federation_of_the_compose_file_trains(machine: Machine) -> None:
    for name in COMPOSE["services"]:
        machine.start(name)

    for site in SITES:
        words = machine.until(f"{site} joins", partial(machine.told, site, "status", "words"))
        done = machine.call("server", "federation", "accept", "hospitals", site, "--fingerprint", words)
        assert done.returncode == 0, done.stderr
    for site in SITES:
        shown = machine.until(f"{site} is asked with all sites", partial(asked, machine, site))
        done = machine.call(site, "site", "review", "--approve", shown["digest"])
        assert done.returncode == 0, done.stderr
    for name, process in machine.running.items():
        process.wait(PATIENCE)
        assert process.returncode == 0, f"{name}: {(machine.root / f'{name}.log').read_text()[-3000:]}"
    run = machine.root / "server" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("finished", 10)
    assert summary["final"]["test_accuracy"] > 0.8
    replayed = machine.call("server", "replay", "run", "--data", str(machine.root))
    assert replayed.stdout.startswith("same bits in 10 rounds"), replayed.stdout + replayed.stderr
