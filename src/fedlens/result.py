"""The result of a run, and the tables that it gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import ConfigError, FedlensError
from fedlens.base.format import split_of
from fedlens.base.summary_text import as_html, as_text

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedlens.core.protocol import ModelSpec
    from fedlens.models.user_models import Instance
    from fedlens.results.run import Run
    from fedlens.run.rundir import RunDir
    from fedlens.use.trained_model import TrainedModel


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

    def __init__(self, directory: Path, model: ModelSpec | None = None, accept_changes: bool = False) -> None:
        self.directory, self._accept_changes = directory, accept_changes
        self._model = model  # at hand where the run was made: a function of yours need not be importable

    @property
    def metrics(self) -> Metrics:
        """The lines of metrics.jsonl."""
        return Metrics(self._run.metrics)

    @property
    def clients(self) -> Clients:
        """The results of each client by name, the worst first: one dictionary per client.

        The keys are the fields of `fedlens.results.client_results.ClientResult`: the client, its training examples, its
        held-out examples and its classes; the first, best and last value of the run's main metric on its held-out
        examples; and `gap`, the last value less the mean of the clients. Empty if the run measured no clients, which
        needs `evaluation.clients`, `data.validation` and `data.validation_from = "client"`.
        """
        from fedlens.results.client_results import client_results

        return Clients(dict(vars(row)) for row in client_results(self._run))

    @property
    def client_rounds(self) -> Metrics:
        """The lines of clients.jsonl: one dictionary per client and round."""
        return Metrics(self._run.read_clients())

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return self._run.summary

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The warnings of the run, such as a diverging loss: `kind`, `since`, `until`, `sentence`, `try`, ...

        Empty without a warning; see `fedlens.observers.divergence`.
        """
        return list(self.summary.get("warnings", ()))

    @property
    def config(self) -> dict[str, Any]:
        """config.toml."""
        return self._run.config

    @property
    def model(self) -> nn.Module:
        """The final model, in evaluation mode."""
        from fedlens.use.results import read_module

        return read_module(self._run.model_path, self._model, self._accept_changes)

    @property
    def best_model(self) -> nn.Module:
        """The model of the best round, in evaluation mode; `summary["best"]` has the round and the reason."""
        from fedlens.use.results import read_module

        return read_module(self._run.best_path, self._model, self._accept_changes)

    def predict(
        self,
        *paths: str | Path,
        out: Path | str | None = None,
        round: str | int | None = None,
        client: str | None = None,
        top: int = 5,
        pictures: bool = True,
        force: bool = False,
        score: float | None = None,
        device: str = "auto",
    ) -> Predictions:
        """Predicts image files with a model of the run, whose data need not be at hand.

        A row has the `path`, the task's columns (`class`, `score`, ...), and `fault`: None, or why the file failed.

        Args:
            paths: files, folders, or patterns such as `"photos/*.jpg"`.
            out: a folder for `predictions.csv`, masks, boxes and `pictures`; empty or new, unless `force` is set.
            round: "best", "last", or a round of which the run keeps the model; by default "best".
            client: where parts of the model stay at the clients: whose model it is, in the last round.
            score: the lowest score of a detector's boxes; by default `shown_score` of its task.
            device: "auto" for a GPU if there is one, "cpu", "cuda" or "cuda:1".

        Raises `DataError` if the paths name no image, and `RunDirectoryError` if the run has no such model.
        """
        from fedlens.use.device_here import device_here
        from fedlens.use.predict import Output, predict

        output = None if out is None else Output(Path(out), pictures, force)
        trained = self._trained(round, client).on(device_here(device)[0])
        return Predictions(predict(trained, paths, top, output, score=score))

    def export(
        self,
        file: Path | str,
        format: str | None = None,
        *,
        round: str | int | None = None,
        client: str | None = None,
        force: bool = False,
    ) -> Path:
        """Writes a model of the run as one file that needs no fedlens, and returns its path.

        `format` is "onnx", "pt2" or "safetensors", by default the ending of `file`; `round` and `client` are those of
        `predict`.
        See `fedlens.use.export.export` for the contents and the errors.
        """
        from fedlens.use.export import export

        return export(self._trained(round, client), Path(file), format, force).file

    def _trained(self, round: str | int | None, client: str | None) -> TrainedModel:
        return self._run.model(round, client, spec=self._model, accept_changes=self._accept_changes)

    @property
    def _run(self) -> Run:
        from fedlens.results.run import Run

        return Run.open(self.directory)

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


def load_result(
    directory: Path | str, model: nn.Module | None = None, *, accept_changes: bool = False
) -> Result:
    """Loads the result of a run from its directory.

    If the run's model was passed as an object, pass an equal `model` to load its weights. Raises `ConfigError` if it
    differs from that of the run. If the run names Python files of your own, they build its models; one that was edited
    since is an error, unless `accept_changes` is set.
    """
    from fedlens.core.protocol import ModelSpec
    from fedlens.run.rundir import RunDir

    run = RunDir.open(Path(directory))
    if model is None:
        return Result(run.path, accept_changes=accept_changes)
    instance = like(model, run)
    return Result(run.path, ModelSpec(instance, "instance", instance.settings, (), 0, seed=0), accept_changes)


def like(model: nn.Module, run: RunDir) -> Instance:
    """The model that a run began with. Raises `ConfigError` if it is not like the one in the run's config.toml."""
    from fedlens.models.user_models import Instance

    if isinstance(model, type):
        raise ConfigError(
            f"`model` is the class {model.__name__}, but must be an object",
            hint=f"pass {model.__name__}(...)",
        )
    return Instance.of(model).matching(run.read_config()["model"], f"{run.config_path}: model")
