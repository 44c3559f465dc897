"""Rounds of an experiment with the clock and without, in pairs: where their time goes, and what the clock costs."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from fedlens.benchmark.profile_clock import Clock
from fedlens.benchmark.profile_seams import Watch
from fedlens.benchmark.profile_watching import Watched, timed_exchange, timed_ops
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import Ask, Program, RoundContext, State
from fedlens.core.random import Rng
from fedlens.core.states import ClientStates
from fedlens.experiment import checkpoint
from fedlens.experiment.build import Built
from fedlens.experiment.runner import RunState, hopeless
from fedlens.experiment.state_files import StateFiles

PARTS = (
    "data", "forward", "backward", "optimizer", "rule", "client", "aggregation", "evaluation", "waiting", "other",
)  # fmt: skip
_SECONDS = 20.0  # of rounds, about, unless their number is given
_FEWEST, _MOST = 2, 30  # pairs
_MEASURING = 5.0  # seconds of evaluations from which one pair of them is enough


@dataclass
class Spans:
    """Wall seconds of the same work with the clock and without, pair by pair; and by part, over all with it."""

    timed: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mean_parts(self) -> dict[str, float]:
        """Seconds a time, by part and share of it."""
        return {name: value / len(self.timed) for name, value in self.parts.items()}

    @property
    def overhead(self) -> float:
        """What the clock adds, as a share: the median over the pairs."""
        return median(self._ratios()) - 1

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which half of the pairs lie: how far `overhead` is to be believed."""
        ratios = self._ratios()
        if len(ratios) < 2:
            return ratios[0] - 1, ratios[0] - 1
        first, _, third = quantiles(ratios, n=4, method="inclusive")
        return first - 1, third - 1

    def _ratios(self) -> list[float]:
        return [t / p for t, p in zip(self.timed, self.plain, strict=True)]


@dataclass
class Rounds:
    """What was measured of some rounds.

    Attributes:
        training, evaluation: their spans; the parts of the second are all `evaluation`.
        workers: seconds a round by part, inside of operations that ran in other processes; `processes` is how many.
        tallies: what each round sent and trained on, those without the clock.
        measuring: the same of one evaluation.
        model_bytes, checkpoint_bytes: the files of the model and of a checkpoint, as a run would write them.
        asked: the last ask of a training round, and `states` what its clients had kept.
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


def measure(built: Built, pairs: int | None = None) -> Rounds:
    """Runs rounds of an experiment, half of them with the clock; closes the engine.

    Each pair has one cohort. One pair goes before, uncounted: what is made at the first use is made there. Raises
    `RunFailed` where no client of a round can be trained, as a run does.
    """
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as scratch:
        return _Profiled(built, Path(scratch)).measure(pairs)


class _Profiled:
    def __init__(self, built: Built, scratch: Path) -> None:
        self.built, self.scratch = built, scratch
        self.states = ClientStates(StateFiles(scratch / "states"), built.engine.state_memory * 2**20)
        self.engine = Watched(built.engine)
        self.gate = Driver(self.engine, self.states)
        self.training, self.evaluation = Spans(), Spans()
        self.tallies: list[Tally] = []
        self.number = 0

    def measure(self, pairs: int | None) -> Rounds:
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
        # Who goes first changes from pair to pair: a machine that slows down counts for both.
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

    def _driven(
        self, steps: Any, with_clock: bool, part: str = "aggregation.server step"
    ) -> tuple[Tally, float, Clock | None]:
        """Drives one round or evaluation; what became of a round is the state from then on."""
        self.number += 1
        self.gate.tally = tally = Tally()
        if not with_clock:
            began = time.perf_counter()
            found = self.gate.drive(steps, self.number)
            seconds = time.perf_counter() - began
            clock = None
        else:
            clock = Clock()
            with self._watched(clock):
                began = time.perf_counter()
                with clock.part("other"):
                    found = self.gate.drive(timed_exchange(clock, part, steps), self.number)
                seconds = time.perf_counter() - began
            clock.seconds["other"] += seconds - sum(clock.seconds.values())
        if part != "evaluation":
            self.state = found
        return tally, seconds, clock

    @contextmanager
    def _watched(self, clock: Clock) -> Iterator[None]:
        self.engine.clock = clock
        try:
            with Watch(clock, self.built.algorithm.ops.values()):
                yield
        finally:
            self.engine.clock = None

    def _context(self, round: int) -> RoundContext:
        config = self.built.config
        rng = Rng((config.seeds.selection, "round", round))
        return RoundContext(round, config.rounds, self.built.federation, rng)

    def _sizes(self) -> tuple[int, int]:
        """The bytes of model.safetensors and of a checkpoint: written as a run writes them."""
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
    """How often a run of so many rounds evaluates, the one before the first round among them.

    >>> evaluations(10, 4)  # after rounds 0, 4, 8 and 10
    4
    """
    return 1 + rounds // every + (rounds % every != 0)
