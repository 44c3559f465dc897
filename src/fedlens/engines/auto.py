"""The engine that times other engines on a few training steps, and uses the fastest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedlens.base.errors import ConfigError
from fedlens.base.memory import free_memory
from fedlens.core.arithmetic import channels_last_pays
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import (
    Ask,
    BatchedOp,
    ClientDataSource,
    ClientId,
    ClientStates,
    Failure,
    Op,
    Program,
    Request,
    Trial,
)
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
from fedlens.engines.engine_choice import KNOWN, Chosen
from fedlens.engines.inline import StateMemory
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified

_SHORT = 10.0  # seconds of training, below which workers do not pay
_TRIAL = 0.5  # approximate seconds of a trial of one engine
_SLOW = 5.0  # seconds of one step, above which no trial is run
_CLIENTS, _STEPS = 64, 8  # the most of a trial


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
    return verified(
        Auto(state_memory, Computing(resolved(device, spread=True), precision)), verify, exact=False
    )


class Auto(Chosen):
    """See `auto`."""

    def choose(
        self,
        ops: Mapping[str, Op],
        data: ClientDataSource,
        clients: Sequence[ClientId],
        cohort: int | None,
        images: float,
    ) -> str:
        """Times the engines on these clients; returns one line with the choice and the reason."""
        batched = [op for op in ops.values() if isinstance(op, BatchedOp)]
        op, one = next(((op, trial) for op in batched if (trial := op.trial(1))), (None, None))
        if op is None or one is None or cohort is None or not clients:
            return self._take("inline", {}, "no round has several clients to train together")
        cores, workers, device = usable_cores(), default_workers(self.computing, 1), self.computing.device
        first = self._time("inline", {}, one, data, clients[:1])
        if first is None:
            return self._take("inline", {}, "the first trial did not finish")
        if first[0] > _SLOW:
            why = "a step takes seconds, so no other engine was tried"
            if workers > 1 and cohort > 1 and _fits(op, device, min(workers, cohort)):
                return self._take("processes", {"workers": workers}, why)
            return self._take("inline", {"threads": cores}, why)
        steps = max(1, min(_STEPS, int(_TRIAL / 4 / first[0])))
        count = max(1, min(_CLIENTS, cohort, int(_TRIAL / (steps * first[0]))))
        trial = op.trial(steps)
        assert trial is not None
        tried: dict[str, tuple[float, str, dict[str, Any]]] = {}

        def attempt(label: str, name: str, table: dict[str, Any], many: int = count) -> None:
            some = [clients[k * len(clients) // many] for k in range(many)]
            try:
                timed = self._time(name, table, trial, data, some)
            except ConfigError:
                return  # this machine cannot run it
            if timed is not None and timed[1]:
                tried[label] = timed[1] / timed[0], name, table

        attempt("inline", "inline", {})
        if cores > 1 and cohort == 1:
            attempt(f"inline with {cores} threads", "inline", {"threads": cores})
        stacked = cohort > 1 and not any(op.obstacle() for op in batched)
        if stacked:
            attempt("vectorized", "vectorized", {}, max(count, min(8, cohort)))
        fastest = max((speed for speed, _, _ in tried.values()), default=0.0)
        if (
            fastest
            and cohort > 1
            and workers > 1
            and images / fastest > _SHORT
            and _fits(op, device, workers)
        ):
            many = max(2 * workers, count)
            attempt(f"processes {workers} x 1", "processes", {"workers": workers}, many)
            gpu = None if device == "cpu" else share_of_gpu(device, workers)
            group = min(_CLIENTS, cohort // workers, fitting(op, data, clients[:_CLIENTS], gpu))
            if stacked and group > 1:
                table = {"workers": workers, "group": group}
                label = f"processes {workers} x 1, {group} clients at once"
                attempt(label, "processes", table, workers * group)
        if not tried:
            return self._take("inline", {}, "no trial finished")
        label, (_, name, table) = max(tried.items(), key=lambda item: item[1][0])
        if name != "vectorized" and "group" not in table and trial.convolutions:
            channels_last = trial.layout and channels_last_pays(torch.device(self.computing.device))
            other = table | {"channels_last": not channels_last}
            layout = "contiguous" if channels_last else "channels last"
            attempt(f"{label}, {layout}", name, other, max(count, 2 * workers))
        by_speed = sorted(tried.items(), key=lambda item: -item[1][0])
        speeds = ", ".join(f"{label} {speed:,.0f}" for label, (speed, _, _) in by_speed)
        _, name, table = by_speed[0][1]
        return self._take(name, table, f"images/s of {steps} steps at a few clients: {speeds}")

    def _time(
        self,
        name: str,
        table: Mapping[str, Any],
        trial: Trial,
        data: ClientDataSource,
        clients: Sequence[ClientId],
    ) -> tuple[float, float] | None:
        """Seconds and images of the better of two rounds, after a warm-up round; None if a client failed."""
        ask = Ask("train", [Request(client) for client in clients], trial.shared)
        times: list[tuple[float, float]] = []
        engine = KNOWN[name](**{**self.common, **table})
        try:
            engine.open(Program({"train": trial.op}, data, 0), ClientStates())
            for number in (1, 2, 3):
                start = time.perf_counter()
                answers = list(engine.answer(ask, number, 0))
                seconds = time.perf_counter() - start
                if any(isinstance(answer, Failure) for answer in answers):
                    return None
                images = sum(
                    answer.metrics["examples"] for answer in answers if not isinstance(answer, Failure)
                )
                times.append((seconds, images))
                if seconds > 4 * _TRIAL:
                    break
        except Exception:  # an engine that fails is not chosen; the run itself will report the error
            return None
        finally:
            engine.close()
            torch.cuda.empty_cache()  # for the next trial's workers; does nothing where no GPU is in use
        return min(times[1:] or times)


def _fits(op: BatchedOp, device: str, workers: int) -> bool:
    """Whether the free memory is enough for this many workers and the payloads between them."""
    if device == "cpu":
        return (workers + 3) * op.footprint(CPU) < free_memory()
    return op.footprint(CPU) + GPU_CONTEXT < share_of_gpu(device, workers)
