"""The round loop: train, evaluate, tell the observers, save."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, FedlensError, RoundRefused, RunFailed
from fedlens.core.driver import Driven, Driver, Tally
from fedlens.core.norm_bounds import NormBounds
from fedlens.core.protocol import State
from fedlens.core.states import Mark
from fedlens.core.step_counts import Work
from fedlens.core.traffic import Traffic
from fedlens.core.types import client_name
from fedlens.run.build import Built
from fedlens.run.call_observers import Observers
from fedlens.run.changes import Change
from fedlens.run.journal_file import JournalFile
from fedlens.run.private_rounds import PrivateRounds
from fedlens.run.round_context import new_state, own_metrics, refuse_no_mapping, round_context, round_work
from fedlens.run.round_outcome import SkippedRounds, better, in_microseconds, missing_score, round_metrics
from fedlens.run.run_saver import RunSaver
from fedlens.run.run_state import RunState, fix_again, placed
from fedlens.run.rundir import RunDir


@dataclass
class _Trained:
    """A trained round whose evaluation may still be running."""

    round: int
    state: State
    tally: Tally
    seconds: float
    work: Work  # the evaluation
    norms: dict[str, Any]  # of all replies so far
    skipped: str | None  # why, if it was
    clients: Mark | None = None  # the client states after the round, if another round has begun since
    measuring: Tally = field(default_factory=Tally)
    evaluation: Driven | None = None


class Runner:
    """Runs one experiment into one run directory, from the start or from a checkpoint.

    The order of a round, and when an observer is told of it, is that of `fedlens.run.observer.Observer`.
    """

    def __init__(
        self,
        built: Built,
        directory: RunDir,
        observers: Observers,
        run_state: RunState | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        self.built, self.directory, self.observers = built, directory, observers
        self.run_state, self.changes = run_state, changes
        # By client and reason. Unlike those of `run_state`, they include a round that failed.
        self.failures = {} if run_state is None else run_state.failures
        # A private run counts the seconds of this process alone.
        self._elapsed = 0.0 if run_state is None else float(run_state.line.get("elapsed", 0.0))
        self._cpu_before = 0.0 if run_state is None else run_state.cpu_seconds
        self._ahead: _Trained | None = None  # the last round, until it is recorded
        self._skips = SkippedRounds(built, 0 if run_state is None else run_state.skipped)
        self._saver = RunSaver(built, directory, observers, changes, run_state)
        self._journal = JournalFile(directory.journal_path)
        self.private = PrivateRounds(built, directory)
        if run_state is not None:
            observers.restore(run_state.parts)

    def run(self, until: int | None = None) -> None:
        """Runs to round `until`, by default the last; see `rounds`."""
        for _ in self.rounds(until):
            pass

    def rounds(self, until: int | None = None) -> Generator[CompleteRound, None, None]:
        """Yields each round up to `until` once it is complete; saves the last complete one, however the loop ends."""
        config, engine, states = self.built.config, self.built.engine, self._saver.states
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self.last = config.rounds if until is None else min(until, config.rounds)
        try:
            engine.listen(self._note_engine)
            if self.run_state is not None:
                engine.resume(self.run_state.round, config.rounds)
                fix_again(*self.built.algorithm.model(self.run_state.state))
            engine.open(self.built.program, states)
            driver = Driver(engine, states, self.observers.answered, self._journal)
            if self.run_state is not None:
                driver.norms = NormBounds.of(self.run_state.norms)
            self._saver.sweep()
            done = None if self.run_state is None else self.run_state.round
            self.observers.began(self.built, done)
            if self.run_state is None:
                # Not in a variable of this function, which would keep the first state in memory for the whole run.
                init = self.built.algorithm.init
                self._measured(
                    0, placed(self.built, init(self.built.model, self.built.federation)), driver, Tally(), 0.0
                )
            else:
                self._saver.restore(self.run_state)
                self.run_state.state = placed(self.built, self.run_state.state)
            trained, yielded = self.done, -1 if done is None else done
            while True:
                if trained >= self.last:
                    self._record(driver)  # a pause does not wait for the next round
                if self.done > yielded:
                    yielded = self.done
                    yield CompleteRound(self, driver)
                if trained >= self.last:
                    break
                trained += 1
                self._round(trained, driver)
            self._record(driver)
        finally:
            try:
                if self.run_state is not None:
                    self.save()
            finally:
                engine.close()

    def _note_engine(self, line: str | None, choice: Mapping[str, Any]) -> None:
        """Writes the engine's choice to environment.json and reports it."""
        self.directory.add_to_environment(engine=dict(choice))
        if line is not None:
            self.observers.note(line)

    @property
    def _cpu_seconds(self) -> float:
        return self._cpu_before + time.process_time() - self._cpu_began

    @property
    def done(self) -> int:
        """The last round that is recorded."""
        return self.reached.round

    @property
    def reached(self) -> RunState:
        """The state after the last round that is recorded."""
        assert self.run_state is not None
        return self.run_state

    @property
    def _state(self) -> State:
        """The server state that the next round begins with."""
        return self._ahead.state if self._ahead else self.reached.state

    def _round(self, round: int, driver: Driver) -> None:
        driver.tally = tally = Tally()
        driver.work = round_work(self.built, "training", round, self.observers.working)
        began = time.perf_counter()
        try:
            tally.available = self.built.engine.online()
            context = round_context(self.built, round, self._journal, tally.available)
            steps = self.built.algorithm.round(self._state, context)
            steps = self.observers.asks(steps, "training", round, self._state)
            state = new_state(self.built, driver, steps, self._state, round)
            for name, value in own_metrics(context, self.built.algorithm.blind).items():
                tally.sums[name] += value
            refused = None
        except RunFailed as failed:
            error = self.private.told(round, failed)
            if not isinstance(error, RoundRefused) or self.built.config.max_skipped == 0:
                with suppress(FedlensError):  # report the error that ended the round
                    self._record(driver)
                if error is failed:
                    raise
                raise error from None
            state, refused = self._state, error
        seconds = time.perf_counter() - began
        tally = self.private.kept(round, tally, context.metrics, seconds)
        self._record(driver)
        self._measured(round, state, driver, tally, seconds, refused)
        if self._saver.due or self.built.algorithm.blind:
            self.save()

    def _measured(
        self,
        round: int,
        state: State,
        driver: Driver,
        tally: Tally,
        seconds: float,
        refused: RunFailed | None = None,
    ) -> None:
        """Evaluates if it is time to, records the round, and makes it the last complete round.

        An evaluation that may run beside the next round is only started here, and the rest follows after that round.
        Raises `RunFailed` if the round ends the run; see `SkippedRounds`.
        """
        config = self.built.config
        try:
            skipped = self._skips.take(round, tally, refused)
        except RunFailed:
            self.failures = self._with(tally)
            self.observers.released(round, state, tally)
            self.observers.failed(round, tally)
            raise
        if skipped is not None:
            self._saver.rewind(self.reached)
            self.observers.problem(f"round {round} was skipped: {skipped}")
        if skipped is not None or self._skips.unchanged(tally):
            state = self._state  # whatever the algorithm makes of no replies
        self.observers.released(round, state, tally)
        work = round_work(self.built, "evaluating", round, self.observers.working)
        trained = _Trained(round, state, tally, seconds, work, driver.norms.payload(), skipped)
        self._ahead = trained
        if round % config.evaluation.every == 0 or round == config.rounds:
            driver.tally, driver.work = trained.measuring, trained.work
            steps = self.built.algorithm.evaluate(state, round_context(self.built, round))
            steps = self.observers.asks(steps, "evaluating", round, state)
            # An engine that starts workers in the middle of a run takes asks ahead from then on.
            beside = config.evaluation.overlap and self.built.engine.ahead
            # The last round has no next round.
            beside = beside and 0 < round < config.rounds and self.built.algorithm.evaluation_asks == 1
            trained.evaluation = driver.begin(steps, round, ahead=beside)
            if beside:
                trained.clients = self._saver.states.mark()
                return
        self._record(driver)

    def _record(self, driver: Driver) -> None:
        """Completes the round that was trained last, if it is not complete yet."""
        if self._ahead is None:
            return
        trained, self._ahead = self._ahead, None
        tally, round, observers = trained.tally, trained.round, self.observers
        measured: Mapping[str, float] = {}
        if trained.evaluation is not None:
            driver.tally, driver.work = trained.measuring, trained.work
            measured = trained.evaluation.finish()
            refuse_no_mapping(measured, "evaluate", "a mapping of names to numbers")
            measured = {
                **observers.evaluated(round, trained.state, trained.measuring, measured),
                **measured,
            }
            tally.add_evaluation(trained.measuring)
        elapsed = self._elapsed + time.monotonic() - self._began
        line = self.private.published(
            round_metrics(round, measured, tally, trained.seconds, elapsed, trained.skipped)
        )
        self.failures = self._with(tally)
        observers.round_done(trained.state, tally, line, complete=False)
        if round == 0 and (sentence := missing_score(self.built, line)):
            observers.note(sentence)
        best = better(self.built, self.run_state.best if self.run_state else None, line)
        traffic = Traffic.of(self.run_state.traffic if self.run_state else {}).add(tally.traffic)
        self.run_state = RunState(
            round,
            trained.state,
            trained.clients or self._saver.states.mark(),
            line,
            observers.rows(trained.state, tally, line),
            observers.parts(),
            best,
            self.failures,
            observers.digests(),
            trained.norms,
            traffic.to_payload(),
            0.0 if self.private.hidden else in_microseconds(self._cpu_seconds),
            self._skips.in_a_row,
        )
        # From here on the round is complete: a run that is stopped below writes its lines when it is resumed.
        self._saver.complete(self.run_state)
        observers.append(self.run_state.rows)
        observers.round_done(trained.state, tally, line, complete=True)

    def save(self) -> None:
        """Saves the last complete round."""
        self._saver.save(self.reached, None if self._ahead is None else self._ahead.clients)
        self._journal.saved(self.reached.round)

    def _with(self, tally: Tally) -> dict[str, Counter[str]]:
        """The failures by client and reason, this round's included."""
        before = self.run_state.failures if self.run_state else {}
        failures = {client: Counter(reasons) for client, reasons in before.items()}
        for client, reasons in tally.failures.items():
            failures.setdefault(client_name(client, self.built.partition.ids), Counter()).update(reasons)
        return failures


class _WrittenLine(dict[str, Any]):
    """A line of metrics.jsonl, which cannot be changed; `dict(line)` is a copy that can."""

    def _refuse(self, *changes: Any, **more: Any) -> Any:
        raise ConfigError(
            "the line of this round is written",
            where=f"round {self['round']}",
            hint="keep your numbers in a list, or make them columns: return them from `evaluated` of an observer",
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is no line of the file


class CompleteRound:
    """A round of `fedlens.Experiment.rounds`, complete and recorded. Round 0 is the untrained model.

    Apart from `number` and `metrics`, it can be asked while the loop is at this round, and not later; keep what you
    need.

    Attributes:
        number: the number of the round.
        metrics: its line of metrics.jsonl, which is written already: read-only.
    """

    def __init__(self, runner: Runner, driver: Driver) -> None:
        self._runner, self._driver = runner, driver
        self.number, self.metrics = runner.done, _WrittenLine(runner.reached.line)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._runner.directory.path

    @property
    def state(self) -> State:
        """The server's state after the round, such as `state["model"]`; change a copy of it only."""
        if self._runner.done != self.number:
            raise ConfigError(
                f"round {self.number} is over, and the run is at round {self._runner.done}",
                where=f"round {self.number}",
                hint="keep what you need of a round while the loop is at it, such as `state = round.state`",
            )
        return self._runner.reached.state

    def evaluate(self, state: State | None = None) -> dict[str, float]:
        """Measures the round's model, or that of another `state`, as the settings say; changes nothing of the run.

        With `averaged` weights of your own: `round.evaluate({**round.state, "model": averaged})`.
        """
        built = self._runner.built
        steps = built.algorithm.evaluate(
            self.state if state is None else state, round_context(built, self.number)
        )
        return dict(self._driver.aside(steps, self.number))

    def save(self) -> None:
        """Writes a checkpoint of the round now, whatever `checkpoint.seconds` is."""
        self._runner.save()

    def stop(self) -> None:
        """Pauses the run after this round, as `until` does; `fedlens.resume` continues it."""
        self._runner.last = self.number
