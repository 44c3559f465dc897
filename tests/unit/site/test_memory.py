"""A site has at most three bodies in memory: what came, what is made of it, and what is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import asyncio, hashlib, sys
from pathlib import Path

import torch

from fedlens.core.protocol import Outcome
from fedlens.core.schema import Schema, TensorField
from fedlens.core.wire.message import write_payload
from fedlens.core.wire.plain_schema import to_plain
from tests.unit.site import test_agent
from tests.unit.site.ask_kit import ask_of
from tests.unit.site.test_agent import Server, Site

folder, floats = Path(sys.argv[1]), 2**24
field = TensorField((-1,), torch.float32)
test_agent.TAKES = Schema({"model": field})
expect = to_plain(Schema({"sum": field}))
site = Site(folder / "site")
site.operation.instead = lambda payload, client: Outcome({"sum": payload["model"] + 1}, {"kept": payload["model"] + 2})


def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


class Disk(Server):
    # It has no body in memory.
    async def blob(self, digest, size):
        return (folder / digest.hex()).read_bytes()

    async def answer(self, ask, parts, check):
        self.open.pop(ask)
        self.sizes = [*getattr(self, "sizes", []), sum(map(len, parts))]
        return True

    async def train(self, n, slot):
        shared = write_payload({"model": torch.zeros(n)})
        digest, size = hashlib.sha256(shared).digest(), len(shared)
        (folder / digest.hex()).write_bytes(shared)
        del shared
        body = write_payload({})
        ask = ask_of(body, digest, {"expect": expect, "shared_size": size}, slot=slot)
        before = len(getattr(self, "sizes", []))
        self.open[ask.digest] = ask, body
        await self.until(lambda: len(getattr(self, "sizes", [])) > before)
        assert self.sizes[-1] > 4 * n


async def main():
    server = Disk()
    task = asyncio.create_task(site.agent(server).run())
    for slot in range(4):  # the first calls of an operation are checked more closely
        await server.train(1000, slot)
    shared = write_payload({"model": torch.zeros(floats)})
    del shared
    resting = kib("VmRSS")
    peaks = []
    for slot in (4, 5):
        Path("/proc/self/clear_refs").write_text("5")
        await server.train(floats, slot)
        peaks.append((kib("VmHWM") - resting) * 1024 / (4 * floats))
    print(max(peaks), (kib("VmRSS") - resting) * 1024 / (4 * floats))
    task.cancel()


asyncio.run(main())
"""


@pytest.mark.nightly
def test_a_site_has_at_most_three_bodies_in_memory(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir(mode=0o700)
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, resting = map(float, done.stdout.split())
    assert 1 < peak < 3.3, done.stdout
    assert resting < 0.3, done.stdout
