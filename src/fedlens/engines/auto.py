"""The engine that times other engines on a few training steps, and uses the fastest."""

from __future__ import annotations

from typing import Any

import torch

from fedlens.base.memory import free_memory
from fedlens.core.arithmetic import channels_last_pays
from fedlens.core.engine_base import EngineBase, EngineWork
from fedlens.core.protocol import BatchedOp
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.client_groups import CPU, fitting
from fedlens.engines.devices import (
    GPU_CONTEXT,
    Computing,
    Device,
    PrecisionSetting,
    default_workers,
    resolved,
    share_of_gpu,
    usable_cores,
)
from fedlens.engines.engine_choice import PAYS, STEPS, TRIAL, Chosen
from fedlens.engines.inline import StateMemory
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified

_SLOW = 5.0  # seconds of one step, above which no trial is run
_CLIENTS = 64  # the most of a trial


@declares(EngineTraits(chooses=True))
def auto(
    *,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    state_memory: StateMemory = STATE_MEMORY,
    verify: Verify = 0,
) -> EngineBase:
    """Tries the engines on a few steps of plain training before the run, and takes the fastest.

    It also chooses the number of workers, the clients computed at once and the memory layout, but never device and
    precision. The choice is written to the run's config.toml, so a resumed run does not choose again.
    """
    made = Auto(state_memory, Computing(resolved(device, spread=True), precision))
    return verified(made, verify, exact=False)


class Auto(Chosen):
    """See `auto`."""

    def choose(self, work: EngineWork) -> str:
        """Times the engines on these clients; returns one line with the choice and the reason."""
        batched = [op for op in work.ops.values() if isinstance(op, BatchedOp)]
        cohort, clients, device = work.cohort, work.clients, self.computing.device
        if not batched or cohort is None or not clients:
            return self._take("inline", {}, "no round has several clients to train together")
        cores, workers = usable_cores(), default_workers(self.computing, 1)
        first = self.timed("inline", {}, work.trial(1), work, 1)
        if first is None:
            return self._take("inline", {}, "the first trial did not finish")
        if first[0] > _SLOW:
            why = "a step takes seconds, so no other engine was tried"
            if workers > 1 and cohort > 1 and _fits(batched[0], device, min(workers, cohort)):
                return self._take("processes", {"workers": workers}, why)
            return self._take("inline", {"threads": cores}, why)
        steps = max(1, min(STEPS, int(TRIAL / 4 / first[0])))
        count = max(1, min(_CLIENTS, cohort, int(TRIAL / (steps * first[0]))))
        trial = work.trial(steps)
        tried: dict[str, tuple[float, str, dict[str, Any]]] = {}

        def attempt(label: str, name: str, table: dict[str, Any], many: int = count) -> None:
            if (found := self.timed(name, table, trial, work, many)) is not None:
                tried[label] = found[1] / found[0], name, table

        attempt("inline", "inline", {})
        if cores > 1 and cohort == 1:
            attempt(f"inline with {cores} threads", "inline", {"threads": cores})
        stacked = cohort > 1 and not any(op.obstacle() for op in batched)
        if stacked:
            attempt("vectorized", "vectorized", {}, max(count, min(8, cohort)))
        fastest = max((speed for speed, _, _ in tried.values()), default=0.0)
        pays = cohort > 1 and workers > 1 and work.images > PAYS * fastest > 0
        if pays and _fits(batched[0], device, workers):
            label = f"processes {workers} x 1"
            attempt(label, "processes", {"workers": workers}, max(2 * workers, count))
            gpu = None if device == "cpu" else share_of_gpu(device, workers)
            group = min(_CLIENTS, cohort // workers, fitting(batched[0], work.data, clients[:_CLIENTS], gpu))
            if stacked and group > 1:
                table = {"workers": workers, "group": group}
                attempt(f"{label}, {group} clients at once", "processes", table, workers * group)
        if not tried:
            return self._take("inline", {}, "no trial finished")
        label, (_, name, table) = max(tried.items(), key=lambda item: item[1][0])
        if name != "vectorized" and "group" not in table and trial.convolutions:
            channels_last = trial.layout and channels_last_pays(torch.device(device))
            other = table | {"channels_last": not channels_last}
            layout = "contiguous" if channels_last else "channels last"
            attempt(f"{label}, {layout}", name, other, max(count, 2 * workers))
        by_speed = sorted(tried.items(), key=lambda item: -item[1][0])
        speeds = ", ".join(f"{label} {speed:,.0f}" for label, (speed, _, _) in by_speed)
        _, name, table = by_speed[0][1]
        return self._take(name, table, f"images/s of {steps} steps at a few clients: {speeds}")


def _fits(op: BatchedOp, device: str, workers: int) -> bool:
    """Whether the free memory is enough for this many workers and the payloads between them."""
    if device == "cpu":
        return (workers + 3) * op.footprint(CPU) < free_memory()
    return op.footprint(CPU) + GPU_CONTEXT < share_of_gpu(device, workers)
