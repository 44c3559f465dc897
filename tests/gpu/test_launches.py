"""The launches that `fedlens bench profile` counts are those of the simulator, on the code that runs on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from types import ModuleType

import pytest

from fedlens.benchmark import launches
from tests.unit.benchmark.profile_kit import built, first_ask

ON_GPU = ["engine.name='inline'", "engine.device='cuda'", "local.epochs=1", "local.batch_size=40"]


@pytest.mark.parametrize(
    "model", [["model.name='mcmahan-cnn'"], ["model.name='resnet20'", "model.norm='group'"]]
)
def test_a_step_has_as_many_launches_as_the_simulator_counts(
    model: list[str], simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[list[int]] = []

    class Marking(launches.LaunchCounter):
        """Notes the simulator's count at the beginning of each step."""

        def __init__(self, device: str) -> None:
            super().__init__(device)
            marks.append([])

        def scope(self, name: str) -> AbstractContextManager[None]:
            if name == "data":
                marks[-1].append(simgpu.COUNT["kernels"])
            return super().scope(name)

    monkeypatch.setattr(launches, "LaunchCounter", Marking)
    experiment = built(*ON_GPU, *model)
    counts = launches.count_launches(experiment, first_ask(experiment), {})
    medians = [median(after - before for before, after in pairwise(at)) for at in marks]
    assert [counts["alone"], counts["together"]] == medians
    assert 20 < medians[0] < medians[1]
