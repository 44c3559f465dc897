"""Opens a run for analyses: its recordings, and its data and task to evaluate models on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedlens.analyses.model_evaluation import ModelEvaluator, evaluator_of
from fedlens.api import settings_of
from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import many
from fedlens.base.shell_command import quoted_command
from fedlens.observers.read_recordings import RecordedRound
from fedlens.results.run import Run
from fedlens.run.build import Built, build, data_directory
from fedlens.run.run_description import check_same_data
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since
from fedlens.settings.plan import plan_of
from fedlens.settings.recording_check import no_clients, no_local_models
from fedlens.use.device_here import engine_here

if TYPE_CHECKING:
    from torch import nn

On: TypeAlias = Literal["test", "validation"]


@dataclass(frozen=True)
class OpenedRun:
    """A run that is analyzed.

    Attributes:
        directory: its files.
        built: the experiment, with its data, task and model.
        recorded: the recorded rounds that are analyzed, in order.
        on: the data that models are evaluated on.
        accept_changes: execute Python files of your own although they were edited since the run trained.
        say: is told what takes long.
    """

    directory: Run
    built: Built
    recorded: tuple[RecordedRound, ...]
    on: On = "test"
    say: Callable[[str], None] = lambda sentence: None

    @cached_property
    def evaluator(self) -> ModelEvaluator:
        """Evaluates models as the run does. Raises `ConfigError` if the run has no such data."""
        return evaluator_of(self.built, self.on)

    @cached_property
    def evaluation_seconds(self) -> float:
        """The seconds of one evaluation, measured once. Raises `RunDirectoryError` if no model is recorded."""
        model = self.with_models[0].before()
        self.evaluator.metrics(model)  # the first call also builds the module and reads the data
        began = time.perf_counter()
        self.evaluator.metrics(model)
        return time.perf_counter() - began

    def announce(self, evaluations: int) -> None:
        """Says how long so many evaluations take, if that is more than half a minute."""
        if (seconds := evaluations * self.evaluation_seconds) > 30:
            each = f"{self.evaluation_seconds:.2g} s each on one core"
            self.say(f"{evaluations:,} evaluations, {each}: about {many(math.ceil(seconds / 60), 'minute')}")

    @property
    def metric(self) -> str:
        """The metric that analyses show: the score of the task, or the loss if it has none."""
        return self.built.task.score or "loss"

    @property
    def with_models(self) -> list[RecordedRound]:
        """The rounds with local models. Raises `RunDirectoryError` if no round has any."""
        found = [each for each in self.recorded if each.local_models and each.trained]
        if not found:
            raise self.missing("local models", "record.local_models")
        return found

    def missing(self, what: str, setting: str) -> RunDirectoryError:
        """The error for recordings that the run does not have."""
        built = self.built
        if built.algorithm.pools_data:
            return RunDirectoryError(
                no_clients(built.config),
                where=str(self.directory.path),
                hint="analyze a run of another algorithm",
            )
        if setting == "record.local_models" and built.algorithm.training_op is None:
            return RunDirectoryError(
                no_local_models(built.config, built.algorithm, built.task, built.model.leaves),
                where=str(self.directory.path),
                hint="analyze 'drift', which needs only what clients send, or a run of another algorithm",
            )
        done = self.directory.rounds_done or 1
        again = quoted_command("analyze", self.directory.path, record=sorted({1, done}))
        analyzed = ", ".join(f"{each.round}" for each in self.recorded)
        here = f" in the rounds that are analyzed ({analyzed})" if analyzed else ""
        return RunDirectoryError(
            f"the run has no recordings of {what}{here}",
            where=str(self.directory.path),
            hint=f"{again} records them; in new runs set {setting} = {{ every = 5 }}",
        )


def open_run(
    directory: Path | str,
    *,
    rounds: Sequence[int] | None = None,
    on: On = "test",
    data_dir: Path | str | None = None,
    model: nn.Module | None = None,
    accept_changes: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    device: str | None = None,
) -> OpenedRun:
    """Opens a run directory with its data.

    Args:
        rounds: the recorded rounds to analyze; all by default.
        data_dir: the data directory; by default that of the run.
        model: an object equal to the run's model, if the run was given one.
        say: is told what takes long.
        device: "auto", "cpu", "cuda" or "cuda:1"; by default the kind of device that the run trained on, if this
            machine has it.

    Raises `RunDirectoryError` if this is no run directory or one of the rounds is not recorded, and `DataError` or
    `ConfigError` if the data or a user's own code have changed or are missing.
    """
    run = Run.open(Path(directory))
    recorded = run.recordings
    for round in rounds or ():
        if round not in recorded:
            listed = ", ".join(map(str, recorded)) or "none"
            again, done = quoted_command("analyze", run.path, record=round), run.rounds_done
            raise RunDirectoryError(
                f"round {round} of the run is not recorded; recorded are: {listed}",
                where=str(run.path),
                hint=f"{again} repeats the run to this round and records it"
                if round <= done
                else f"the run has {many(done, 'round')} so far",
            )
    source = settings_of(run, model)
    own = run.environment.get(OWN_FILES)
    for note in refuse_edited_since("the run trained", own, source.values, accept_changes):
        say(note)
    engine, said = engine_here(source.values["engine"], device)
    for sentence in said:
        say(sentence)
    source = replace(source, values={**source.values, "engine": engine})
    planned = plan_of(source)
    root = data_directory(Path(data_dir or run.environment.get("data_dir", "") or data_directory(None)))
    initial = run.initial_path if run.partition_path.exists() else None
    built = build(planned, root, False, initial=initial)
    if initial is not None:
        check_same_data(run, built, run.environment)
    if built.algorithm.grows:
        raise RunDirectoryError(
            f"'{planned.config.algorithm['name']}' changes the shapes of the model, and analyses compare models of the "
            "same shapes",
            where=str(run.path),
            hint="analyze a run of another algorithm",
        )
    chosen = tuple(recorded[round] for round in sorted(rounds)) if rounds else tuple(recorded.values())
    return OpenedRun(run, built, chosen, on, say)
