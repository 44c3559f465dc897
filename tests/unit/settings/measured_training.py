"""A process that trains a model for three steps, and prints how much its memory grew and how much was expected."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedlens
from fedlens import Experiment
from fedlens.run.runner import Runner
from fedlens.settings.memory_check import training_memory


def resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(model: str, size: int, batch: int, optimizer: dict[str, Any]) -> dict[str, int]:
    """The growth of this process from before the first round, and the number of `TrainingMemory.needed`."""

    def images(root: Path) -> Any:
        drawn = np.random.default_rng(0).integers(0, 255, (batch * 2, size, size, 3), dtype=np.uint8)
        labels = np.arange(batch * 2) % 10
        return fedlens.dataset(drawn, labels, drawn[:10], labels[:10])

    answer: dict[str, int] = {}
    rounds = Runner.rounds

    def watched(runner: Runner, until: int | None = None) -> Any:
        spec = runner.built.model
        local, task = runner.built.config.local, runner.built.task
        memory = training_memory(spec.build(), spec.input_shape, batch, local, task, spec.classes)
        assert memory is not None
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = resident("VmRSS")
        yield from rounds(runner, until)
        answer.update(needed=memory.needed(), peak=resident("VmHWM") - before)

    Runner.rounds = watched  # type: ignore[method-assign]
    experiment = Experiment(
        rounds=1,
        model=model,
        local={"lr": 1e-4, "steps": 3, "batch_size": batch, **optimizer},
        data={"dataset": images, "partition": {"name": "iid", "clients": 1}},
        evaluation={"batch_size": 4},
        engine="inline",
    )
    with tempfile.TemporaryDirectory() as folder:
        experiment.run(Path(folder) / "run", report=False)
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
