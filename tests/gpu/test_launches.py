"""The launches that `fedlens bench profile` counts are those of the simulator, on the code that runs on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from types import ModuleType

import pytest
import torch

from fedlens.benchmark import profile_client
from tests.unit.benchmark.profile_kit import built, first_ask

ON_GPU = ["engine.name='inline'", "engine.device='cuda'", "local.epochs=1", "local.batch_size=40"]


@pytest.mark.parametrize(
    "model",
    [
        ["model.name='mcmahan-cnn'"],
        pytest.param(["model.name='resnet20'", "model.norm='group'"], marks=pytest.mark.nightly),
    ],
)
def test_a_step_has_as_many_launches_as_the_simulator_counts(
    model: list[str], simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[list[int]] = []

    class Marking(profile_client.LaunchCounter):
        """Notes the simulator's count at the beginning of each step."""

        def __init__(self, device: str) -> None:
            super().__init__(device)
            marks.append([])

        def scope(self, name: str) -> AbstractContextManager[None]:
            if name == "data":
                marks[-1].append(simgpu.COUNT["kernels"])
            return super().scope(name)

    monkeypatch.setattr(profile_client, "LaunchCounter", Marking)
    experiment = built(*ON_GPU, *model)
    counts = profile_client.count_launches(experiment, first_ask(experiment), {})
    medians = [median(after - before for before, after in pairwise(at)) for at in marks]
    assert [counts["alone"], counts["together"]] == medians
    assert 20 < medians[0] < medians[1]


def test_the_simulator_and_the_counter_take_the_same_operations_as_free(simgpu: ModuleType) -> None:
    names = [full[6:] for full in torch._C._dispatch_get_all_op_names() if full.startswith("aten::")]
    packets = {name.partition(".")[0]: None for name in names if "convolution_backward" not in name}
    overloads = [
        getattr(getattr(torch.ops.aten, packet), overload or "default")
        for packet, _, overload in (name.partition(".") for name in names)
        if packet in packets
    ]
    rules = {overload: simgpu.rule_of(overload) for overload in overloads}
    free = {overload for overload, rule in rules.items() if not rule.kernel and not rule.copies}
    assert torch.ops.aten._unsafe_view.default in free
    assert free == {
        overload
        for overload, rule in rules.items()
        if not rule.copies and profile_client.launches_of(overload, (), {"cuda"}) == 0
    }
