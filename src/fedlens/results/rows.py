"""The results of a study: its plan, and a row a run.

`study.json` holds the plan (`StudyInfo`) with the place of each run in it, `results.jsonl` the results of each run,
named by the digest of its settings, and `data.json`, where a figure or a table needs it, the clients' data and the
costs of the models. Tables and figures are made from these files alone, so they can be published without the run
directories.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fedlens import __version__
from fedlens.base.errors import DataError, RunDirectoryError
from fedlens.base.format import computed, finite, split_of
from fedlens.base.shell_command import shell_command
from fedlens.files import jsonl
from fedlens.files.atomic_files import write_atomically
from fedlens.files.text_files import read_json
from fedlens.settings.config import read_config
from fedlens.settings.effective_rate import effective_rate

if TYPE_CHECKING:  # `reproduce --list` reads rows and no run: without numpy
    from fedlens.results.run import Run

Values: TypeAlias = Mapping[str, Any]
Role = Literal["tune", "final", "pretrain"]
Status = Literal["finished", "failed", "stopped"]
_PLACE = ("method", "case", "point", "role", "seed")
DATA_FIGURES = frozenset({"populations", "distributions"})
DATA_TABLES = frozenset({"datasets"})
INFO, LINES, DATA = "study.json", "results.jsonl", "data.json"
EFFECTIVE = "effective_lr"
"""The setting of grids that sets `local.lr` (`fedlens.settings.effective_rate`), and the fact of runs."""
DIGITS = 7  # significant ones of each value
_STATUS: Mapping[str, Status] = {"finished": "finished", "failed": "failed", "paused": "stopped"}
_TRAINING = "local_loss"


@dataclass(frozen=True)
class Row:
    """A run: its results, and its place in the plan of a study.

    A line of results.jsonl has no place, since several cells may share a run; an entry of a plan has no results.

    Attributes:
        digest: of the run's settings, see `fedlens.studies.planned.PlannedRun.digest`.
        run: the name of its directory.
        status: None before the run has ended; "stopped" is a run that is paused at a rung of successive halving, and
            is resumed if a later rung or a final run needs it; "failed" is also one whose loss diverged.
        reason: why it failed or is paused.
        rounds: the rounds it has done.
        main: the main metric as metrics.jsonl names it, such as "test_accuracy".
        curve: columns of equal length, one entry an evaluated round: "round"; "examples", "batches" (those of the
            busiest client, summed over rounds), "bytes" (up, down and between clients) and "bytes_client" (those of one
            client), "bytes_client_up" (the part of it that goes up), all sums up to that round; "elapsed" in seconds;
            then each metric, None where it is missing.
        facts: other numbers: "parameters", "multiply_adds", "cpu_seconds", "seconds", "emd", "clients",
            "batch_size"; "chance" (accuracy of guessing), "local_lr" and "effective_lr" for figures.
        version: of fedlens.
        analyses: the rows of each analysis of the run, by name, without lists over clients.
        device: "cpu" or "cuda", the kind that it trained on; "" if it is not known.
        case: the condition that methods are compared in, by dimension: `{"data.partition.alpha": 0.1}`,
            `{"case": "two classes"}`.
        point: the settings that tuning chooses among; empty without tuning.
        role: "tune" runs are measured on validation data, "final" runs give the results; "pretrain" runs, whose method
            is the name of the pre-training, give initial weights.
    """

    digest: str
    run: str
    status: Status | None
    reason: str | None
    rounds: int
    main: str
    curve: Mapping[str, Sequence[float | None]]
    facts: Mapping[str, float | None] = field(default_factory=dict)
    version: str = ""
    analyses: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    device: str = ""
    method: str = ""
    case: Mapping[str, Any] = field(default_factory=dict)
    point: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "final"
    seed: int = 0

    @classmethod
    def planned(
        cls, digest: str, run: str, method: str, case: Values, point: Values, role: Role, seed: int
    ) -> Row:
        """A run that has not ended."""
        return cls(digest, run, None, None, 0, "", {}, {}, "", {}, "", method, case, point, role, seed)

    @property
    def entry(self) -> dict[str, Any]:
        """The part that stands in study.json."""
        return {name: value for name, value in asdict(self).items() if name in ("digest", "run", *_PLACE)}

    @property
    def line(self) -> dict[str, Any]:
        """The part that stands in results.jsonl."""
        return {name: value for name, value in asdict(self).items() if name not in _PLACE}

    def at(self, entry: Row) -> Row:
        """The results of this run at the place of an entry of the plan."""
        return replace(self, run=entry.run, **{name: vars(entry)[name] for name in _PLACE})

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(index in the curve, value) of the evaluations that have a finite value of `metric`."""
        values = self.curve.get(metric, ())
        return [(k, v) for k, v in enumerate(values) if v is not None and math.isfinite(v)]

    def last(self, column: str) -> float | None:
        """The last known value of a column of the curve."""
        return next((value for value in reversed(self.curve.get(column, ())) if value is not None), None)

    def final(self, metric: str, last: int = 1) -> float | None:
        """The mean of the last `last` evaluations of `metric`; None if the run failed or lacks it."""
        values = [value for _, value in self.series(metric)][-last:]
        return statistics.fmean(values) if values and self.status != "failed" else None

    def problem(self, metric: str) -> str | None:
        """Why the run has no final value of `metric` that counts as a result; None if it has one."""
        if self.status != "finished":
            return self.reason or self.status
        if not self.series(metric):
            return f"{metric} was not measured"
        return self.not_finite(metric)

    def not_finite(self, metric: str, until: float | None = None) -> str | None:
        """A phrase if `metric`, or the loss of its split, is not finite in the last evaluation; None if both are.

        metrics.jsonl has null where a metric is not finite: a run whose loss is missing in its last evaluation, and
        was there before, has diverged.

        Args:
            until: later rounds do not count.
        """
        split = metric.partition("_")[0] + "_"
        rounds = self.curve.get("round", ())
        series = {
            name: [k for k, _ in self.series(name) if until is None or (rounds[k] or 0) <= until]
            for name in self.curve
            if name.startswith(split)
        }
        last = max((k for measured in series.values() for k in measured), default=-1)
        for name in (metric, f"{split}loss"):
            measured = series.get(name)
            if measured and measured[-1] < last:
                where = f" in round {rounds[last]:g}" if rounds else ""
                return f"{name} is not finite{where}"
        return None


@dataclass(frozen=True)
class StudyInfo:
    """The plan of a comparison; the content of study.json.

    Attributes:
        metric: the column of metrics.jsonl that is compared; None for the main metric of the task.
        last: the number of evaluations at the end that a final value is the mean of.
        targets: values of the metric that rounds, batches and bytes are counted to.
        baseline: the method that the others are compared with.
        methods: their labels by name, in order.
        dimensions: the label of each dimension of the cases, in order.
        cases: in order.
        grids: by method, the values that tuning tries of each setting.
        tuning: "on", "seeds", "share", "budget" (runs a method and case), "own_seeds" (whether tuning has seeds that
            the results do not use), "refit", "untuned" (the methods with a single point, which needs no tuning);
            empty without tuning.
        figures, tables: what the study file asks for, each with its "kind".
        scale: "smoke", "minutes", "laptop" or "paper"; "" for a study without scales.
        smaller: what differs from the scale "paper": rows of a setting, its value there, and its value here.
        document: the paper's own numbers; see `fedlens.studies.reproductions`.
        paper: "authors", "title" and "link" of the paper; empty for a study of the user.
        command: that makes these results.
        entries: the runs, in order.
        stop_diverged: whether a run ends when its loss diverges; None in files of earlier versions.
        files: SHA-256 of the user's Python files that the settings of runs name, by path.
        pretrained: the pre-trainings that runs start from. Tables and figures of results leave them out.
        pretrained_labels: their labels, by name.
        analyses: the names of the analyses of its final runs.
        caveats: sentences that stand in every caption: what the runs do not show.
    """

    name: str
    title: str
    seeds: Sequence[int]
    metric: str | None
    last: int
    targets: Sequence[float]
    baseline: str
    methods: Mapping[str, str]
    dimensions: Mapping[str, str]
    cases: Sequence[Mapping[str, Any]]
    grids: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    scale: str = ""
    smaller: Sequence[Sequence[str]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    notes: Sequence[str] = ()
    entries: Sequence[Row] = ()
    stop_diverged: bool | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    pretrained: Sequence[Row] = ()
    pretrained_labels: Mapping[str, str] = field(default_factory=dict)
    analyses: Sequence[str] = ()
    caveats: Sequence[str] = ()
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The results of a study so far.

    Attributes:
        lines: the runs by digest.
        data: the content of data.json, see `fedlens.results.data_json`; empty where no figure or table needs it.
    """

    info: StudyInfo
    lines: Mapping[str, Row]
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The results in `folder`.

        Raises `DataError` if it has no study, and that or `RunDirectoryError` if a file in it is damaged.
        """
        path = folder / INFO
        values = read_json(path)
        if values is None:
            first = shell_command("sweep", "STUDY_FILE", out=folder)
            raise DataError(f"no study in {folder}", where=str(path), hint=f"make it first: {first}")
        try:
            entries = {
                name: [Row.planned(**_fields(Row, entry)) for entry in values.get(name, ())]
                for name in ("entries", "pretrained")
            }
            info = StudyInfo(**{**_fields(StudyInfo, values), **entries})
        except (TypeError, AttributeError) as error:
            raise DataError(f"{INFO} is corrupt: {error}", where=str(path)) from None
        lines = {line.digest: line for line in read_lines(folder / LINES)}
        return cls(info, lines, read_data(folder))

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The runs of the plan in order, each at its place; a run that two cells share is two rows."""
        return [self.lines.get(entry.digest, entry).at(entry) for entry in self.info.entries]

    @cached_property
    def metric(self) -> str:
        """The column that is compared: "test_accuracy"."""
        mains = [row.main for row in sorted(self.rows, key=lambda row: row.role != "final") if row.main]
        return self.info.metric or (mains[0] if mains else "test_accuracy")

    def measured(self, role: Role) -> str:
        """The column that runs of a role are compared by: that of validation data while tuning."""
        return validation_metric(self.metric) if role == "tune" else self.metric


def _fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `kind` has a field for: files of other versions have more."""
    known = {one.name for one in fields(kind)}
    return {key: value for key, value in values.items() if key in known}


def validation_metric(metric: str) -> str:
    """Returns the validation counterpart of a test metric.

    >>> validation_metric("test_accuracy"), validation_metric("validation_loss"), validation_metric("clients_accuracy")
    ('validation_accuracy', 'validation_loss', 'clients_accuracy')
    """
    return f"validation_{metric.removeprefix('test_')}" if metric.startswith("test_") else metric


def write_info(folder: Path, info: StudyInfo) -> None:
    """Writes study.json, all of it or nothing."""
    values = asdict(replace(info, entries=(), pretrained=()))
    values["entries"], values["pretrained"] = (
        [row.entry for row in rows] for rows in (info.entries, info.pretrained)
    )
    write_atomically(folder / INFO, (json.dumps(values, indent=1) + "\n").encode())


def read_data(folder: Path) -> dict[str, Any]:
    """The content of data.json; empty without one. Raises `RunDirectoryError` if it is damaged."""
    return read_json(folder / DATA) or {}


def write_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Writes data.json, all of it or nothing."""
    write_atomically(folder / DATA, (json.dumps(data, separators=(",", ":")) + "\n").encode())


def read_lines(path: Path) -> list[Row]:
    """The lines of results.jsonl, the last of each digest; a line that was cut off by a kill counts as missing.

    Raises `RunDirectoryError` if another line cannot be read, or is no line of a run.
    """
    lines: dict[str, Row] = {}
    for row in jsonl.stream(path):
        try:
            line = Row(**_fields(Row, row))
        except (TypeError, AttributeError) as error:
            what = f"{path.name} is corrupt: a line is not of a run: {error}"
            hint = "remove the line: 'fedlens sweep' writes it again from the directory of the run"
            raise RunDirectoryError(what, where=str(path), hint=hint) from None
        lines.pop(line.digest, None)
        lines[line.digest] = line
    return list(lines.values())


def write_lines(path: Path, lines: Iterable[Row]) -> None:
    """Writes results.jsonl anew, in the given order."""
    texts = [json.dumps(line.line, separators=(",", ":")) + "\n" for line in lines]
    write_atomically(path, "".join(texts).encode())


def row_of_run(run: Run, digest: str = "", name: str = "") -> Row:
    """The row of a run that finished, failed, or is paused (status "stopped", `rounds` the round of the pause).

    The curve has an entry for each evaluated round. `bytes_client` sums over the rounds the bytes up, down and between
    clients of one that takes part in the round, the mean over those that did. Metrics are those of the server's data
    (`test_`, `validation_`, `train_`), those over clients (`clients_`), `local_loss`, and numbers that components have
    set. Facts besides those of `Row` are `warnings`, the number of warnings of the run. Sums of counts are exact, other
    values are rounded to 7 significant digits.

    Args:
        digest, name: of the run in a study.

    Raises `RunDirectoryError` if the run has not ended.
    """
    status = _STATUS.get(run.status)
    if status is None:
        raise RunDirectoryError("the run has not ended", where=str(run.path), hint="resume it")
    done = run.rounds_done
    reason = run.summary.get("error") if status == "failed" else None
    return Row(
        digest,
        name,
        status,
        f"paused after round {done}" if status == "stopped" else reason,
        done,
        f"{run.split()}_{run.metric()}",
        _curve(run.metrics),
        _facts(run),
        str(run.environment.get("fedlens") or __version__),
        device=str(run.environment.get("device", "")).partition(":")[0],
    )


def failed_row(digest: str, name: str, reason: str) -> Row:
    """The row of a run that failed before it had a directory."""
    return Row(digest, name, "failed", reason, 0, "", {"round": []}, {}, __version__)


def _curve(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The columns of `Row.curve`."""
    names = list(dict.fromkeys(name for line in metrics for name in line if _is_metric(name)))
    own = list(dict.fromkeys(name for line in metrics for name in line if not computed(name)))
    sums = {"examples": 0, "batches": 0, "bytes": 0}
    client = client_up = 0.0
    rows: list[dict[str, float | None]] = []
    for line in metrics:
        both = sum(_count(line, name) for name in ("bytes_up", "bytes_down", "bytes_peer"))
        client += both / max(1, _count(line, "clients"))
        client_up += _count(line, "bytes_up") / max(1, _count(line, "clients"))
        sums["examples"] += _count(line, "examples")
        sums["batches"] += _count(line, "batches_max")
        sums["bytes"] += both
        if any(name in line for name in names):
            rows.append(
                {
                    "round": line["round"],
                    **sums,
                    "bytes_client": rounded(client),
                    "bytes_client_up": rounded(client_up),
                    "elapsed": rounded(finite(line.get("elapsed"))),
                    **{name: rounded(finite(line.get(name))) for name in (*names, _TRAINING, *own)},
                }
            )
    columns = ["round", *sums, "bytes_client", "bytes_client_up", "elapsed", *names, _TRAINING, *own]
    return {name: [row[name] for row in rows] for name in columns}


def _facts(run: Run) -> dict[str, float | None]:
    facts = {
        "parameters": run.recorded("model", "parameters"),
        "multiply_adds": run.recorded("model", "multiply_adds"),
        "cpu_seconds": run.recorded("totals", "cpu_seconds"),
        "seconds": run.seconds(),
        "emd": run.emd(),
        "clients": run.recorded("partition", "clients"),
        "warnings": len(run.summary.get("warnings") or ()),
        "batch_size": run.setting("local", "batch_size"),
        "chance": run.chance,
        "local_lr": run.setting("local", "lr"),
        "effective_lr": effective_rate(read_config(run.config)),
    }
    return {name: rounded(finite(value)) for name, value in facts.items()}


def _is_metric(name: str) -> bool:
    split = split_of(name)
    return name.startswith("clients_") or (split is not None and split[0] != "local")


def _count(line: Mapping[str, Any], name: str) -> int:
    return int(finite(line.get(name)) or 0)


def rounded(value: float | None) -> float | None:
    """
    >>> rounded(2 / 3), rounded(123456789), rounded(None)
    (0.6666667, 123456789, None)
    """
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def needs_runs(figures: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a study with these figures and tables trains: false where it has only those of data and of models.

    >>> needs_runs([{"kind": "populations"}], []), needs_runs([{"kind": "curves"}], []), needs_runs([], [])
    (False, True, True)
    >>> needs_runs([], [{"kind": "efficiency", "runs": False}])
    False
    """
    if not figures and not tables:
        return True
    return any(figure.get("kind") not in DATA_FIGURES for figure in figures) or any(
        table.get("kind") not in DATA_TABLES and not _of_models(table) for table in tables
    )


def needs_populations(figures: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a figure or a table of the study shows the data of clients.

    >>> needs_populations([{"kind": "setting", "x": "emd", "above": "emd"}], []), needs_populations([], [])
    (True, False)
    """
    return any(figure.get("kind") in DATA_FIGURES or figure.get("above") for figure in figures) or any(
        table.get("kind") in DATA_TABLES for table in tables
    )


def needs_data(figures: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the study reads a dataset: false where models are counted for a stated shape alone.

    >>> needs_data([], [{"kind": "efficiency", "runs": False, "shape": [3, 8, 8], "classes": 10}])
    False
    """
    stated = all(table.get("shape") and table.get("classes") for table in tables if _of_models(table))
    return needs_runs(figures, tables) or needs_populations(figures, tables) or not stated


def _of_models(table: Mapping[str, Any]) -> bool:
    return table.get("kind") == "efficiency" and table.get("runs") is False
