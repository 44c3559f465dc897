"""Which device the runs of a study train on, and how many of them the GPUs hold at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedlens.engines.devices import free_memory_of, resolved
from fedlens.engines.hardware import hardware
from fedlens.engines.traits import traits_of
from fedlens.studies.planned import PlannedRun

_PER_GPU = 2  # runs of one GPU: one computes while the other prepares its batches
_SHARE = 0.8  # of the free memory of a GPU that runs may take together


@dataclass(frozen=True)
class GpuMemory:
    """What a run takes of a GPU.

    Attributes:
        training: bytes of its process and of local training.
        data: bytes of its data, which lie on the GPU if they fit into half of the free memory.
    """

    training: int
    data: int

    def needed(self, free: int) -> int:
        """Bytes of a GPU with so many free bytes.

        >>> GpuMemory(training=10, data=40).needed(100), GpuMemory(training=10, data=40).needed(70)
        (50, 10)
        """
        return self.training + (self.data if 2 * self.data <= free else 0)


def device_of(run: PlannedRun) -> str:
    """The device of a run on this machine: 'cpu', 'cuda' for any GPU, or a certain one such as 'cuda:1'."""
    if traits_of(run.engine).place == "cluster":
        return "cpu"  # of this process: the cluster places the workers of the run
    return resolved(str(run.engine.get("device", "auto")), spread=True)


def runs_on_gpus(runs: Iterable[tuple[PlannedRun, GpuMemory | None]]) -> int | None:
    """How many of these runs the free memory of the GPUs holds at once, at least 1; None if none trains on a GPU.

    At most two runs share a GPU. A run whose clients train together fills one, and a run with workers uses all.

    Raises `RunFailed` if the free memory cannot be read.
    """
    kinds = {(device_of(run), traits_of(run.engine), memory) for run, memory in runs if memory}
    free = {device: free_memory_of(device) for device, _, _ in kinds}
    rooms = []
    for device, traits, memory in kinds:
        most = 0 if traits.place != "process" else 1 if traits.groups else _PER_GPU
        held = [min(most, int(_SHARE * bytes / memory.needed(bytes))) for bytes in free[device]]
        rooms.append(max(1, sum(held)))
    return min(rooms, default=None)


def gpus_to_share(runs: Iterable[PlannedRun], jobs: int) -> list[int]:
    """The free bytes of each GPU if so many parallel runs are distributed over several of them; else empty.

    Raises `RunFailed` if the free memory cannot be read.
    """
    several = jobs > 1 and len(hardware().gpus) > 1
    return free_memory_of("cuda") if several and any(device_of(run) == "cuda" for run in runs) else []
