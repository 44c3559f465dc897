"""What the runs of a study measure: refuses unknown metrics and analyses before any run starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedlens.analyses.registry import ANALYSES, needs_of
from fedlens.base.errors import ConfigError, nearest
from fedlens.data.catalogue import CATALOGUE
from fedlens.results.rows import Row, needs_runs
from fedlens.settings.config import Config
from fedlens.settings.config_source import Source
from fedlens.settings.resolve import resolve
from fedlens.studies.cells import StudyCells
from fedlens.studies.study_file import StudySource
from fedlens.tasks.registry import TASKS
from fedlens.tasks.task import Task

TRAINING_LOSS = "local_loss"
_OVER_CLIENTS = ("mean_before", "mean", "std", "worst_decile", "undefined")
# The settings that make a run measure metrics on other data than test data.
_SETTINGS = {
    "train": "evaluation.train = true",
    "validation": "data.validation above 0, and tune.refit = false if the study is tuned",
}
# Columns of a curve that are not metrics, see `Row`.
_COUNTED = ("round", "examples", "batches", "bytes", "bytes_client", "bytes_client_up")


def columns_of(config: Config) -> frozenset[str] | None:
    """Returns the possible columns of metrics.jsonl; None if a user's component may add others.

    The columns over clients exist only if the run measures clients.

    >>> from fedlens.settings.config import read_config
    >>> from fedlens.settings.config_source import read_source
    >>> columns = columns_of(read_config(read_source("digits").values))
    >>> sorted(name for name in columns if name.startswith("test_"))
    ['test_accuracy', 'test_accuracy_balanced', 'test_accuracy_top5', 'test_calibration_error', 'test_loss']
    """
    names = _metrics_of(config)
    rules = config.client if isinstance(config.client, list) else [config.client]
    own = [part["name"] for part in (config.algorithm, config.aggregate, config.server, *rules) if part]
    if names is None or any(callable(name) or ":" in name for name in own):
        return None
    splits = ["test", *["train"] * config.evaluation.train, *["validation"] * (config.data.validation > 0)]
    at_server = {f"{split}_{name}" for split in splits for name in names}
    over_clients = {f"clients_{name}_{end}" for name in names for end in _OVER_CLIENTS}
    return frozenset({TRAINING_LOSS, *at_server, *over_clients})


def _metrics_of(config: Config) -> tuple[str, ...] | None:
    """The metrics of the task; of all tasks of fedlens if the task of the dataset is unknown."""
    table = config.task
    if "name" in table:
        task = resolve(TASKS, table, "task", Source({}))()
        return task.known_metrics() if isinstance(task, Task) else None
    dataset = config.data.dataset
    facts = CATALOGUE.get(str(dataset["name"]))
    kind = str(dataset.get("task") or (facts.task if facts is not None else ""))
    kinds = [kind] if kind in TASKS.entries else list(TASKS.entries)
    listed = [TASKS.find(kind)().known_metrics() for kind in kinds]
    return tuple(dict.fromkeys(name for names in listed for name in names))


def refuse_unknown_metric(configs: Iterable[Config], metric: str | None, where: str) -> None:
    """Raises `ConfigError` for a metric that none of these runs can have, before any of them starts.

    Args:
        where: the place of the metric in the study.
    """
    if metric is None or metric in _COUNTED:
        return
    measured: set[str] = set()
    for config in configs:
        columns = columns_of(config)
        if columns is None or metric in columns:
            return
        measured |= columns
    if measured:
        split, _, name = metric.partition("_")
        needed = _SETTINGS.get(split) if f"test_{name}" in measured else None
        hint = f"set {needed}" if needed else _near(metric, measured)
        raise ConfigError(f"no run measures '{metric}'", where=where, hint=hint)


def asked_metrics(
    figures: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The metrics that figures and tables of results name, each with its place: "tables[0].metric"."""
    for kind, specs in (("figures", figures), ("tables", tables)):
        for number, spec in enumerate(specs):
            trained = needs_runs([spec], []) if kind == "figures" else needs_runs([], [spec])
            if trained and isinstance(spec.get("metric"), str):
                yield spec["metric"], f"{kind}[{number}].metric"


def refuse_unmeasured(line: Row, metric: str | None, where: str) -> None:
    """Raises `ConfigError` if an ended run measured no such metric on any data, so that no other run will.

    A metric that is measured on other data, and a failed run, raise nothing: the results show them.
    """
    if metric is None or line.status == "failed":
        return
    measured = [name for name in line.curve if name not in _COUNTED]
    if measured and _without_data(metric) not in map(_without_data, measured):
        raise ConfigError(
            f"the run {line.run} does not measure '{metric}'", where=where, hint=_near(metric, measured)
        )


def _without_data(column: str) -> str:
    """The metric of a column without its data: "accuracy" for `test_accuracy` and `clients_accuracy_mean`."""
    split, _, name = column.partition("_")
    ends = (name.removesuffix(f"_{end}") for end in _OVER_CLIENTS if name.endswith(f"_{end}"))
    return next(ends, name) if split == "clients" else name


def _near(metric: str, columns: Iterable[str]) -> str:
    """The nearest name, else the names on the same data."""
    names = list(columns)
    near = nearest(metric, names)
    same = [name for name in names if name.partition("_")[0] == metric.partition("_")[0]]
    return near if near.startswith("did you mean") or not same else nearest(metric, same)


def refuse_analyses(cells: StudyCells, source: StudySource) -> None:
    """Raises `ConfigError` for an analysis that does not exist, or whose recordings no run of the study makes."""
    places, wanted = source.places, source.settings.analyses
    for name in wanted:
        where = places.locate("analyses", name)
        if ":" not in name and name not in dict(ANALYSES.rows()):
            raise ConfigError(
                f"unknown analysis '{name}'", where=where, hint=nearest(name, dict(ANALYSES.rows()))
            )
        needs = needs_of(name)
        if needs != "nothing" and not any(_records(made.config, needs) for made in cells.finals):
            raise ConfigError(
                f"the analysis '{name}' needs {needs}, which no run of the study records",
                where=where,
                hint='set "record.local_models" = { every = 5 }',
            )


def _records(config: Config, needs: str) -> bool:
    """Whether a run records what an analysis needs in some round."""
    asked = [config.record.local_models, *([config.record.updates] if needs != "local models" else [])]
    return any(one is not None and any(map(one.includes, range(1, config.rounds + 1))) for one in asked)
