"""Experiments in Python: what the command line does, in three lines.

>>> import tempfile
>>> from pathlib import Path
>>> experiment = Experiment(
...     rounds=2, model="linear", local={"lr": 0.1},
...     data={"dataset": "digits", "partition": {"name": "iid", "clients": 4}})
>>> result = experiment.run(Path(tempfile.mkdtemp()) / "first")
>>> len(result.metrics), result.summary["status"]
(3, 'finished')
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from fedlens.algorithms.registry import SLOTS
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.base.shell_command import quoted_command
from fedlens.base.summary_text import as_call, as_html, as_text
from fedlens.files.atomic_files import read_regular
from fedlens.result import Clients, Metrics, Predictions, Result, like, load_result
from fedlens.run.observer import Observer, observer_of
from fedlens.run.progress import Progress, ProgressBase
from fedlens.settings.config import Config, plain, read_config
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.toml_lines import key_lines

if TYPE_CHECKING:
    from torch import nn

    from fedlens.core.engine_base import EngineBase
    from fedlens.data.arrays import dataset
    from fedlens.data.partition.roster import Roster
    from fedlens.open_run import OpenRun
    from fedlens.run.build import Built
    from fedlens.run.call_observers import Observers
    from fedlens.run.run_state import RunState
    from fedlens.run.rundir import RunDir
    from fedlens.run.runner import CompleteRound
    from fedlens.run.session import Session
    from fedlens.settings.plan import Plan
    from fedlens.settings.typed import ExperimentSettings


Rounds: TypeAlias = "Generator[CompleteRound, None, Result]"
Before: TypeAlias = "Callable[[Built, RunDir], None]"
Connect: TypeAlias = "Callable[[EngineBase], Roster]"


class Experiment:
    """An experiment: the settings of a TOML file, as keyword arguments.

    A table is a dictionary; a component (`model`, `algorithm`, `task`, ...) is a table with a `name`, the name alone,
    or your own function or class. Raises `ConfigError` if a setting is wrong, before anything starts.
    """

    def __init__(self, **settings: Unpack[ExperimentSettings]) -> None:
        self._take(Source(dict(settings)))

    @classmethod
    def load(cls, recipe_or_file: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """Loads a recipe or a TOML file, with overrides such as `"local.lr=0.1"`."""
        made = cls.__new__(cls)
        made._take(read_source(str(recipe_or_file), overrides))
        return made

    def _take(self, source: Source) -> None:
        self._source = source
        self.config: Config = read_config(source.values, source.locate)

    def with_settings(self, *overrides: str) -> Experiment:
        """The same experiment with some settings changed, such as `"seed=1"`."""
        made = type(self).__new__(type(self))
        made._take(override(self._source, overrides))
        return made

    def __repr__(self) -> str:
        return as_text(*self._described())

    def _repr_html_(self) -> str:
        return as_html(*self._described())

    def _described(self) -> tuple[str, list[tuple[str, str]]]:
        """A title, and rows of a name and a value."""
        config = plain(self.config)
        changed = {
            key: value for key, value in config["local"].items() if key in self.config.local.model_fields_set
        }
        tables = {
            "dataset": config["data"]["dataset"],
            **{key: config["data"][key] for key in ("partition", "parties") if key in config["data"]},
            **{key: config[key] for key in ("model", "algorithm", *SLOTS, "engine") if key in config},
            "local": changed,
            **({"task": config["task"]} if config["task"] else {}),
        }
        rows = [(key, as_call(table)) for key, table in tables.items()]
        return f"Experiment '{self.config.name}'", [
            *rows,
            ("rounds", f"{self.config.rounds:,}"),
            ("seed", str(self.config.seed)),
        ]

    def run(
        self,
        out: Path | str | None = None,
        *,
        data_dir: Path | str | None = None,
        download: bool = False,
        progress: Progress | Observer | None = None,
        report: bool = True,
        session: Session | None = None,
        until: int | None = None,
        before: Before | None = None,
        connect: Connect | None = None,
    ) -> Result:
        """Trains, and writes the run directory `out` (default `runs/<name>/<run-id>`).

        It prints nothing; pass an `Observer`, or a `fedlens.run.progress.Progress`, as `progress` to follow the
        run. The setting `observe` names further observers.
        `report=False` skips report.html, which takes a large part of a short run; `fedlens report` writes it later.
        Runs of one process that share a `fedlens.run.session.Session` read their data once. With `until` the
        run pauses after that round, with the status "paused" and without a model file; `resume` continues it.
        All settings are checked first, so an invalid request creates no files. Raises `FedlensError` if a setting or
        the data are invalid, `RunFailed` if the run cannot continue, and `KeyboardInterrupt` (Ctrl-C) after the last
        complete round is saved; `resume(out)` then continues the run. `before` is called with the built experiment and
        its directory, which has no file yet; an error that it raises ends the run. `connect` connects the engine with
        the sites that have the data, and returns their roster (`fedlens serve`).
        """
        return _result(
            self.rounds(
                out,
                data_dir=data_dir,
                download=download,
                progress=progress,
                report=report,
                session=session,
                until=until,
                before=before,
                connect=connect,
            )
        )

    def rounds(
        self,
        out: Path | str | None = None,
        *,
        data_dir: Path | str | None = None,
        download: bool = False,
        progress: Progress | Observer | None = None,
        report: bool = True,
        session: Session | None = None,
        until: int | None = None,
        before: Before | None = None,
        connect: Connect | None = None,
    ) -> Rounds:
        """The run as a loop: yields each round once it is complete, from round 0, the untrained model.

        The run starts with the first round that is asked for, writes the same files as `run`, with the same numbers,
        and takes the same arguments. `round.stop()`, `break` and an exception in the loop pause it; `resume` or
        `resume_rounds` continues. `load_result(round.directory)` is the result.

        >>> import tempfile
        >>> data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
        >>> experiment = Experiment(rounds=9, model="linear", local={"lr": 0.1}, data=data)
        >>> for round in experiment.rounds(Path(tempfile.mkdtemp()) / "mine"):
        ...     if round.metrics["test_accuracy"] > 0.8:
        ...         round.stop()
        >>> load_result(round.directory).summary["status"]
        'paused'
        """
        from fedlens.carry_out import carry_out
        from fedlens.observers.built_in import observers_of, own_observers
        from fedlens.run.build import build, data_directory
        from fedlens.run.run_description import write_settings
        from fedlens.run.rundir import RunDir
        from fedlens.settings.plan import plan

        _check_until(until)
        root = data_directory(None if data_dir is None else Path(data_dir))
        planned = plan(self.config, self._source)
        engine = planned.engine()
        try:
            engine.warm()
            listener = observer_of(progress or ProgressBase())
            roster = None if connect is None else connect(engine)
            built = build(planned, root, download, engine, listener.note, session=session, roster=roster)
            own = own_observers(planned)
            directory = RunDir.create(None if out is None else Path(out), built.config.name, None)
            observers = observers_of(built, directory, own, listener)
            with directory.lock():
                if before is not None:
                    before(built, directory)
                write_settings(directory, built)
                return (
                    yield from carry_out(
                        built, directory, observers, None, root, report, until=until, session=session
                    )
                )
        finally:
            engine.close()

    def open(
        self,
        *,
        data_dir: Path | str | None = None,
        download: bool = False,
        session: Session | None = None,
    ) -> OpenRun:
        """The experiment with its data, clients and engine, to ask clients by hand; writes no files.

        >>> data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
        >>> with Experiment(rounds=9, model="linear", local={"lr": 0.1}, data=data).open() as run:
        ...     replies = run.ask("train", clients=[0, 3])
        >>> [reply.client for reply in replies], sorted(replies[0].payload["update"])
        ([0, 3], ['1.bias', '1.weight'])
        """
        from fedlens.open_run import OpenRun
        from fedlens.run.build import build, data_directory
        from fedlens.settings.plan import plan

        planned = plan(self.config, self._source)
        root = data_directory(None if data_dir is None else Path(data_dir))
        return OpenRun(build(planned, root, download, session=session))


def resume(
    directory: Path | str,
    *,
    data_dir: Path | str | None = None,
    progress: Progress | Observer | None = None,
    report: bool = True,
    model: nn.Module | None = None,
    accept_changes: bool = False,
    session: Session | None = None,
    until: int | None = None,
    connect: Connect | None = None,
) -> Result:
    """Resumes a run that was paused, interrupted or killed, with the same numbers as if it had not been.

    A finished run is returned unchanged. Edited settings in config.toml, edited Python files of your own, and lines of
    metrics.jsonl or clients.jsonl that were edited or are missing, are an error. With `accept_changes` the run
    continues with them, and summary.json and the report list them. To train a run for longer, raise `rounds` in its
    config.toml and accept the change. `report=False` skips report.html; `session` and `until` are those of
    `Experiment.run`, and so is `connect`. A run that is paused at `until` or later is returned unchanged.

    Raises `RunDirectoryError` if `directory` is not a run, is of another version, was edited, or has no intact
    checkpoint left; `DataError` if the data differ from those at the start. If the run's model was passed as an
    object, pass an equal `model`; its weights come from the run.
    """
    return _result(
        resume_rounds(
            directory,
            data_dir=data_dir,
            progress=progress,
            report=report,
            model=model,
            accept_changes=accept_changes,
            session=session,
            until=until,
            connect=connect,
        )
    )


def resume_rounds(
    directory: Path | str,
    *,
    data_dir: Path | str | None = None,
    progress: Progress | Observer | None = None,
    report: bool = True,
    model: nn.Module | None = None,
    accept_changes: bool = False,
    session: Session | None = None,
    until: int | None = None,
    connect: Connect | None = None,
) -> Rounds:
    """The run in `directory` as a loop over the rounds that are left; see `resume` and `Experiment.rounds`."""
    from fedlens.carry_out import carry_out
    from fedlens.observers.built_in import observers_of, own_observers
    from fedlens.run import changes, checkpoint
    from fedlens.run.build import build, data_directory
    from fedlens.run.run_description import is_described
    from fedlens.run.rundir import RunDir

    _check_until(until)
    run = RunDir.open(Path(directory))
    listener = observer_of(progress or ProgressBase())
    source = settings_of(run, model)
    config = read_config(source.values, source.locate)
    with run.lock():
        summary = run.read_summary()
        if (day := (summary or {}).get("purged")) is not None:
            what, hint = f"the run was purged on {day}, so it has no checkpoint", "start a new run"
            if (site := (summary or {}).get("withdrawn")) is not None:
                what = f"{site} was withdrawn from the run on {day}, so it cannot be resumed"
                hint = f"'fedlens serve' with --without {site} begins a run without it"
            raise RunDirectoryError(what, where=str(run.path), hint=hint)
        if (other := (summary or {}).get("superseded")) is not None:
            what = "the run goes on elsewhere, without a site"
            raise RunDirectoryError(what, where=str(run.path), hint=f"resume the run in {other}")
        round, about = checkpoint.peek(run.checkpoint_path) or (0, {})

        checked_plan = partial(_plan_to_resume, run, config, source, round, about, accept_changes)
        done = summary is not None and summary.get("status") == "finished"
        # A finished run need not find a user's own file any more: its settings are compared as they are written.
        planned = None if done else checked_plan()
        filled = config if planned is None else planned.config
        edited = changes.check_settings(run, round, about, filled, source, accept_changes, finished=done)
        if done and not edited:
            listener.note(f"the run {run.path} is already finished")
            return Result(run.path)
        if until is not None and not edited and _paused_at(summary) >= until:
            return Result(run.path)
        environment = run.read_environment() or {}
        root = data_directory(Path(data_dir or environment.get("data_dir", "") or data_directory(None)))
        planned = planned or checked_plan()
        engine = planned.engine()
        try:
            engine.warm()
            described = is_described(run)
            initial = run.initial_path if described else None
            roster = None if connect is None else connect(engine)
            built = build(planned, root, False, engine, listener.note, initial, session, roster)
            observers = observers_of(built, run, own_observers(planned), listener)
            run_state, edited = _restored(run, built, planned, source, accept_changes, observers, described)
            start = None if described else root
            return (
                yield from carry_out(
                    built, run, observers, run_state, start, report, edited, until=until, session=session
                )
            )
        finally:
            engine.close()


def _plan_to_resume(
    run: RunDir, config: Config, source: Source, round: int, about: Mapping[str, Any], accept_changes: bool
) -> Plan:
    """The plan of a run that goes on after `round`, on the device that its checkpoint `about` names."""
    from fedlens.run.changes import device_of
    from fedlens.settings.own_files import OWN_FILES, refuse_edited_since
    from fedlens.settings.plan import plan

    if about:  # compared before it is executed; a run without a checkpoint starts again
        command = quoted_command("resume", run.path, accept_changes=True)
        refuse_edited_since(f"round {round}", about.get(OWN_FILES), source.values, accept_changes, command)
    planned, device = plan(config, source), device_of(about)
    if planned.config.engine.get("device") != "auto" or device is None:
        return planned
    kept = {**config.engine, "device": device}  # whatever the machine has now
    return plan(config.model_copy(update={"engine": kept}), source)


def _restored(
    run: RunDir,
    built: Built,
    planned: Plan,
    source: Source,
    accept_changes: bool,
    observers: Observers,
    described: bool,
) -> tuple[RunState | None, list[dict[str, Any]]]:
    """The state of the last checkpoint and the accepted changes; the files of the run end with its round then."""
    from fedlens.run.environment import changed_bits, machine
    from fedlens.run.restore import restored
    from fedlens.run.run_description import check_same_data
    from fedlens.settings.own_files import OWN_FILES, own_files

    environment = run.read_environment() or {}
    if described:
        check_same_data(run, built, environment)
    run_state, edited = restored(run, built, planned, source, accept_changes, observers)
    own = own_files(plain(planned.config))
    if described and environment.get(OWN_FILES) != own:
        run.add_to_environment(**{OWN_FILES: own})
    observers.rewind(run_state)
    run.summary_path.unlink(missing_ok=True)  # it describes an end that no longer holds
    if run_state is not None:
        differs = changed_bits(environment, machine(), str(built.config.engine.get("device", "")))
        if differs is not None:
            observers.note(differs)
        observers.note(f"resuming after round {run_state.round} of {built.config.rounds}")
    return run_state, edited


def settings_of(run: RunDir, model: nn.Module | None) -> Source:
    """The settings in config.toml; `model` stands for one that was passed as an object."""
    values = run.read_config()
    if model is not None:
        values = {**values, "model": {**values["model"], "name": like(model, run)}}
    return Source(values, run.config_path, key_lines(read_regular(run.config_path).decode()))


def _result(rounds: Rounds) -> Result:
    """The result of a run whose rounds nobody looks at."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            result: Result = end.value
            return result


def _check_until(until: int | None) -> None:
    if until is not None and until < 0:
        raise ConfigError(f"the run cannot pause after round {until} (must be at least 0)", where="until")


def _paused_at(summary: Mapping[str, Any] | None) -> int:
    """The round that a run is paused at, -1 if it is not paused."""
    return int(summary["rounds_done"]) if summary and summary.get("status") == "paused" else -1


__all__ = [
    "Clients",
    "Config",
    "Experiment",
    "Metrics",
    "Observer",
    "Predictions",
    "Result",
    "dataset",
    "load_result",
    "resume",
    "resume_rounds",
]


def __getattr__(name: str) -> Any:
    if name == "dataset":  # its imports are not needed to start the command line
        from fedlens.data.arrays import dataset

        return dataset
    raise AttributeError(f"module 'fedlens.api' has no attribute '{name}'")
