"""The default engine on GPUs: clients train together if they can."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from fedlens.core.protocol import BatchedOp, ClientDataSource, ClientId, Op, Program
from fedlens.engines.client_groups import fitting
from fedlens.engines.devices import default_workers, freest, share_of_gpu
from fedlens.engines.engine_choice import Chosen
from fedlens.engines.shared_memory import Packer

_PAYS = 1e6  # images of a run, above which several GPUs are used: workers take seconds to start


class OnGpus(Chosen):
    """`vectorized` on one GPU, `processes` with groups on several, or `inline` if only one client trains at a time.

    The choice depends on the experiment and on the free memory of the GPUs, not on timing. Groups change the last bits,
    so the choice is written to the run's config.toml, and a resumed run keeps it.
    """

    def choose(
        self,
        ops: Mapping[str, Op],
        data: ClientDataSource,
        clients: Sequence[ClientId],
        cohort: int | None,
        images: float,
    ) -> str:
        """Chooses the engine; returns one line with the choice, and the reason if not all GPUs are used."""
        device, cohort = self.computing.device, cohort or 1
        batched = [op for op in ops.values() if isinstance(op, BatchedOp)]
        workers, one_gpu = self._count(cohort, images, Program(ops, data, 0))
        most = -(-cohort // workers)
        apart = self._apart(batched, most)
        if one_gpu:
            device = freest()
        group = 1
        if apart is None:
            # If this process trains, it may open a context on the GPU.
            free = share_of_gpu(device, workers) if workers > 1 else torch.cuda.mem_get_info(device)[0]
            steady = 1 << (max(free, 1).bit_length() - 1)  # a power of 2: a repeated run has the same groups
            sizes = [fitting(op, data, clients, steady) for op in batched]
            group = min(*sizes, most)
            apart = "the free memory of the GPU holds no group" if group == 1 else None
        name = "processes" if workers > 1 else "inline" if apart else "vectorized"
        self._take(name, {"device": device, "workers": workers, "group": group}, "")
        line = f"engine: {name}"
        line += f" on {device}, as {one_gpu}" if one_gpu else ""
        line += f", {workers} workers" if workers > 1 else ""
        if one_gpu and cohort == 1:
            return line  # which states the reason
        return f"{line}, one client at a time, as {apart}" if apart else f"{line}, groups of {group} clients"

    def _apart(self, batched: Sequence[BatchedOp], most: int) -> str | None:
        """Why clients cannot train together if a process has at most `most` of them; None if they can."""
        if most == 1 or not batched:
            return "no process has several clients to train together in a round"
        if self.common.get("channels_last") is True:
            return "batched clients cannot use the channels-last layout"
        return next((obstacle.what for op in batched if (obstacle := op.obstacle())), None)

    def _count(self, cohort: int, images: float, program: Program) -> tuple[int, str]:
        """The number of workers (1: none), and why only one of several GPUs is used; empty if all are."""
        limit = int(self.common.get("workers", 0))
        several = self.computing.device == "cuda" and torch.cuda.device_count() > 1
        default = default_workers(self.computing, int(self.common.get("threads", 1))) if several else 1
        count, why = min(limit or default, cohort), ""
        if cohort == 1:
            why = "one client trains at a time"
        elif limit == 1:
            why = "engine.workers is 1"
        elif sys.platform == "win32":
            why = "workers need Linux or macOS"
        elif not limit and images < _PAYS:
            why = "the run is short"
        elif count > 1:
            try:
                Packer(program, code=True)
            except Exception:
                why = "the operations cannot be sent to workers"
        return (1, why if several else "") if why else (count, "")
