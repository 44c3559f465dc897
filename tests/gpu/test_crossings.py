"""What crosses between the processor and a GPU in a later round of a run, and how often the server waits for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedlens import Experiment
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.experiment.progress import Silent

ROUND = 5  # of six: inputs are compared in the first three, and the last one is evaluated in more detail


def images(*, seed: int = 0) -> Dataset:
    draw = np.random.default_rng(seed)
    inputs, labels = draw.integers(0, 256, (140, 1, 8, 8), np.uint8), np.arange(140) % 4
    made: Dataset = dataset(inputs[:80], labels[:80], inputs[80:], labels[80:])
    return made


class Rounds(Silent):
    """Counts the events up to the end of each round."""

    def __init__(self, simgpu: ModuleType) -> None:
        self.simgpu, self.counts = simgpu, list[Counter[str]]()

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.counts.append(self.simgpu.COUNT.copy())


class Crossings:
    """The events of a round, which is evaluated: `a_round` and, for each client that trains, `a_client`."""

    def __init__(self, folder: Path, simgpu: ModuleType, **changes: Any) -> None:
        few, many = (self._counts(folder / f"{k}", simgpu, k, changes) for k in (2, 4))
        self.a_client = {name: (many[name] - few[name]) / 2 for name in many}
        self.a_round = {name: few[name] - 2 * each for name, each in self.a_client.items()}

    @staticmethod
    def _counts(folder: Path, simgpu: ModuleType, cohort: int, changes: dict[str, Any]) -> Counter[str]:
        settings: dict[str, Any] = {
            "rounds": ROUND + 1,
            "data": {"dataset": images, "partition": {"name": "iid", "clients": 8}},
            "model": "mcmahan-cnn",
            "local": {"lr": 0.05, "batch_size": 5},
            "engine": {"name": "inline", "device": "cuda"},
            "select": {"clients_per_round": cohort},
            **changes,
        }
        rounds = Rounds(simgpu)
        Experiment(**settings).run(folder, progress=rounds)
        before, after = rounds.counts[ROUND - 1 : ROUND + 1]
        return Counter({name: after[name] - before[name] for name in after})


STAY = [
    pytest.param({"algorithm": "fedavg"}, id="fedavg"),
    pytest.param({"algorithm": "scaffold"}, id="scaffold"),
]


@pytest.mark.parametrize("changes", STAY)
def test_the_model_and_the_replies_stay_on_the_gpu(
    changes: dict[str, Any], tmp_path: Path, simgpu: ModuleType
) -> None:
    crossings = Crossings(tmp_path, simgpu, **changes)
    assert crossings.a_round["uploads"] == 0
    assert crossings.a_round["downloads"] == 1  # what the evaluation measured
