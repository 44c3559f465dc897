"""The base of engines that choose another engine, and the trial by which they do."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch

from fedlens.core.engine_base import EngineBase, EngineWork
from fedlens.core.protocol import Ask, ClientStates, Failure, Program, Request, Trial
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.devices import ON_CPU, Computing
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import vectorized
from fedlens.engines.verify import Forwarding

PAYS = 10.0  # seconds of training, above which workers pay
TRIAL = 0.5  # approximate seconds of a trial of one engine
STEPS = 8  # of a trial
KNOWN: dict[str, Callable[..., EngineBase]] = {
    "inline": inline, "vectorized": vectorized, "processes": processes,
}  # fmt: skip


class Chosen(Forwarding):
    """Starts as `inline`; `choose` replaces it by another engine, whose settings go to the run's config.toml.

    Args:
        settings: further settings, passed to the engines that have them.
    """

    def __init__(
        self,
        state_memory: int = STATE_MEMORY,
        computing: Computing = ON_CPU,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.common = {"device": computing.device, "precision": computing.precision, **(settings or {})}
        self.common["state_memory"] = state_memory
        self.state_memory, self.computing = state_memory, computing
        self._take("inline", {}, "")

    def make(self, name: str, table: Mapping[str, Any]) -> tuple[EngineBase, dict[str, Any]]:
        """The engine of this name, and all its settings; one that is None is left out: TOML has no such value."""
        defaults = {key: p.default for key, p in inspect.signature(KNOWN[name]).parameters.items()}
        given = {key: value for key, value in {**self.common, **table}.items() if key in defaults}
        settings = {key: value for key, value in {**defaults, **given}.items() if value is not None}
        return KNOWN[name](**given), {"name": name, **settings}

    def timed(
        self, name: str, table: Mapping[str, Any], trial: Trial, work: EngineWork, many: int, rounds: int = 3
    ) -> tuple[float, float] | None:
        """Seconds and images of the best round of a trial at `many` clients after the first, or of that if it is slow.

        The trial has its own client states, and leaves the global random generators and the number of threads
        unchanged. Returns None if the engine cannot be made here or a client failed: the run itself will report that.
        """
        clients = [work.clients[k * len(work.clients) // many] for k in range(many)]
        ask = Ask("train", [Request(client) for client in clients], trial.shared)
        times: list[tuple[float, float]] = []
        try:
            with closing(self.make(name, table)[0]) as engine:
                engine.open(Program({"train": trial.op}, work.data, 0), ClientStates())
                for number in range(rounds):
                    start = time.perf_counter()
                    answers = list(engine.answer(ask, number, 0))
                    seconds = time.perf_counter() - start
                    images = sum(a.metrics["examples"] for a in answers if not isinstance(a, Failure))
                    if not images or any(isinstance(answer, Failure) for answer in answers):
                        return None
                    times.append((seconds, images))
                    if seconds > 4 * TRIAL:
                        break
        except Exception:  # of any kind: this machine cannot run it, or a model or task of the user's own
            return None
        finally:
            torch.cuda.empty_cache()  # for the next trial's workers; does nothing where no GPU is in use
        return min(times[1:] or times)

    def _take(self, name: str, table: Mapping[str, Any], why: str) -> str:
        """Uses this engine; returns one line with the choice and the reason."""
        self.engine, self.table = self.make(name, table)
        return f"engine: {name} ({why})"
