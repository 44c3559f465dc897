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

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.core.errors import ConfigError, FedlensError, told
from fedlens.core.interrupts import watched
from fedlens.core.summary_text import as_call, as_html, as_text
from fedlens.experiment.config import SLOTS, Config, plain, read_config
from fedlens.experiment.config_source import Source, key_lines, override, read_source
from fedlens.experiment.progress import BareProgress, Progress, ProgressBase, Silent
from fedlens.report.format import split_of

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedlens.core.protocol import ModelSpec
    from fedlens.data.arrays import dataset
    from fedlens.experiment.build import Built
    from fedlens.experiment.run_state import RunState
    from fedlens.experiment.rundir import RunDir
    from fedlens.experiment.trained_model import TrainedModel
    from fedlens.models.user_models import Instance


class Experiment:
    """An experiment: the settings of a TOML file, as keyword arguments.

    A table is a dictionary; a component (`model`, `algorithm`, `task`, ...) is a table with a `name`, the name alone,
    or your own function or class. Raises `ConfigError` if a setting is wrong, before anything starts.
    """

    def __init__(self, **settings: Any) -> None:
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
            "partition": config["data"]["partition"],
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
        progress: Progress | None = None,
        report: bool = True,
    ) -> Result:
        """Trains, and writes the run directory `out` (default `runs/<name>/<run-id>`).

        It prints nothing; pass a `fedlens.experiment.progress.ProgressBase` as `progress` to follow the run.
        `report=False` skips report.html, which takes a large part of a short run; `fedlens report` writes it later.
        All settings are checked first, so an invalid request creates no files. Raises `FedlensError` if a setting or
        the data are invalid, `RunFailed` if the run cannot continue, and `KeyboardInterrupt` (Ctrl-C) after the last
        complete round is saved; `resume(out)` then continues the run.
        """
        import tomli_w

        from fedlens.experiment.build import build, data_directory
        from fedlens.experiment.plan import plan
        from fedlens.experiment.rundir import RunDir

        root = data_directory(None if data_dir is None else Path(data_dir))
        planned = plan(self.config, self._source)
        engine = planned.engine()
        try:
            engine.warm()
            listener = BareProgress.wrap(progress or Silent())
            built = build(planned, root, download, engine, listener.note)
            directory = RunDir.create(None if out is None else Path(out), built.config.name, None)
            with directory.lock():
                directory.write_config(tomli_w.dumps(plain(built.config)))
                return _carry_out(built, directory, listener, None, root, report)
        finally:
            engine.close()


def resume(
    directory: Path | str,
    *,
    data_dir: Path | str | None = None,
    progress: Progress | None = None,
    report: bool = True,
    model: nn.Module | None = None,
    accept_changes: bool = False,
) -> Result:
    """Resumes a run that was interrupted or killed, with the same numbers as if it had not been.

    A finished run is returned unchanged. Edited settings in config.toml, and lines missing from metrics.jsonl or
    clients.jsonl, are an error. With `accept_changes` the run continues with them, and summary.json and the report
    list them. To train a run for longer, raise `rounds` in its config.toml and accept the change. `report=False`
    skips report.html.

    Raises `RunDirectoryError` if `directory` is not a run, is of another version, was edited, or has no intact
    checkpoint left; `DataError` if the data differ from those at the start. If the run's model was passed as an
    object, pass an equal `model`; its weights come from the run.
    """
    from fedlens.experiment import changes, checkpoint
    from fedlens.experiment.build import build, data_directory
    from fedlens.experiment.plan import plan
    from fedlens.experiment.restore import restored
    from fedlens.experiment.run_description import check_same_data
    from fedlens.experiment.rundir import RunDir

    run = RunDir.open(Path(directory))
    listener = BareProgress.wrap(progress or Silent())
    values = run.read_config()
    if model is not None:
        values = {**values, "model": {**values["model"], "name": _like(model, run)}}
    source = Source(values, run.config_path, key_lines(run.config_path.read_text(encoding="utf-8")))
    config = read_config(source.values, source.locate)
    with run.lock():
        summary = run.read_summary()
        round, about = checkpoint.peek(run.checkpoint_path) or (0, {})
        done = summary is not None and summary.get("status") == "finished"
        # A finished run need not find a user's own file any more: its settings are compared as they are written.
        planned = None if done else plan(config, source)
        filled = config if planned is None else planned.config
        edited = changes.check_settings(run, round, about, filled, source, accept_changes, finished=done)
        if done and not edited:
            listener.note(f"the run {run.path} is already finished")
            return Result(run.path)
        environment = run.read_environment() or {}
        root = data_directory(Path(data_dir or environment.get("data_dir", "") or data_directory(None)))
        planned = planned or plan(config, source)
        engine = planned.engine()
        try:
            engine.warm()
            described = run.partition_path.exists()  # it is the last that is written before the first round
            initial = run.initial_path if described else None
            built = build(planned, root, False, engine, listener.note, initial)
            if described:
                check_same_data(run, built, environment)
            run_state, edited = restored(run, built, planned, source, accept_changes, listener)
            run.truncate_metrics(run_state.round - 1 if run_state else -1)
            run.truncate_clients(run_state.round - 1 if run_state else -1)
            if run_state is not None:
                run.append_metrics(run_state.line)
                if run_state.rows:
                    run.append_clients(run_state.rows)
                listener.note(f"resuming after round {run_state.round} of {config.rounds}")
            run.summary_path.unlink(missing_ok=True)  # it tells of an end that is none any more
            return _carry_out(built, run, listener, run_state, None if described else root, report, edited)
        finally:
            engine.close()


def _like(model: nn.Module, run: RunDir) -> Instance:
    """The model that a run began with. Raises `ConfigError` if it is not like the one in the run's config.toml."""
    from fedlens.models.user_models import Instance

    if isinstance(model, type):
        raise ConfigError(
            f"`model` is the class {model.__name__}, but must be an object",
            hint=f"pass {model.__name__}(...)",
        )
    return Instance.of(model).matching(run.read_config()["model"], f"{run.config_path}: model")


_NOTES = 5  # sentences on the data that are said aloud


def _carry_out(
    built: Built,
    directory: RunDir,
    progress: ProgressBase,
    run_state: RunState | None,
    root: Path | None,
    report: bool,
    changes: Sequence[dict[str, Any]] = (),
) -> Result:
    """Runs, and writes the end down whatever it is: summary, model, report.

    `root` is where the data are, if the directory still has to be told what is run.
    """
    from fedlens.experiment.results import outline, summarize, write_final
    from fedlens.experiment.run_description import describe
    from fedlens.experiment.runner import Runner

    progress.started(outline(built, directory))
    for sentence in built.notes[:_NOTES]:
        progress.note(sentence)
    if len(built.notes) > _NOTES:
        progress.note(f"and {len(built.notes) - _NOTES} more such notes, in summary.json")
    runner = Runner(built, directory, progress, run_state, changes)
    status, error = "failed", None
    try:
        if root is not None:
            describe(directory, built, root)
        with watched():
            runner.run()
        for sentence in write_final(built, directory, runner.run_state):
            progress.note(sentence)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except FedlensError as failure:
        error = str(failure)
        raise
    except BaseException as failure:
        error = told(failure)
        raise
    finally:
        summary = summarize(built, directory, runner, status, error)
        try:
            directory.write_summary(summary)
        except FedlensError as failure:
            if status == "finished":
                raise
            progress.note(str(failure))  # what went wrong first says more
        problem = _report(directory.path, progress) if report else _remove_page(directory, progress)
        if problem:
            summary["notes"].append(problem)
            with suppress(FedlensError):  # the disk is full, say, and the summary without it is there
                directory.write_summary(summary)
        progress.finished(summary)
    assert runner.run_state is not None
    model, _ = built.algorithm.model(runner.run_state.state)
    return Result(directory.path, built.unwrapped if model is built.model else model)


def _report(directory: Path, progress: ProgressBase) -> str | None:
    """Writes the result page. If it cannot be written, the run goes on to its end: a sentence says why."""
    from fedlens.report.run_page import write_report

    try:
        write_report(directory)
    except Exception as error:
        reason = str(error) if isinstance(error, FedlensError) else told(error)
        sentence = f"the result page could not be written: {reason}"
        progress.problem(sentence)
        return sentence
    return None


def _remove_page(directory: RunDir, progress: ProgressBase) -> str | None:
    """Removes the page of before `resume`, which shows an old state. A sentence says why if it cannot be removed."""
    try:
        directory.report_path.unlink(missing_ok=True)
    except OSError as error:
        sentence = f"the earlier result page could not be removed: {error.strerror} ({directory.report_path})"
        progress.problem(sentence)
        return sentence
    return None


class Metrics(list[dict[str, Any]]):
    """One dictionary per round."""

    def to_pandas(self) -> pd.DataFrame:
        """A pandas table with one row per dictionary. Raises `FedlensError` if pandas is not installed."""
        try:
            import pandas as pd
        except ImportError:
            raise FedlensError("to_pandas() needs pandas", hint="pip install 'fedlens[pandas]'") from None
        return pd.DataFrame.from_records(list(self))


class Clients(Metrics):
    """One dictionary per client, the worst first."""


class Predictions(Metrics):
    """One dictionary per image file."""


class Result:
    """The result of a run, read from its directory on first use."""

    def __init__(self, directory: Path, model: ModelSpec | None = None) -> None:
        self.directory = directory
        self._model = model  # at hand where the run was made: a function of yours need not be importable

    @property
    def metrics(self) -> Metrics:
        """The lines of metrics.jsonl."""
        return Metrics(self._run.read_metrics())

    @property
    def clients(self) -> Clients:
        """The results of each client by name, the worst first: one dictionary per client.

        The keys are the fields of `fedlens.report.client_results.ClientResult`: the client, its training examples, its
        held-out examples and its classes; the first, best and last value of the run's main metric on its held-out
        examples; and `gap`, the last value less the mean of the clients. Empty if the run measured no clients, which
        needs `evaluation.clients`, `data.validation` and `data.validation_from = "client"`.
        """
        from fedlens.report.client_results import client_results
        from fedlens.report.read import read_run

        return Clients(dict(vars(row)) for row in client_results(read_run(self.directory)))

    @property
    def client_rounds(self) -> Metrics:
        """The lines of clients.jsonl: one dictionary per client and round."""
        return Metrics(self._run.read_clients())

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return self._run.read_summary() or {}

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The warnings of the run, such as a diverging loss: `kind`, `since`, `until`, `sentence`, `try`, ...

        Empty without a warning; see `fedlens.experiment.divergence`.
        """
        return list(self.summary.get("warnings", ()))

    @property
    def config(self) -> dict[str, Any]:
        """config.toml."""
        return self._run.read_config()

    @property
    def model(self) -> nn.Module:
        """The final model, in evaluation mode."""
        from fedlens.experiment.results import read_module

        return read_module(self._run.model_path, self._model)

    @property
    def best_model(self) -> nn.Module:
        """The model of the best round, in evaluation mode; `summary["best"]` has the round and the reason."""
        from fedlens.experiment.results import read_module

        return read_module(self._run.best_path, self._model)

    def predict(
        self,
        *paths: str | Path,
        out: Path | str | None = None,
        round: str | int | None = None,
        top: int = 5,
        pictures: bool = True,
        force: bool = False,
        score: float | None = None,
    ) -> Predictions:
        """Predicts image files with a model of the run, whose data need not be at hand.

        A row has the `path`, the task's columns (`class`, `score`, ...), and `fault`: None, or why the file failed.

        Args:
            paths: files, folders, or patterns such as `"photos/*.jpg"`.
            out: a folder for `predictions.csv`, masks, boxes and `pictures`; empty or new, unless `force` is set.
            round: "best", "last", or a round of which the run keeps the model; by default "best".
            score: the lowest score of a detector's boxes; by default `shown_score` of its task.

        Raises `DataError` if the paths name no image, and `RunDirectoryError` if the run has no such model.
        """
        from fedlens.experiment.predict import Output, predict

        output = None if out is None else Output(Path(out), pictures, force)
        return Predictions(predict(self._trained(round), paths, top, output, score=score))

    def export(
        self,
        file: Path | str,
        format: str | None = None,
        *,
        round: str | int | None = None,
        force: bool = False,
    ) -> Path:
        """Writes a model of the run as one file that needs no fedlens, and returns its path.

        `format` is "onnx", "pt2" or "safetensors", by default the ending of `file`; `round` is that of `predict`.
        See `fedlens.experiment.export.export` for the contents and the errors.
        """
        from fedlens.experiment.export import export

        return export(self._trained(round), Path(file), format, force).file

    def _trained(self, round: str | int | None) -> TrainedModel:
        from fedlens.experiment.trained_model import read_trained

        return read_trained(self._run, round, self._model)

    @property
    def _run(self) -> RunDir:
        from fedlens.experiment.rundir import RunDir

        return RunDir.open(self.directory)

    def __repr__(self) -> str:
        return as_text(*self._described())

    def _repr_html_(self) -> str:
        return as_html(*self._described())

    def _described(self) -> tuple[str, list[tuple[str, str]]]:
        """A title, and rows of a name and a value."""
        summary = self.summary
        final, best, totals = (summary.get(key) or {} for key in ("final", "best", "totals"))
        done, rounds = summary.get("rounds_done"), summary.get("rounds")
        rows = [
            ("run", f"{summary.get('algorithm')} on {summary.get('dataset')}, seed {summary.get('seed')}"),
            ("status", f"{summary['status']}, round {done} of {rounds}" if summary else "running"),
        ]
        metrics = {name: value for name, value in final.items() if split_of(name) and value is not None}
        _, score = split_of(best.get("metric", "")) or ("test", "accuracy")
        first = {name: value for name, value in metrics.items() if name.endswith((f"_{score}", "_loss"))}
        rows += [(name, f"{value:.4g} after round {final['round']}") for name, value in first.items()]
        others = [f"{name} {value:.4g}" for name, value in metrics.items() if name not in first]
        rows += [("more", ", ".join(others))] if others else []
        rows += [("best", f"{best['value']:.4g} in round {best['round']} ({best['metric']})")] if best else []
        rows += [("failed", f"{totals['failed']:,} client updates")] if totals.get("failed") else []
        return f"Result in {self.directory}", rows


def load_result(directory: Path | str, model: nn.Module | None = None) -> Result:
    """Loads the result of a run from its directory.

    If the run's model was passed as an object, pass an equal `model` to load its weights. Raises `ConfigError` if it
    differs from that of the run.
    """
    from fedlens.core.protocol import ModelSpec
    from fedlens.experiment.rundir import RunDir

    run = RunDir.open(Path(directory))
    if model is None:
        return Result(run.path)
    instance = _like(model, run)
    return Result(run.path, ModelSpec(instance, "instance", instance.settings, (), 0, seed=0))


__all__ = [
    "Clients",
    "Config",
    "Experiment",
    "Metrics",
    "Predictions",
    "Result",
    "dataset",
    "load_result",
    "resume",
]


def __getattr__(name: str) -> Any:
    if name == "dataset":  # its imports are not needed to start the command line
        from fedlens.data.arrays import dataset

        return dataset
    raise AttributeError(f"module 'fedlens.api' has no attribute '{name}'")
