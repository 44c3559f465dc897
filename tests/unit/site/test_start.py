"""A site as a process: it stops when it is told to, also in the middle of an operation."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
from pathlib import Path

import torch

from fedlens.site.start import work
from tests.unit.site.test_agent import Server, Site

site, server = Site(Path(sys.argv[1])), Server()

def endless(payload, client):
    print("computing", flush=True)
    while True:
        torch.randn(200, 200) @ torch.randn(200, 200)

site.operation.instead = endless
server.ask()
work(site.agent(server))
print("it returned", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_ends_a_site_in_the_middle_of_an_operation(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "it returned\n", "")
    assert (tmp_path / "site" / "log" / "asked.jsonl").read_bytes() == b""
    assert "stopped" in (tmp_path / "site" / "log" / "site.jsonl").read_text()
