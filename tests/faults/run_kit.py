"""Runs for the tests of faults: a small experiment with state everywhere, and what two runs of it must share."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlens.core.payload import encode
from fedlens.files.model_digest import weights_digest
from fedlens.run import checkpoint
from tests.identity.identity_kit import PEERS

ROOT = Path(__file__).parents[2]

OWN = '''
"""An algorithm whose clients remember something, and whose server too."""

import torch

from fedlens.aggregate.server_steps import momentum
from fedlens.algorithms.averaging import Parts, averaging
from fedlens.local.rules import ClientRule


def lean(gradients, parameters, context):
    past = context.state.get("past")
    return gradients if past is None else list(torch._foreach_add(gradients, past, alpha=0.05))


def remember(parameters, context):
    past = torch._foreach_sub(context.anchor, parameters)
    return {}, {"past": list(past), "visits": context.state.get("visits", 0) + 1}


def stateful(parts: Parts):
    return averaging(parts, client=ClientRule(grad=lean, finish=remember), server=momentum(momentum=0.5))
'''

TOML = """
name = "faults"
seed = 3
rounds = {rounds}

[data]
dataset = "digits"
partition = {{ name = "dirichlet", clients = 8, alpha = 0.5 }}
validation = 0.1

[model]
name = "small-cnn"
width = 4

[select]
clients_per_round = 4

[algorithm]
name = "own.py:stateful"

[local]
lr = 0.05
epochs = {epochs}

[engine]
name = "{engine}"

[evaluation]
every = 2

[checkpoint]
seconds = 0

[record]
clients = true
"""


def experiment(directory: Path, engine: str = "inline", rounds: int = 6, epochs: int = 1) -> Path:
    """Writes the experiment's two files."""
    (directory / "own.py").write_text(OWN, encoding="utf-8")
    workers = 'processes"\nworkers = 2\nthreads = "1' if engine == "processes" else engine
    (directory / "run.toml").write_text(
        TOML.format(engine=workers, rounds=rounds, epochs=epochs), encoding="utf-8"
    )
    return directory / "run.toml"


def of_another_kind(directory: Path, algorithm: str) -> Path:
    """The same on two workers, with an algorithm of another kind; most send letters between clients."""
    path = experiment(directory, "processes", rounds=4)
    text = path.read_text(encoding="utf-8").replace('name = "own.py:stateful"', algorithm)
    if any(peers in algorithm for peers in PEERS):  # all clients are peers, and none is selected
        text = text.replace("[select]\nclients_per_round = 4\n", "")
    if "vertical" in algorithm:  # parties take the place of the partition, and all of them take part
        text = text.replace("[select]\nclients_per_round = 4\n", "").replace("validation = 0.1\n", "")
        partition = 'partition = { name = "dirichlet", clients = 8, alpha = 0.5 }'
        text = text.replace(partition, 'parties = { split = "quadrants", overlap = 0.8 }')
    if "fednas" in algorithm:
        network = 'name = "darts-search"\nchannels = 2\ncells = 1\nnodes = 2'
        text = text.replace('name = "small-cnn"\nwidth = 4', network)
    if "secagg" in algorithm:
        text = text.replace("[record]\nclients = true\n", "")
    path.write_text(text, encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    # Warnings are as a user has them: a signal between open() and `with` is a ResourceWarning, which nobody sees.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONWARNINGS": ""}


def fedlens(*arguments: str, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    """`fedlens ...` as a process of its own, in a process group of its own."""
    code = "from fedlens.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


@contextmanager
def lives(cwd: Path) -> Iterator[Any]:
    """A function that takes a plan and gives back how each of its lives ended; see `tests.faults.lives`.

    With a `prefix`, the command in which they are to live, in a process of its own; else in one for all tests.
    """

    def play(plan: list[dict[str, Any]], *, prefix: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        process = _living() if not prefix else _started(prefix)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(cwd), plan]) + "\n")
        process.stdin.flush()
        ended: list[dict[str, Any]] = json.loads(process.stdout.readline())
        if prefix:
            process.communicate(timeout=100)
        return ended

    yield play


def _started(prefix: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "tests.faults.lives"]
    return subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@functools.cache
def _living() -> subprocess.Popen[str]:
    """The process that all lives are forked from. It ends with this one, at the end of its input."""
    process = _started(())
    atexit.register(process.communicate)
    return process


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def outcome(run: Path) -> dict[str, Any]:
    """All of a run's results that another run of the same must share: to the bit, wall times aside."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["elapsed"]
    summary = json.loads((run / "summary.json").read_text())
    for name in ("run_id", "directory"):
        del summary[name]
    for part in (summary["totals"], summary["final"] or {}):
        for name in ("seconds", "elapsed", "cpu_seconds"):
            part.pop(name, None)
    last = checkpoint.load_latest(run / "checkpoint")
    assert last is not None
    last.payload["line"] = None  # has the wall times
    del last.payload["cpu_seconds"]
    structure, tensors = encode(last.payload)
    return {
        "model": sha(run / "model.safetensors") if (run / "model.safetensors").exists() else None,
        "best": sha(run / "best.safetensors") if (run / "best.safetensors").exists() else None,
        "metrics": lines,
        "clients": (run / "clients.jsonl").read_text() if (run / "clients.jsonl").exists() else None,
        "summary": summary,
        "checkpoints": sorted(path.name for path in (run / "checkpoint").iterdir()),
        "state": json.dumps(structure),
        "tensors": weights_digest(tensors),
    }


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found
