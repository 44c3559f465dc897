"""A run, read from its directory in any state of the run.

Reports are also written for runs in progress and for failed or killed runs, so everything but the settings may be
missing.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import DataError, FedlensError, RunDirectoryError
from fedlens.base.format import finite, is_share, split_of, with_own_parts
from fedlens.base.shell_command import quoted_command
from fedlens.run.rundir import RunDir, runs_below

if TYPE_CHECKING:
    from fedlens.core.protocol import ModelSpec
    from fedlens.data.vertical.feature_partition import AnyPartition
    from fedlens.observers.example_predictions import ExamplePredictions
    from fedlens.observers.final_evaluation import FinalEvaluation
    from fedlens.observers.held_out_predictions import HeldOutPredictions
    from fedlens.observers.read_recordings import RecordedRound
    from fedlens.use.trained_model import TrainedModel

# The names that `fedlens.algorithms.client_evaluation` gives to metrics over clients.
_SPREAD = re.compile(r"clients_(\w+?)_(mean_before|mean|std|worst_decile)")
# Folders below a parent folder that are searched: runs/<name>/<id> and runs/<name>-cost/<run> are two.
_DEPTH = 4


class Run(RunDir):
    """A run directory, of which each file is read when it is first asked for, and kept.

    Make one with `read_run`, or with `Run.open`, which reads nothing but `environment.json`.
    """

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings. Raises `RunDirectoryError` if they cannot be read, as all of these."""
        return self.read_config()

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One line of metrics.jsonl a round, the later one if a killed run wrote a round twice."""
        by_round = {line["round"]: line for line in self.read_metrics() if isinstance(line.get("round"), int)}
        return [by_round[at] for at in sorted(by_round)]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty if the run has not ended."""
        return self.read_summary() or {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """environment.json; empty without the file."""
        return self.read_environment() or {}

    @cached_property
    def partition(self) -> AnyPartition | None:
        """The partition, or None if its file is missing or damaged: the page then only lacks its figures."""
        from fedlens.data.vertical.feature_partition import load_partition

        with suppress(DataError):
            return load_partition(self.partition_path)
        return None

    @cached_property
    def evaluation(self) -> FinalEvaluation | None:
        """The measurements of the last round on the test data; None if the run has not written them."""
        from fedlens.observers.final_evaluation import FinalEvaluation

        return FinalEvaluation.read(self.evaluation_path) if lexists(self.evaluation_path) else None

    @cached_property
    def examples(self) -> ExamplePredictions | None:
        """The predictions of some test images; None if the run has not written them."""
        from fedlens.observers.example_predictions import ExamplePredictions

        return ExamplePredictions.read(self.examples_path) if lexists(self.examples_path) else None

    @cached_property
    def held_out(self) -> HeldOutPredictions | None:
        """The predictions of the clients' held-out images; None if the run has not written them."""
        from fedlens.observers.held_out_predictions import HeldOutPredictions

        return HeldOutPredictions.read(self.held_out_path) if lexists(self.held_out_path) else None

    @cached_property
    def recordings(self) -> dict[int, RecordedRound]:
        """The recorded rounds by number."""
        from fedlens.observers.read_recordings import recorded_rounds

        return {found.round: found for found in recorded_rounds(self)}

    def model(
        self,
        round: str | int | None = None,
        client: str | None = None,
        *,
        spec: ModelSpec | None = None,
        accept_changes: bool = False,
    ) -> TrainedModel:
        """The model of a round, or of a client in the last round; see `fedlens.use.trained_model.read_trained`."""
        from fedlens.use.trained_model import read_trained

        return read_trained(self, round, spec, accept_changes, client)

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.config.get("name") or self.path.name)

    @property
    def run_id(self) -> str:
        return str(self.summary.get("run_id") or super().run_id)

    @property
    def status(self) -> str:
        """finished, paused, failed, interrupted, or running without a summary."""
        return str(self.summary.get("status") or "running")

    @property
    def rounds_done(self) -> int:
        done = self.summary.get("rounds_done")
        return int(done) if done is not None else int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def rounds(self) -> int | None:
        rounds = self.summary.get("rounds", self.config.get("rounds"))
        return rounds if isinstance(rounds, int) else None

    @property
    def warnings(self) -> list[Mapping[str, Any]]:
        """What is wrong with the result; see `fedlens.observers.divergence`."""
        warnings = self.summary.get("warnings")
        known = warnings if isinstance(warnings, list) else []
        return [w for w in known if isinstance(w, Mapping) and {"since", "until"} <= w.keys()]

    def sentences(self, key: str) -> list[str]:
        """The sentences that the summary lists under `key`."""
        given = self.summary.get(key)
        return [str(sentence) for sentence in given] if isinstance(given, list) else []

    @property
    def start_directory(self) -> str:
        """The run directory as it was given when the run was started."""
        return str(self.summary.get("directory") or self.path)

    def part(self, table: str, key: str = "name") -> str | None:
        """The name in a table of the settings: `part("model")`, `part("data", "dataset")`."""
        value = _name(subtable(self.config, table).get(key))
        if value is None:
            value = _name(self.summary.get(key if table == "data" else table))
        return None if value is None else str(value)

    @property
    def algorithm(self) -> str | None:
        """The algorithm, and the user's own client rules, server step and aggregate: "fedavg + kept + TrimmedMean"."""
        algorithm = self.part("algorithm")
        return algorithm and with_own_parts(
            algorithm, *map(self.config.get, ("client", "server", "aggregate"))
        )

    @property
    def shown(self) -> Mapping[str, Any]:
        """What the algorithm declares for the page."""
        # Earlier versions wrote it into the summary.
        return subtable(self.environment, "shown") or subtable(self.summary, "shown")

    def recorded(self, table: str, key: str) -> Any:
        """A value in a table of the summary, or None."""
        return subtable(self.summary, table).get(key)

    def setting(self, table: str, key: str) -> Any:
        """A value in a table of the settings, or None."""
        return subtable(self.config, table).get(key)

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing one of the classes; None for another task."""
        if self.setting("task", "name") != "classification":
            return None
        details = subtable(self.summary, "details")
        classes = [name for name in details if name.startswith(f"{self.split()}_accuracy_")]
        return 1 / len(classes) if len(classes) > 1 else None

    def series(self, key: str) -> tuple[list[int], list[float | None]]:
        """The rounds that have `key`, and its values (None if not finite)."""
        lines = [line for line in self.metrics if key in line]
        return [int(line["round"]) for line in lines], [finite(line[key]) for line in lines]

    def measured(self, key: str) -> dict[int, float]:
        """The finite values of `key` by round."""
        return {at: value for at, value in zip(*self.series(key), strict=True) if value is not None}

    def finite(self, key: str) -> list[float]:
        """The finite values of `key`, round by round."""
        return list(self.measured(key).values())

    def total(self, key: str) -> float | None:
        """A total of the summary; without one, the sum over the rounds so far."""
        total = finite(self.recorded("totals", key))
        return self.sum(key) if total is None else total

    def seconds(self) -> float | None:
        """The duration of the run with training, evaluation and everything else."""
        total = finite(self.recorded("totals", "seconds"))
        elapsed = self.finite("elapsed")
        return total if total is not None else elapsed[-1] if elapsed else self.sum("seconds")

    def sum(self, key: str) -> float | None:
        """The sum of `key` over the rounds so far, or None if no round has it."""
        values = self.finite(key)
        return sum(values) if values else None

    def passes(self) -> float | None:
        """How often the run went over its training images, or None if that is unknown."""
        trained, images = self.total("examples"), finite(self.recorded("partition", "examples"))
        return trained / images if trained and images else None

    def clients(self) -> float | None:
        """The number of clients in the population, or None if it is unknown."""
        recorded = finite(self.recorded("partition", "clients"))
        return len(self.partition) if recorded is None and self.partition is not None else recorded

    def cohort(self) -> list[float]:
        """The smallest and the largest number of clients that replied in a round; one number if they are equal."""
        replied = {value for value in self.finite("clients") if value}
        return sorted({min(replied), max(replied)}) if replied else []

    def _metrics(self) -> list[tuple[str, str]]:
        """Split and metric of each value that was measured."""
        return [pair for line in self.metrics for key in line if (pair := split_of(key))]

    def metric(self) -> str:
        """The main metric of the run: the score of its task, such as the accuracy of a classifier."""
        chosen = split_of(str(self.recorded("best", "metric")))
        if chosen and chosen[1] != "loss":
            return chosen[1]
        names = [metric for _, metric in self._metrics()]
        score = self.setting("task", "score")
        if isinstance(score, str) and (score in names or not names):
            return score
        shares = sorted({metric for metric in names if is_share(metric)}, key=lambda m: (m != "accuracy", m))
        others = [metric for metric in names if metric != "loss"]
        return (shares or others or ["accuracy"])[0]

    @property
    def at_sites(self) -> bool:
        """Whether the training data were at the sites of a federation."""
        return self.roster_path.exists()

    def split(self) -> str:
        """The split of the main metric: "test", or "validation" without one global model or test images at the server.

        Each model, or the one of all, is measured on the data that the clients hold out.
        """
        splits = {split for split, _ in self._metrics()}
        return "test" if "test" in splits or not splits else "validation"

    def spread(self) -> dict[str, dict[str, float]]:
        """The last per-client evaluation: by metric, its mean, std, worst_decile, mean_before."""
        for line in reversed(self.metrics):
            spread: dict[str, dict[str, float]] = {}
            for key, given in line.items():
                match = _SPREAD.fullmatch(key)
                if match and (value := finite(given)) is not None:
                    spread.setdefault(match[1], {})[match[2]] = value
            if spread:
                return spread
        return {}

    def final(self, metric: str) -> tuple[int | None, float | None]:
        """The last evaluated round and its test value (see `split`)."""
        rounds, values = self.series(f"{self.split()}_{metric}")
        return (rounds[-1], values[-1]) if rounds else (None, None)

    @property
    def scored(self) -> bool:
        """Whether its task has a score by which a best round is chosen."""
        task = subtable(self.config, "task")
        return not task or "score" in task or bool(subtable(self.summary, "best"))

    def best(self, metric: str) -> tuple[int | None, float | None, str | None]:
        """The best round, the *test* value there (see `split`), and the split on which it was chosen.

        Without a best round in the summary, the best test value so far. A task without a score has none.
        """
        best, split = subtable(self.summary, "best"), self.split()
        tested = dict(zip(*self.series(f"{split}_{metric}"), strict=True))
        if best:
            at, chosen_on = best.get("round"), best.get("chosen_on")
            value = tested.get(int(at)) if at is not None else None
            if value is None and chosen_on == split:
                value = finite(best.get("value"))
            return at, value, chosen_on
        if not self.scored:
            return None, None, None
        candidates = [(value, -at) for at, value in tested.items() if value is not None and at > 0]
        value, minus_at = max(candidates, default=(None, 0))
        return (None, None, None) if value is None else (-minus_at, value, split)

    def emd(self) -> float | None:
        """The mean earth mover's distance of clients to the population, weighted by size (hsu2020 6.1)."""
        recorded = finite(self.recorded("partition", "emd"))
        if recorded is not None or self.partition is None or self.partition.census is None:
            return recorded
        return finite(self.partition.census.emd())


def read_run(directory: Path) -> Run:
    """The run in a directory, with its settings, metrics and summary read.

    Raises `RunDirectoryError` if it is no run directory, another version wrote it, or its settings, its
    metrics or its summary are damaged.
    """
    run = Run.open(Path(directory))
    _ = run.config, run.metrics, run.summary
    return run


def find_runs(paths: Sequence[Path | str]) -> list[Path]:
    """The run directories that `paths` name, each once.

    A path is a run directory, a folder with runs below it, or a pattern such as `runs/*/2026*`; runs below a folder or
    of a pattern are sorted by path. Links to folders below a folder are not followed.

    Raises `RunDirectoryError` if a path or a pattern gives no run.
    """
    runs: dict[Path, Path] = {}
    for path in map(str, paths):
        here = Path(path).expanduser()
        matches = [here]
        if not here.exists() and glob.has_magic(path):
            matches = sorted(map(Path, glob.glob(str(here))))
        below: list[Path] = []
        for match in matches:
            alone = (match / "config.toml").is_file()
            below += [match] if alone else runs_below(match, _DEPTH)
        if not below:
            raise _no_runs(path, here, matches)
        for run in below:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def read_runs(paths: Sequence[Path | str]) -> tuple[list[Run], list[str]]:
    """The runs that `paths` name (see `find_runs`), and a sentence for each that cannot be read.

    Raises `RunDirectoryError` if there is no run, or if none can be read.
    """
    runs, skipped = [], []
    for path in find_runs(paths):
        try:
            runs.append(read_run(path))
        except FedlensError as error:
            skipped.append((path, error))
    if not runs:
        raise skipped[0][1]
    return runs, [f"skipped {path}: {error}" for path, error in skipped]


def _no_runs(path: str, here: Path, matches: Sequence[Path]) -> RunDirectoryError:
    hint = "give run directories, a folder with runs below it, or a pattern such as 'runs/*/2026*'"
    if not matches:
        return RunDirectoryError(f"no directory matches the pattern {path}", hint=hint)
    if not here.exists() and len(matches) == 1:
        return RunDirectoryError("the directory does not exist", where=path)
    if here.is_file():
        return RunDirectoryError(f"{path} is a file, not a run directory", hint=hint)
    return RunDirectoryError(f"no run found in {path}", hint=hint)


def read_partition(path: Path) -> AnyPartition:
    """The partition in a file, of examples or of features, or in a run directory.

    Raises `DataError` if it is missing or damaged, `RunDirectoryError` if `path` is a directory without a run.
    """
    from fedlens.data.vertical.feature_partition import load_partition

    path = path.expanduser()
    if not path.is_dir():
        return load_partition(path)
    run = RunDir.open(path)
    if not run.partition_path.exists():
        raise DataError(
            "the run has no partition yet",
            where=str(path),
            hint=f"start it with {quoted_command('resume', path)}",
        )
    return load_partition(run.partition_path)


def _name(value: Any) -> Any:
    """The name in a table such as {name = "iid", clients = 4}; any other value is a name itself."""
    return value.get("name") if isinstance(value, Mapping) else value


def subtable(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table `key` of `of`, empty if there is none."""
    value = of.get(key)
    return value if isinstance(value, Mapping) else {}
