"""The round loop: train, evaluate, record, save."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.driver import Driven, Driver, Tally
from fedlens.core.errors import FedlensError, HookError, RunFailed
from fedlens.core.input_checks import FIRST_VISITS, Inputs
from fedlens.core.norm_bounds import NormBounds
from fedlens.core.protocol import ClientId, ModelSpec, RoundContext, State
from fedlens.core.random import Rng
from fedlens.core.schema import nbytes, not_finite
from fedlens.core.signatures import place_of
from fedlens.core.states import ClientStates, Mark
from fedlens.core.traffic import Traffic
from fedlens.core.tree import HEAVY, Tree, all_finite
from fedlens.core.types import client_name, is_client
from fedlens.core.work import Phase, Work
from fedlens.experiment import checkpoint
from fedlens.experiment.build import Built
from fedlens.experiment.changes import Change, defining
from fedlens.experiment.client_summary import client_summary
from fedlens.experiment.config import plain
from fedlens.experiment.divergence import (
    Extremes,
    diverged,
    divergence_of,
    hopeless,
    refuse_collapsed,
    rejected_by_bound,
    text_of,
)
from fedlens.experiment.evaluation_collector import EvaluationCollector, knn_metrics, write_evaluation
from fedlens.experiment.example_predictions import remove_examples
from fedlens.experiment.final_evaluation import remove_images
from fedlens.experiment.held_out_predictions import remove_held_out_images
from fedlens.experiment.line_digest import LineDigest
from fedlens.experiment.not_finite import NotFiniteReplies
from fedlens.experiment.own_files import OWN_FILES, own_files
from fedlens.experiment.predict_examples import write_examples
from fedlens.experiment.progress import BareProgress, Progress
from fedlens.experiment.recording import Recorder
from fedlens.experiment.run_state import RunState, replace_tensors
from fedlens.experiment.rundir import RunDir
from fedlens.experiment.state_files import StateFiles
from fedlens.experiment.write_held_out import write_held_out

_HEAVY = 2**28  # bytes of a server state: larger best states are kept on disk, not in memory


@dataclass
class _Trained:
    """A trained round whose evaluation may still be running."""

    round: int
    state: State
    tally: Tally
    seconds: float
    work: Work  # the evaluation
    norms: dict[str, Any] = field(default_factory=dict)  # of all replies so far
    clients: Mark | None = None  # the client states after the round, if another round has begun since
    measuring: Tally = field(default_factory=Tally)
    evaluation: Driven | None = None
    collector: EvaluationCollector | None = None  # of the last round


class Runner:
    """Runs one experiment into one run directory, from the start or from a checkpoint."""

    def __init__(
        self,
        built: Built,
        directory: RunDir,
        progress: Progress,
        run_state: RunState | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        self.built, self.directory, self.progress = built, directory, BareProgress.wrap(progress)
        self.run_state, self.changes = run_state, changes
        # Checked when the run is resumed: what was edited, and what is missing.
        self._settings, self._own_files = defining(built.config), own_files(plain(built.config))
        self._digests = {path.name: LineDigest.of(path) for path in directory.appended}
        # By client and reason. Unlike those of `run_state`, they include a round that failed.
        self.failures = {} if run_state is None else run_state.failures
        self._divergence = divergence_of(built, None if run_state is None else run_state.divergence)
        self._elapsed = 0.0 if run_state is None else self._elapsed_before()
        self._cpu_before = 0.0 if run_state is None else run_state.cpu_seconds
        self._ahead: _Trained | None = None  # the last round, until it is recorded
        self._best: RunState | None = None  # the best round, until it is saved
        self._saved_at = time.monotonic()
        self._saved_round = -1 if run_state is None else run_state.round
        self._files = StateFiles(directory.states_path)
        self._states = ClientStates(self._files, built.engine.state_memory * 2**20)
        self._recorder = Recorder(built, directory)

    def run(self, until: int | None = None) -> None:
        """Runs to round `until`, by default the last; saves it, or the last complete one if the run ends early."""
        config, engine, states = self.built.config, self.built.engine, self._states
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        last = config.rounds if until is None else min(until, config.rounds)
        try:
            engine.listen(self._note_engine)
            if self.run_state is not None:
                engine.resume(self.run_state.round, config.rounds)
                _fix_again(*self.built.algorithm.model(self.run_state.state))
            engine.open(self.built.program, states)
            driver = Driver(engine, states)
            if self.run_state is not None:
                driver.norms = NormBounds.of(self.run_state.norms)
            self._sweep()
            if not config.keeps_images:
                remove_images(self.directory.evaluation_path)
                remove_examples(self.directory.examples_path)
                remove_held_out_images(self.directory.held_out_path)
            if self.run_state is None:
                # Not in a variable of this function, which would keep the first state in memory for the whole run.
                init = self.built.algorithm.init
                self._measured(
                    0, self._placed(init(self.built.model, self.built.federation)), driver, Tally(), 0.0
                )
            else:
                states.restore(self.run_state.clients.saved())
                self.run_state.state = self._placed(self.run_state.state)
            for round in range(self._reached.round + 1, last + 1):
                self._round(round, driver)
            self._record(driver)  # a pause does not wait for the next round
        finally:
            try:
                if self.run_state is not None:
                    self._save()
            finally:
                engine.close()

    def _note_engine(self, line: str | None, choice: Mapping[str, Any]) -> None:
        """Writes the engine's choice to environment.json and reports it."""
        environment = self.directory.read_environment()
        if environment is not None:
            self.directory.write_environment({**environment, "engine": dict(choice)})
        if line is not None:
            self.progress.note(line)

    def _placed(self, state: State) -> State:
        """The state with its model where the engine sends it from, so that the model is not in memory twice."""
        state = self.built.on_device(state)
        if nbytes(state) < HEAVY:
            return state
        spec, tree = self.built.algorithm.model(state)
        model = spec.sent(tree)
        placed = self.built.engine.place(model)
        moved = {id(model[name]): placed[name] for name in model if placed[name] is not model[name]}
        return replace_tensors(state, moved) if moved else state

    @property
    def done(self) -> int:
        """The last round that is recorded."""
        return self._reached.round

    @property
    def _reached(self) -> RunState:
        assert self.run_state is not None
        return self.run_state

    @property
    def _state(self) -> State:
        """The server state that the next round begins with."""
        return self._ahead.state if self._ahead else self._reached.state

    def _round(self, round: int, driver: Driver) -> None:
        driver.tally = tally = Tally()
        driver.work = self._work("training", round)
        began = time.perf_counter()
        try:
            steps = self.built.algorithm.round(self._state, self._context(round))
            steps = self._recorder.recorded(steps, self._state, round)
            state = self._placed(self._driven(steps, driver, round))
            _refuse_no_mapping(state, "round", "the new state: a mapping of names to trees and values")
        except RunFailed:
            with suppress(FedlensError):  # report the error that ended the round
                self._record(driver)
            raise
        seconds = time.perf_counter() - began
        self._record(driver)
        if tally.unbounded and tally.clients == 0:
            state = self._state  # whatever the algorithm makes of no replies
        if tally.failed_round or not math.isfinite(tally.sums.get("loss", 0.0)):
            self.failures = self._with(tally)
            reasons = [reason for counts in tally.failures.values() for reason in counts]
            if not math.isfinite(tally.sums.get("loss", 0.0)) or any(map(not_finite, reasons)):
                self._watch({"round": round, "local_loss": math.nan}, tally)
            raise hopeless(round, tally, self.built.config.local.lr)
        self._measured(round, state, driver, tally, seconds)
        if time.monotonic() - self._saved_at >= self.built.config.checkpoint.seconds:
            self._save()

    def _driven(self, steps: Any, driver: Driver, round: int) -> State:
        """The new state. In the first rounds, raises `HookError` if the algorithm changes the state in place."""
        inputs = Inputs({"state": self._state}, contents=True) if round <= FIRST_VISITS else None
        state: State = driver.drive(steps, round)
        if inputs is not None:
            algorithm = self.built.algorithm
            inputs.refuse(f"`round` of {type(algorithm).__name__}", place_of(algorithm.round))
        return state

    def _measured(self, round: int, state: State, driver: Driver, tally: Tally, seconds: float) -> None:
        """Evaluates if it is time to, records the round, and makes it the last complete round.

        An evaluation that may run beside the next round is only started here, and the rest follows after that round.
        """
        config = self.built.config
        work = self._work("evaluating", round)
        trained = _Trained(round, state, tally, seconds, work, driver.norms.payload())
        self._ahead = trained
        if round % config.evaluation.every == 0 or round == config.rounds:
            driver.tally, driver.work = trained.measuring, trained.work
            steps = self.built.algorithm.evaluate(state, self._context(round))
            if round == config.rounds and isinstance(steps, Generator):
                trained.collector = EvaluationCollector(self.built.algorithm.ops)
                steps = trained.collector.collect(steps)
            # An engine that starts workers in the middle of a run takes asks ahead from then on.
            beside = (
                config.evaluation.overlap
                and self.built.engine.ahead
                and self.built.algorithm.evaluation_asks == 1
            )
            beside = beside and 0 < round < config.rounds  # the last round has no next round
            trained.evaluation = driver.begin(steps, round, ahead=beside)
            if beside:
                trained.clients = self._states.mark()
                return
        self._record(driver)

    def _record(self, driver: Driver) -> None:
        """Records the round that was trained last, if it is not recorded yet."""
        if self._ahead is None:
            return
        trained, self._ahead = self._ahead, None
        config, tally, round = self.built.config, trained.tally, trained.round
        measured: dict[str, float] = {}
        replies = NotFiniteReplies.of(tally, self._name)  # before failures of the evaluation are added
        if trained.evaluation is not None:
            driver.tally, driver.work = trained.measuring, trained.work
            measured = trained.evaluation.finish()
            _refuse_no_mapping(measured, "evaluate", "a mapping of names to numbers")
            measured = {**knn_metrics(self.built, trained.state), **measured}
            tally.and_measuring(trained.measuring)
        line = self._line(round, measured, tally, trained.seconds)
        warned = self._watch(line, tally, replies)
        if round and any(not math.isfinite(value) for name, value in measured.items() if "loss" in name):
            self._refuse_broken(trained)
        notes: list[str] = []
        if trained.collector is not None:
            write_evaluation(self.built, self.directory, round, trained.collector)
            notes = write_held_out(self.built, self.directory, round, trained.collector.confidences)
        if round == 0 and any(name.startswith("test_") for name in measured):
            notes += write_examples(self.built, self.directory, {"first": (0, trained.state)})
        for sentence in notes:
            self.progress.note(sentence)
        rows = self._client_lines(round, tally) if config.record.clients else []
        at_clients = self._measured_lines(round, trained.measuring)
        score = self.built.task.score
        latest = (client_summary(at_clients, score) if score else None) or (
            self.run_state.measured if self.run_state else None
        )
        if round == 0:
            self._note_missing_score(line)
        best, self.failures = self._better(line), self._with(tally)
        # From here on the round is complete: a run that is stopped below writes its lines when it is resumed.
        clients = trained.clients or self._states.mark()
        rows += at_clients
        traffic = Traffic.of(self.run_state.traffic if self.run_state else {}).add(tally.traffic)
        self.run_state = RunState(
            round,
            trained.state,
            clients,
            line,
            rows,
            best,
            self.failures,
            latest,
            digests={name: digest.saved() for name, digest in self._digests.items()},
            norms=trained.norms,
            divergence=self._divergence.state,
            traffic=traffic.to_payload(),
            cpu_seconds=round_to(self._cpu_before + time.process_time() - self._cpu_began),
        )
        if best and best["round"] == round:
            self._best = self.run_state
        elif self._best is not None and nbytes(self._best.state) >= _HEAVY:
            self._save_best(self._best)
            checkpoint.prune(self.directory.checkpoint_path, keep=2, best=self._best.round)
            self._best = None
        self._keep_marks()
        self._digests[self.directory.metrics_path.name].add(self.directory.append_metrics(line))
        if rows:
            self._digests[self.directory.clients_path.name].add(self.directory.append_clients(rows))
        self.progress.round_done(line)
        if round < config.rounds:
            refuse_collapsed(warned)
            self._divergence.refuse()

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What is wrong with the results so far; see `fedlens.experiment.divergence`."""
        return self._divergence.warnings

    def _watch(
        self, line: Mapping[str, Any], tally: Tally, replies: NotFiniteReplies | None = None
    ) -> list[dict[str, Any]]:
        """Reports what a round shows of divergence, and returns the new warnings."""
        rejected = rejected_by_bound(line["round"], tally, self._name)
        warned = self._divergence.after(line, Extremes.of(tally, self._name), rejected, replies)
        for warning in warned:
            self.progress.problem(text_of(warning))
        return warned

    def _refuse_broken(self, trained: _Trained) -> None:
        """Raises `RunFailed` if the model itself is not finite, from which no round can go on."""
        _, model = self.built.algorithm.model(trained.state)
        if not all_finite(list(model.values())):
            self.failures = self._with(trained.tally)
            raise diverged(trained.round, self.built.config.local.lr)

    def _context(self, round: int) -> RoundContext:
        rng = Rng((self.built.config.seeds.selection, "round", round))
        return RoundContext(round, self.built.config.rounds, self.built.federation, rng)

    def _work(self, phase: Phase, round: int) -> Work:
        config, engine, sizes = self.built.config, self.built.engine, self.built.federation.sizes
        evaluations = config.rounds // config.evaluation.every

        def weigh(clients: Sequence[ClientId]) -> list[float]:
            return [float(sizes[client]) if is_client(client) else 1.0 for client in clients]

        # Epochs take as many steps as a client has batches.
        equal = phase == "training" and (config.local.steps or config.local.examples)
        return Work(
            phase,
            round,
            config.rounds,
            evaluations,
            None if equal else weigh,
            lambda: engine.local_steps,
            self.progress.working,
        )

    def _line(
        self, round: int, measured: Mapping[str, float], tally: Tally, seconds: float
    ) -> dict[str, Any]:
        examples = tally.sums.get("examples", 0.0)
        extra = {
            name: value for name, value in tally.sums.items() if name not in ("loss", "examples", "batches")
        }
        return {
            **extra,  # numbers of the operation, such as the clients whose solver did not converge
            "round": round,
            **measured,
            "local_loss": tally.sums["loss"] / examples if examples and "loss" in tally.sums else None,
            "clients": tally.clients,
            "failed": tally.failed,
            "examples": int(examples),
            "batches_max": tally.batches_max,
            "bytes_up": tally.bytes_up,
            "bytes_down": tally.bytes_down,
            "seconds": round_to(seconds),
            "elapsed": round_to(self._elapsed + time.monotonic() - self._began),
        }

    def _client_lines(self, round: int, tally: Tally) -> list[dict[str, Any]]:
        rows = []
        for row in tally.per_client:
            examples = row.get("examples", 0)
            loss = {"loss": row["loss"] / examples} if examples and "loss" in row else {}
            rows.append({"round": round, **row, **loss, "client": self._name(row["client"])})
        for client, reasons in tally.failures.items():
            rows += [
                {"round": round, "client": self._name(client), "failure": r, "times": n}
                for r, n in reasons.items()
            ]
        return rows

    def _measured_lines(self, round: int, measuring: Tally) -> list[dict[str, Any]]:
        """The values of each client that an evaluation measured; empty without a per-client evaluation."""
        rows = []
        for row in measuring.per_client:
            values = {name: value for name, value in row.items() if name.startswith("validation_")}
            rows += [{"round": round, "client": self._name(row["client"]), **values}] if values else []
        return rows

    def _name(self, client: ClientId) -> str:
        return client_name(client, self.built.partition.ids)

    def _with(self, tally: Tally) -> dict[str, Counter[str]]:
        """The failures by client and reason, this round's included."""
        before = self.run_state.failures if self.run_state else {}
        failures = {client: Counter(reasons) for client, reasons in before.items()}
        for client, reasons in tally.failures.items():
            failures.setdefault(self._name(client), Counter()).update(reasons)
        return failures

    def _note_missing_score(self, line: Mapping[str, Any]) -> None:
        """Notes that no best round can be chosen, if the evaluation has metrics and the score is not among them."""
        score, split = self.built.task.score, self._split
        found = [name.removeprefix(f"{split}_") for name in line if name.startswith(f"{split}_")]
        if score is not None and found and score not in found:
            self.progress.note(
                f"no best round is chosen: task.score is '{score}', and the evaluation gives {', '.join(found)}"
            )

    @property
    def _split(self) -> str:
        """The data that the best round is chosen on."""
        return "validation" if "@validation" in self.built.federation.held else "test"

    def _better(self, line: Mapping[str, Any]) -> dict[str, Any] | None:
        """The best round so far, by the validation score if there is validation data, else by the test score."""
        best = self.run_state.best if self.run_state else None
        on = self._split
        if self.built.task.score is None:
            return best
        metric = f"{on}_{self.built.task.score}"
        if not math.isfinite(line.get(metric, math.nan)) or (best and line[metric] <= best["value"]):
            return best
        test = line.get(f"test_{self.built.task.score}")
        at_test = {} if on == "test" or test is None else {"test_value": test}
        return {"round": line["round"], "metric": metric, "value": line[metric], "chosen_on": on, **at_test}

    def _save(self) -> None:
        """Saves the last round, and the best one if it is not saved yet."""
        path, run_state = self.directory.checkpoint_path, self._reached
        if run_state.round != self._saved_round:
            self.directory.sync()
            best = self._best
            if best is not None and best.round < run_state.round:
                self._save_best(best)
            self._save_one(run_state)
        elif run_state.round < self.built.config.rounds:
            return  # nothing new, and the existing checkpoint may be the only complete one
        checkpoint.prune(path, keep=2, best=run_state.best["round"] if run_state.best else None)
        self._saved_round, self._saved_at, self._best = run_state.round, time.monotonic(), None
        self._keep_marks()
        self._sweep()

    def _save_best(self, best: RunState) -> None:
        """Saves the best round, which is not the last, if it is not saved yet."""
        if self._saved_round < best.round:
            self.directory.sync()
            self._save_one(best)

    def _save_one(self, run_state: RunState) -> None:
        payload = run_state.payload()
        keys = set(payload["client_files"].values())
        self._files.sync(keys)
        self._files.saving(keys)
        about = {
            "settings": self._settings,
            "changes": list(self.changes),
            "lines": dict(run_state.digests),
            OWN_FILES: self._own_files,
        }
        checkpoint.save(self.directory.checkpoint_path, run_state.round, payload, keys, about)

    def _keep_marks(self) -> None:
        """Releases the client states of rounds that will not be saved."""
        rounds = (self.run_state, self._best, self._ahead)
        self._states.keep(*(r.clients for r in rounds if r is not None and isinstance(r.clients, Mark)))

    def _sweep(self) -> None:
        """Removes state files that neither a checkpoint nor a client refers to, such as those of a killed run."""
        with suppress(OSError):  # a checkpoint that cannot be read at the moment: try again at the next save
            spilled = self._files.directory.exists()
            saved = checkpoint.states_of_all(self.directory.checkpoint_path) if spilled else set()
            self._files.sweep(saved, self._states.keys)

    def _elapsed_before(self) -> float:
        lines = self.directory.read_metrics()
        return float(lines[-1]["elapsed"]) if lines else 0.0


def _fix_again(model: ModelSpec, tree: Tree) -> None:
    """Takes the leaves that never change from a checkpoint: a file of weights may be another one by now."""
    for name in model.fixed:
        model.fixed[name] = tree[name]


def _refuse_no_mapping(value: Any, method: str, expected: str) -> None:
    if not isinstance(value, Mapping):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise HookError(f"`{method}` of the algorithm returned {kind}", hint=f"return {expected}")


def round_to(seconds: float) -> float:
    """Seconds, rounded to microseconds."""
    return float(f"{seconds:.6f}")
