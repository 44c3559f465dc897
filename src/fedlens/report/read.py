"""A run as its directory tells it, whatever state the directory is in.

A report is asked for of runs that are still going, that failed, or that were killed; so everything but the
settings may be missing here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.core.errors import DataError
from fedlens.data.partition.partition import Partition
from fedlens.experiment.rundir import RunDir
from fedlens.report.format import finite, is_share, split_of

# What `fedlens.algorithms.client_evaluation` calls the metrics of clients on what they hold out of their own.
_SPREAD = re.compile(r"clients_(\w+?)_(mean_before|mean|std|worst_decile)")

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run directory says.

    `metrics` are the lines of metrics.jsonl in order; `partition` is None where it is not known.
    """

    directory: Path
    config: Mapping[str, Any]
    metrics: Sequence[Row]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    partition: Partition | None

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.config.get("name") or self.directory.name)

    @property
    def run_id(self) -> str:
        return str(self.summary.get("run_id") or self.directory.resolve().name)

    @property
    def status(self) -> str:
        """finished, failed, interrupted, or running where there is no summary yet."""
        return str(self.summary.get("status") or "running")

    @property
    def rounds_done(self) -> int:
        done = self.summary.get("rounds_done")
        return (
            int(done) if done is not None else max((int(line["round"]) for line in self.metrics), default=0)
        )

    @property
    def rounds(self) -> int | None:
        asked = self.summary.get("rounds", self.config.get("rounds"))
        return asked if isinstance(asked, int) else None

    def part(self, table: str, key: str = "name") -> str | None:
        """The name chosen in a table of the settings: `part("model")`, `part("data", "dataset")`."""
        value = subtable(self.config, table).get(key)
        if isinstance(value, Mapping):
            value = value.get("name")
        known = self.summary.get(key if table == "data" else table)
        if value is None:
            value = known.get("name") if isinstance(known, Mapping) else known
        return None if value is None else str(value)

    def series(self, key: str) -> tuple[list[int], list[float | None]]:
        """The rounds that carry `key`, and its value there (None where it was not finite)."""
        lines = [line for line in self.metrics if key in line]
        return [int(line["round"]) for line in lines], [finite(line[key]) for line in lines]

    def total(self, key: str) -> float | None:
        """A total of the summary; where there is none yet, the sum over the rounds so far."""
        known = finite(subtable(self.summary, "totals").get(key))
        return self.sum(key) if known is None else known

    def seconds(self) -> float | None:
        """How long the run took: training, evaluation and all else."""
        known = finite(subtable(self.summary, "totals").get("seconds"))
        elapsed = [v for line in self.metrics if (v := finite(line.get("elapsed"))) is not None]
        return known if known is not None else elapsed[-1] if elapsed else self.sum("seconds")

    def sum(self, key: str) -> float | None:
        """The sum of `key` over the rounds so far, or None where no round has it."""
        values = [v for line in self.metrics if (v := finite(line.get(key))) is not None]
        return sum(values) if values else None

    def metric(self) -> str:
        """The metric that the run is judged by: accuracy for a classifier."""
        chosen = split_of(str(subtable(self.summary, "best").get("metric", "")))
        if chosen and chosen[1] != "loss":
            return chosen[1]
        found = [parts[1] for line in self.metrics for key in line if (parts := split_of(key))]
        shares = sorted({metric for metric in found if is_share(metric)}, key=lambda m: (m != "accuracy", m))
        others = [metric for metric in dict.fromkeys(found) if metric != "loss"]
        return (shares or others or ["accuracy"])[0]

    def split(self) -> str:
        """What the run is judged on: "test", or "validation" where there is no one model that could be tested.

        That is so where parts of the model are the clients' own: each is measured on what it holds out.
        """
        pairs = [pair for line in self.metrics for key in line if (pair := split_of(key))]
        return "test" if any(split == "test" for split, _ in pairs) or not pairs else "validation"

    def spread(self) -> dict[str, dict[str, float]]:
        """How the last measured round did at the clients: by metric, its mean, std, worst_decile, mean_before."""
        found: dict[str, dict[str, float]] = {}
        for line in reversed(self.metrics):
            for key, given in line.items():
                match = _SPREAD.fullmatch(key)
                if match and (value := finite(given)) is not None:
                    found.setdefault(match[1], {})[match[2]] = value
            if found:
                break
        return found

    def final(self, metric: str) -> tuple[int | None, float | None]:
        """The last evaluated round and the test value there (see `split`)."""
        rounds, values = self.series(f"{self.split()}_{metric}")
        return (rounds[-1], values[-1]) if rounds else (None, None)

    def best(self, metric: str) -> tuple[int | None, float | None, str | None]:
        """The best round, the *test* value there (see `split`), and the split on which it was chosen.

        Where the summary does not say, the best test value so far.
        """
        best, split = subtable(self.summary, "best"), self.split()
        rounds, values = self.series(f"{split}_{metric}")
        tested = dict(zip(rounds, values, strict=True))
        if best:
            at, chosen = best.get("round"), best.get("chosen_on")
            value = tested.get(int(at)) if at is not None else None
            if value is None and chosen == split:
                value = finite(best.get("value"))
            return at, value, chosen
        known = [(value, at) for at, value in tested.items() if value is not None and at > 0]
        if not known:
            return None, None, None
        value, at = max(known, key=lambda pair: (pair[0], -pair[1]))
        return at, value, split

    def emd(self) -> float | None:
        """The mean earth mover's distance of clients to the population, weighted by size (hsu2020 6.1)."""
        known = finite(subtable(self.summary, "partition").get("emd"))
        if known is not None or self.partition is None or self.partition.census is None:
            return known
        return finite(self.partition.census.emd())


def read_run(directory: Path) -> Run:
    """Everything that `directory` says about its run.

    Raises `RunDirectoryError` where it is no run directory, another version wrote it, or its settings, its
    metrics or its summary are damaged.
    """
    run = RunDir.open(Path(directory))
    return Run(
        directory=run.path,
        config=run.read_config(),
        metrics=_rounds(run.read_metrics()),
        summary=run.read_summary() or {},
        environment=run.read_environment() or {},
        partition=_partition(run.partition_path),
    )


def read_partition(path: Path) -> Partition:
    """The partition in a file that `Partition.save` wrote, or in a run directory.

    Raises `DataError` where there is none or it is damaged, `RunDirectoryError` where `path` is a directory
    without a run.
    """
    path = path.expanduser()
    if not path.is_dir():
        return Partition.load(path)
    run = RunDir.open(path)
    if not run.partition_path.exists():
        raise DataError(
            "the run has not got as far as to scatter its data",
            where=str(path),
            hint=f"'fedlens resume {path}' begins it",
        )
    return Partition.load(run.partition_path)


def _rounds(lines: Sequence[Row]) -> list[Row]:
    """One line a round, the later one where a killed run wrote a round twice."""
    found = {line["round"]: line for line in lines if isinstance(line.get("round"), int)}
    return [found[at] for at in sorted(found)]


def _partition(path: Path) -> Partition | None:
    """Who had what. A file that is damaged, or not there yet, costs a page its pictures and nothing else."""
    try:
        return Partition.load(path)
    except DataError:
        return None


def subtable(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table `key` of `of`, empty where there is none."""
    value = of.get(key)
    return value if isinstance(value, Mapping) else {}
