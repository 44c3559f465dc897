"""Profiles rounds and measures the profiler's own overhead in paired runs."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from fedlens.benchmark.profile_clock import Clock
from fedlens.benchmark.profile_engine import TimedEngine, timed_ops
from fedlens.core.driver import Driver, Tally
from fedlens.core.profiling import recording
from fedlens.core.protocol import Ask, Program, RoundContext, State
from fedlens.core.random import Rng
from fedlens.core.states import ClientStates
from fedlens.experiment import checkpoint
from fedlens.experiment.build import Built
from fedlens.experiment.runner import RunState, hopeless
from fedlens.experiment.state_files import StateFiles

PARTS = (
    "data", "forward", "backward", "optimizer", "rule", "client", "aggregate", "engine", "evaluation",
    "other",
)  # fmt: skip
_SECONDS = 20.0  # of rounds, about, unless their number is given
_FEWEST, _MOST = 2, 30  # pairs
_MEASURING = 5.0  # seconds of evaluations from which one pair of them is enough


@dataclass
class Spans:
    """Wall seconds of the same work with and without the clock, pair by pair; `parts` sums those with it."""

    timed: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mean_parts(self) -> dict[str, float]:
        """Mean seconds by part and share of it."""
        return {name: value / len(self.timed) for name, value in self.parts.items()}

    @property
    def overhead(self) -> float:
        """What the clock adds, as a share: the median over the pairs."""
        return median(self._ratios()) - 1

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quartiles of the overhead over the pairs: how certain `overhead` is."""
        ratios = self._ratios()
        if len(ratios) < 2:
            return ratios[0] - 1, ratios[0] - 1
        first, _, third = quantiles(ratios, n=4, method="inclusive")
        return first - 1, third - 1

    def _ratios(self) -> list[float]:
        return [t / p for t, p in zip(self.timed, self.plain, strict=True)]


@dataclass
class Rounds:
    """What was measured over some rounds.

    Attributes:
        training, evaluation: wall seconds of the rounds and of the evaluations.
        workers, worker_evaluation: seconds a round by part, inside operations that ran in other processes.
        processes: how many other processes there were.
        tallies: what each round without the clock sent and trained on.
        measuring: the same for one evaluation.
        model_bytes, checkpoint_bytes: the sizes of the files that a run would write.
        asked: the last ask of a training round; `largest_state` is what its largest client had kept.
    """

    training: Spans
    evaluation: Spans
    workers: dict[str, float]
    worker_evaluation: dict[str, float]
    processes: int
    tallies: list[Tally]
    measuring: Tally
    model_bytes: int
    checkpoint_bytes: int
    asked: Ask
    largest_state: Mapping[str, Any]


def measure(built: Built, pairs: int | None = None, trace: Path | None = None) -> Rounds:
    """Runs rounds of an experiment in pairs, one with and one without the clock; closes the engine.

    The rounds of a pair have the same cohort. A first pair is not counted, as it fills the caches. `trace` is a file
    for one more round as a Chrome trace of `torch.profiler`, with every operator. Raises `RunFailed` where no client
    of a round can be trained, as a run does.
    """
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as scratch:
        return _Profiled(built, Path(scratch)).measure(pairs, trace)


class _Profiled:
    def __init__(self, built: Built, scratch: Path) -> None:
        self.built, self.scratch = built, scratch
        self.states = ClientStates(StateFiles(scratch / "states"), built.engine.state_memory * 2**20)
        self.engine = TimedEngine(built.engine)
        self.driver = Driver(self.engine, self.states)
        self.training, self.evaluation = Spans(), Spans()
        self.tallies: list[Tally] = []
        self.number = 0

    def measure(self, pairs: int | None, trace: Path | None) -> Rounds:
        built, engine = self.built, self.engine
        program = Program(timed_ops(built.algorithm.ops), built.holders, built.config.seeds.training)
        try:
            engine.open(program, self.states)
            self.state: State = built.algorithm.init(built.model, built.federation)
            began = time.perf_counter()
            self._pair(0, warm=True)
            wanted = pairs or _fitting(time.perf_counter() - began)
            workers = self._rounds(wanted)
            asked = engine.asked
            assert asked is not None
            measuring, there = self._evaluations(wanted)
            largest = max(asked.requests, key=lambda request: len(built.holders.holder(request.client)))
            kept = self.states.get(largest.client)
            if trace is not None:
                self._trace(trace)
        finally:
            engine.close()
        return Rounds(
            self.training,
            self.evaluation,
            workers,
            there,
            len(engine.processes),
            self.tallies,
            measuring,
            *self._sizes(),
            asked,
            kept,
        )

    def _rounds(self, pairs: int) -> dict[str, float]:
        self.engine.workers.clear()
        for pair in range(pairs):
            self._pair(pair)
        return {name: value / pairs for name, value in self.engine.workers.items()}

    def _pair(self, pair: int, warm: bool = False) -> None:
        # The order alternates, so that a machine that slows down affects both alike.
        for with_clock in (False, True) if pair % 2 == 0 else (True, False):
            context = self._context(pair + 1)
            tally, seconds, clock = self._driven(self.built.algorithm.round(self.state, context), with_clock)
            if tally.failed and tally.clients == 0:
                raise hopeless(pair + 1, tally, self.built.config.local.lr)
            if not warm:
                _note(self.training, seconds, clock)
                if not with_clock:
                    self.tallies.append(tally)

    def _evaluations(self, pairs: int) -> tuple[Tally, dict[str, float]]:
        self.engine.workers.clear()
        tally, state = Tally(), self.state
        for pair in range(pairs):
            for with_clock in (False, True):
                steps = self.built.algorithm.evaluate(state, self._context(pair + 1))
                tally, seconds, clock = self._driven(steps, with_clock, "evaluation")
                _note(self.evaluation, seconds, clock)
            if sum(self.evaluation.plain) > _MEASURING:
                break
        count = len(self.evaluation.timed)
        return tally, {name: value / count for name, value in self.engine.workers.items()}

    def _driven(self, steps: Any, with_clock: bool, part: str = "other") -> tuple[Tally, float, Clock | None]:
        """Drives one round or evaluation; a round's result is the state from then on."""
        self.number += 1
        self.driver.tally = tally = Tally()
        clock = Clock() if with_clock else None
        began = time.perf_counter()
        if clock is None:
            result = self.driver.drive(steps, self.number)
        else:
            self.engine.timing = True
            try:
                with recording(clock.part), clock.part(part):
                    result = self.driver.drive(steps, self.number)
            finally:
                self.engine.timing = False
        seconds = time.perf_counter() - began
        if clock is not None:
            clock.seconds["other"] += seconds - sum(clock.seconds.values())
        if part != "evaluation":
            self.state = result
        return tally, seconds, clock

    def _trace(self, file: Path) -> None:
        """Writes one round as a Chrome trace."""
        self.number += 1
        steps = self.built.algorithm.round(self.state, self._context(1))
        with torch.profiler.profile() as recorded, recording(torch.profiler.record_function):
            self.driver.drive(steps, self.number)
        recorded.export_chrome_trace(str(file))

    def _context(self, round: int) -> RoundContext:
        config = self.built.config
        rng = Rng((config.seeds.selection, "round", round))
        return RoundContext(round, config.rounds, self.built.federation, rng)

    def _sizes(self) -> tuple[int, int]:
        """The bytes of model.safetensors and of a checkpoint, written as a run writes them."""
        _, tree = self.built.algorithm.model(self.state)
        path = self.scratch / "model.safetensors"
        checkpoint.write_model(path, tree, {})
        run_state = RunState(1, self.state, self.states.mark(), {})
        saved = checkpoint.save(self.scratch / "checkpoint", 1, run_state.payload())
        return path.stat().st_size, sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())


def _note(spans: Spans, seconds: float, clock: Clock | None) -> None:
    if clock is None:
        spans.plain.append(seconds)
        return
    spans.timed.append(seconds)
    for name, value in clock.seconds.items():
        spans.parts[name] += value


def _fitting(pair: float) -> int:
    return max(_FEWEST, min(_MOST, int(_SECONDS / max(pair, 1e-6))))


def evaluations(rounds: int, every: int) -> int:
    """How many evaluations a run of so many rounds has, with the one before its first round.

    >>> evaluations(10, 4)  # after rounds 0, 4, 8 and 10
    4
    """
    return 1 + rounds // every + (rounds % every != 0)
