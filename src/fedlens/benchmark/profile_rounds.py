"""Times rounds of an experiment in pairs, with and without the clock, so that the clock's own cost is known."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedlens.base.profiling import recording
from fedlens.benchmark.profile_engine import Clock, TimedEngine, with_timed_ops
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import State
from fedlens.core.states import ClientStates
from fedlens.run import checkpoint
from fedlens.run.build import Built
from fedlens.run.changes import defining
from fedlens.run.failed_round import no_accepted_update
from fedlens.run.round_context import round_context
from fedlens.run.run_state import RunState
from fedlens.run.state_files import StateFiles

_SECONDS = 20.0  # of rounds, about, unless their number is given
_FEWEST, _MOST = 2, 30  # pairs
_EVALUATING = 5.0  # seconds of evaluations after which no further pair of them begins


@dataclass
class Timings:
    """Wall seconds of the same work with and without the clock, pair by pair.

    Attributes:
        timed, plain: the seconds with and without the clock.
        parts: seconds by part, summed over the work with the clock: their sum is that of `timed`.
        worker_parts: the same inside operations that ran in other processes.
        tallies: what the work without the clock sent and trained on.
    """

    timed: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    worker_parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tallies: list[Tally] = field(default_factory=list)


def measure(built: Built, pairs: int | None = None, trace: Path | None = None) -> ProfiledRounds:
    """Runs rounds of an experiment in pairs, one with and one without the clock; closes the engine.

    The rounds of a pair have the same cohort. A first pair is not counted, as it fills the caches. `trace` is a file
    for one more round as a Chrome trace of `torch.profiler`, with every operator. Raises `RunFailed` where no client
    of a round can be trained, as a run does.
    """
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as scratch:
        rounds = ProfiledRounds(built, Path(scratch))
        try:
            rounds.measure(pairs, trace)
        finally:
            built.engine.close()
    return rounds


class ProfiledRounds:
    """Rounds of an experiment and, after `measure`, their measurements.

    Attributes:
        training, evaluation: the timings of the rounds and of the evaluations.
        processes: how many other processes trained clients.
        model_bytes, checkpoint_bytes: the sizes of the files that a run would write.
        ask: the last training ask, with the request of its largest client alone.
        client_state: the state of that client.
    """

    def __init__(self, built: Built, scratch: Path) -> None:
        self.built, self.number = built, 0
        self.training, self.evaluation = Timings(), Timings()
        self.states = ClientStates(StateFiles(scratch / "states"), built.engine.state_memory * 2**20)
        self.engine = TimedEngine(built.engine)
        self.driver = Driver(self.engine, self.states)
        self.scratch = scratch

    def measure(self, pairs: int | None, trace: Path | None) -> None:
        """Takes all measurements; see the function of this name."""
        self.engine.open(with_timed_ops(self.built.program), self.states)
        self.state: State = self.built.on_device(
            self.built.algorithm.init(self.built.model, self.built.federation)
        )
        began = time.perf_counter()
        self._pair(0, Timings())
        pairs = pairs or max(_FEWEST, min(_MOST, int(_SECONDS / (time.perf_counter() - began))))
        for number in range(pairs):
            self._pair(number, self.training)
        ask = self.engine.asked
        assert ask is not None
        for number in range(pairs):
            self._pair(number, self.evaluation)
            if sum(self.evaluation.plain) > _EVALUATING:
                break
        if trace is not None:
            self._trace(trace)
        self.processes = len(self.engine.processes)
        self.model_bytes, self.checkpoint_bytes = self._file_sizes()
        largest = max(ask.requests, key=lambda request: len(self.built.client_data.data_of(request.client)))
        self.ask, self.client_state = replace(ask, requests=[largest]), self.states.get(largest.client)

    def _pair(self, number: int, timings: Timings) -> None:
        # The order alternates, so that a machine that slows down affects both alike.
        for with_clock in (False, True) if number % 2 == 0 else (True, False):
            context = round_context(self.built, number + 1)
            if timings is self.evaluation:
                evaluation = self.built.algorithm.evaluate(self.state, context)
                self._timed(evaluation, timings, with_clock, "evaluation")
                continue
            round = self.built.algorithm.round(self.state, context)
            self.state = self._timed(round, timings, with_clock, "other")
            tally = self.driver.tally
            if tally.failed_round:
                raise no_accepted_update(number + 1, tally, self.built.config.local.lr)

    def _timed(self, steps: Generator[Any, Any, Any], timings: Timings, with_clock: bool, part: str) -> Any:
        """Drives a round or an evaluation, and returns its result; `part` is charged with what has no name."""
        self.number += 1
        self.driver.tally = tally = Tally()
        self.engine.seconds = timings.worker_parts if with_clock else None
        clock = Clock()
        began = time.perf_counter()
        with ExitStack() as stack:
            if with_clock:
                stack.enter_context(recording(clock.part))
                stack.enter_context(clock.part(part))
            result = self.driver.drive(steps, self.number)
        seconds = time.perf_counter() - began
        if with_clock:
            timings.timed.append(seconds)
            clock.seconds["other"] += seconds - sum(clock.seconds.values())
            for name, value in clock.seconds.items():
                timings.parts[name] += value
        else:
            timings.plain.append(seconds)
            timings.tallies.append(tally)
        return result

    def _trace(self, file: Path) -> None:
        """Writes one round as a Chrome trace."""
        self.number += 1
        self.engine.seconds = None
        steps = self.built.algorithm.round(self.state, round_context(self.built, 1))
        with torch.profiler.profile() as recorded, recording(torch.profiler.record_function):
            self.driver.drive(steps, self.number)
        recorded.export_chrome_trace(str(file))

    def _file_sizes(self) -> tuple[int, int]:
        """The bytes of model.safetensors and of a checkpoint, written as a run writes them."""
        _, tree = self.built.algorithm.model(self.state)
        path = self.scratch / "model.safetensors"
        checkpoint.write_model(path, tree, {})
        run_state = RunState(1, self.state, self.states.mark(), {})
        about = {"settings": defining(self.built.config), "lines": {}}
        saved = checkpoint.save(self.scratch / "checkpoint", 1, run_state.payload(), about=about)
        return path.stat().st_size, sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
