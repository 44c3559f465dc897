"""Rounds of Apple's pfl-research: its simulated backend and its FederatedAveraging, with nothing evaluated.

With several processes pfl shares a cohort out over them as it does under torchrun, and sums over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys

import turns


def start_others(asked: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Starts the other processes of a run as torchrun would, and makes this one its first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "TORCHELASTIC_RUN_ID": "fedlens-bench", "WORLD_SIZE": asked.processes, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "LOCAL_WORLD_SIZE": asked.processes,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in common.items()} | {"RANK": "0", "LOCAL_RANK": "0"})
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        for rank in range(1, asked.processes)
    ]


def main() -> None:
    """The first process starts the others; each trains its share."""
    asked = turns.arguments("pfl")
    first = "RANK" not in os.environ
    others = start_others(asked) if first and asked.processes > 1 else []
    line = turns.Turns() if first else None
    from pfl_rounds import train

    train(asked, line)
    for other in others:
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.wait(10)
        other.kill()


if __name__ == "__main__":
    main()
