"""Runs side by side: a row for each, or one for runs that differ in the seed alone, and a table of their clients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedlens.base.errors import ConfigError
from fedlens.base.format import (
    MISSING,
    computed,
    count,
    duration,
    label,
    many,
    metric_value,
    number,
    signed,
    size,
)
from fedlens.results.bound import CENTRALIZED, best_bound, seedless, seeds_of
from fedlens.results.cells import better
from fedlens.results.client_results import FEW, ClientResult, with_references, worst_clients
from fedlens.results.run import Run, read_runs, subtable
from fedlens.results.statistics import deviation, mean

Record = dict[str, Any]
Value: TypeAlias = Callable[[Run, str], float | None]
# The final value over that of the bound, the bound, and why there is none.
Relative: TypeAlias = tuple[float | None, Record | None, str | None]

BASELINES = (CENTRALIZED, "local-only")
# The clients of these are named by the data or a file, so that a seed does not make other clients.
_NAMED_CLIENTS = ("natural", "file", "federated-csv")
# What a row of several seeds has the mean of.
_VALUES: dict[str, Value] = {
    "final": lambda run, metric: run.final(metric)[1],
    "best": lambda run, metric: run.best(metric)[1],
    "emd": lambda run, _: run.emd(),
    "seconds": lambda run, _: run.seconds(),
    "bytes": lambda run, _: _bytes(run),
    "passes": lambda run, _: run.passes(),
}
# What it has the deviation of too.
_DEVIATIONS = (
    *("final", "best", "accuracy", "best_accuracy", "relative_accuracy"),
    *("clients_mean", "clients_worst_decile"),
)
_FORMATS: dict[str, Callable[[Any], str]] = {
    "rounds": count,
    "runs": count,
    "emd": lambda emd: number(None if emd is None else round(emd, 3)),
    "seconds": duration,
    "bytes": size,
}


@dataclass(frozen=True)
class RunGroup:
    """Runs that are one row, and the row."""

    runs: Sequence[Run]
    row: Record

    @property
    def population(self) -> str | None:
        """The clients of the runs as text: equal for groups with the same clients; None if the runs' own differ."""
        return _population(self.runs)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Args:
        groups: the runs of each row, and the row; see `compare`.
        skipped: a sentence for each run that cannot be read.
    """

    groups: Sequence[RunGroup]
    skipped: Sequence[str] = ()

    @classmethod
    def of(cls, paths: Sequence[Path | str], *, each: bool = False) -> Comparison:
        """The comparison of the runs that `paths` name: run directories, folders with runs below them, patterns.

        With `each`, runs that differ in the seed alone are rows of their own.

        Raises `RunDirectoryError` if a path gives no run, or none can be read.
        """
        runs, skipped = read_runs(paths)
        return cls(run_groups(runs, each=each), skipped)

    @property
    def rows(self) -> list[Record]:
        """See `compare`."""
        return [group.row for group in self.groups]

    @property
    def notes(self) -> list[str]:
        """What ± is; the bounds of relative accuracy and why a run has none; why clients cannot be compared."""
        spread = "± is the sample standard deviation over the seeds of the row"
        seeds = [spread] if any(row["std"] for row in self.rows) else []
        return [*seeds, *_notes(self.rows), *_client_notes(self.groups)]

    def with_column(self, metric: str) -> tuple[list[Record], list[dict[str, str]]]:
        """The rows, and those of `readable`, with the last value of one more metric: `final_loss`, "final loss".

        Args:
            metric: a metric, `loss`, or a number that a component has set each round.

        Raises `ConfigError` if no run has values of it.
        """
        rows, texts = [dict(row) for row in self.rows], readable(self.rows)
        found = [
            [value for run in group.runs if (value := _last(run, metric)) is not None]
            for group in self.groups
        ]
        if not any(found):
            raise no_values(metric, self)
        name = metric if metric in own_numbers(self.groups) else label(metric)
        for row, text, values in zip(rows, texts, found, strict=True):
            value, spread = (mean(values), deviation(values)) if values else (None, None)
            row |= {f"final_{metric}": value, "std": {**row["std"], f"final_{metric}": spread}}
            text[f"final {name}"] = metric_value(metric, value, spread)
        return rows, texts


def own_numbers(groups: Sequence[RunGroup]) -> list[str]:
    """The columns that the components of the runs have set, in the order in which they first occur."""
    runs = [run for group in groups for run in group.runs]
    return list(dict.fromkeys(n for run in runs for line in run.metrics for n in line if not computed(n)))


def no_values(metric: str, comparison: Comparison) -> ConfigError:
    """The error for a metric that no run has."""
    known = dict.fromkeys(row["metric"] for row in comparison.rows)
    return ConfigError(
        f"no run has values of '{metric}'",
        where="--metric",
        hint=f"choose one of: {', '.join([*known, 'loss', *own_numbers(comparison.groups)])}",
    )


def _last(run: Run, metric: str) -> float | None:
    """The last value of a metric, or of a number that a component has set."""
    values = run.finite(f"{run.split()}_{metric}") or ([] if computed(metric) else run.finite(metric))
    return values[-1] if values else None


def run_groups(runs: Sequence[Run], *, each: bool = False) -> list[RunGroup]:
    """The rows of a comparison, in the order of the first run of each; with `each`, one row a run."""
    members: dict[tuple[str, ...], list[Run]] = {}
    repeats = Counter[tuple[str, str]]()
    for k, run in enumerate(runs):
        if each or run.status != "finished":
            members[("alone", str(k))] = [run]
            continue
        settings, seeds = seedless(run), seeds_of(run)
        # A second run with the same seeds belongs to another row: it adds nothing to a mean over seeds.
        members.setdefault((settings, str(repeats[settings, seeds])), []).append(run)
        repeats[settings, seeds] += 1
    groups = list(members.values())
    labels = _labels(runs)
    names = [labels[run.path] for run in runs] if each else _row_names(groups, labels)
    full = {run.algorithm for run in runs}
    rows = [_row(name, group, runs) for name, group in zip(names, groups, strict=True)]
    if len({_without_folder(name) for name in full}) == len(full):  # no two differ in the folder alone
        rows = [{**row, "algorithm": _without_folder(row["algorithm"])} for row in rows]
    return [RunGroup(group, row) for group, row in zip(groups, rows, strict=True)]


def _labels(runs: Sequence[Run]) -> dict[Path, str]:
    """A name for each run, with its run id if two share the name, and a number if they share both."""
    names = Counter(run.name for run in runs)
    with_ids = [run.name if names[run.name] == 1 else f"{run.name} ({run.run_id})" for run in runs]
    repeats = Counter(with_ids)
    return {
        run.path: name if repeats[name] == 1 else f"{name} #{with_ids[: k + 1].count(name)}"
        for k, (run, name) in enumerate(zip(runs, with_ids, strict=True))
    }


def _row_names(groups: Sequence[Sequence[Run]], labels: Mapping[Path, str]) -> list[str]:
    """A name for each row: rows whose runs share a name get what differs, the algorithm, partition or folder."""
    ways: Sequence[Callable[[Run], str | None]] = (
        lambda run: _without_folder(run.algorithm),
        _partition,
        lambda run: run.path.resolve().parent.name,
        lambda run: run.path.resolve().name,
    )
    by_name: dict[str, list[Run]] = {}
    for group in groups:
        by_name.setdefault(_shared_name(group) or group[0].name, []).append(group[0])
    names = {group[0].path: _shared_name(group) or labels[group[0].path] for group in groups}
    for name, alike in by_name.items():
        for way in ways if len(alike) > 1 else ():
            parts = {run.path: way(run) for run in alike}
            if len(set(parts.values())) == len(alike):
                names |= {path: f"{name} ({part})" for path, part in parts.items()}
                break
    return [names[group[0].path] for group in groups]


def _shared_name(group: Sequence[Run]) -> str | None:
    """The name that several runs share, such as "fedavg" of "fedavg-seed0" and "fedavg-seed1"."""
    names = {run.name for run in group}
    if len(names) > 1:
        names = {re.sub(r"([-_ ]+s|[-_ ]*seed)?[-_ ]*\d+$", "", name) for name in names}
    return (names.pop() or None) if len(group) > 1 and len(names) == 1 else None


def _without_folder(name: str | None) -> str | None:
    """An algorithm of the user's own by the name of its file alone: "my_prox.py:my_prox"."""
    return name and name.rpartition("/")[2]


def _row(name: str, runs: Sequence[Run], every: Sequence[Run]) -> Record:
    """The row of runs that differ in the seed alone: means, and deviations in `std`."""
    first, alone, metric = runs[0], len(runs) == 1, runs[0].metric()
    values = {key: [value(run, metric) for run in runs] for key, value in _VALUES.items()}
    spreads = [run.spread().get(metric, {}) for run in runs]
    values |= {f"clients_{name}": [each.get(name) for each in spreads] for name in ("mean", "worst_decile")}
    if metric == "accuracy":
        values |= {"accuracy": values["final"], "best_accuracy": values["best"]}
    relative = [_relative(run, metric, every) for run in runs]
    values["relative_accuracy"] = [value for value, _, _ in relative]
    means = {key: mean(each) for key, each in values.items()}
    at, _, chosen_on = first.best(metric)
    worst = worst_clients(first) if alone else None
    seeds = [run.summary.get("seed", run.config.get("seed")) for run in runs]
    directories, algorithm = [str(run.path) for run in runs], first.part("algorithm")
    return {
        "run": name,
        "runs": len(runs),
        "status": first.status,
        "warnings": sum(len(run.warnings) for run in runs),
        "algorithm": algorithm if algorithm in BASELINES else first.algorithm,
        "partition": _partition(first),
        "dataset": first.part("data", "dataset"),
        "model": first.part("model"),
        "seed": seeds[0] if alone else None,
        "seeds": seeds,
        "rounds": first.rounds_done,
        "passes": means["passes"],
        "metric": metric,
        "measured_on": first.split(),
        "final": means["final"],
        "best": means["best"],
        "best_round": at if alone else None,
        "chosen_on": chosen_on,
        "accuracy": means.get("accuracy"),
        "best_accuracy": means.get("best_accuracy"),
        "relative_accuracy": means["relative_accuracy"],
        "bound": _mean_bound([bound for _, bound, _ in relative if bound]),
        "note": _note(relative),
        "clients_mean": means["clients_mean"],
        "clients_worst_decile": means["clients_worst_decile"],
        "worst_client": worst.client if worst else None,
        "emd": means["emd"],
        "seconds": means["seconds"],
        "bytes": means["bytes"],
        "std": {} if alone else {key: deviation(values.get(key, ())) for key in _DEVIATIONS},
        "directory": directories[0] if alone else None,
        "directories": directories,
        "clients": _clients(runs, every),
    }


def _bytes(run: Run) -> float | None:
    up, down, peer = (run.total(f"bytes_{way}") for way in ("up", "down", "peer"))
    return None if up is None and down is None else (up or 0) + (down or 0) + (peer or 0)


def _relative(run: Run, metric: str, every: Sequence[Run]) -> Relative:
    final = run.final(metric)[1]
    if run.part("algorithm") == CENTRALIZED:
        return 1.0 if final is not None and final > 0 and run.status == "finished" else None, None, None
    bound, why = best_bound(run, every)
    if bound is None:
        return None, None, why and f"no relative {label(metric)}: {why}"
    return None if final is None else final / bound["value"], bound, None


def _mean_bound(bounds: Sequence[Record]) -> Record | None:
    return {**bounds[0], "value": mean(bound["value"] for bound in bounds)} if bounds else None


def _note(relative: Sequence[Relative]) -> str | None:
    """Why runs have no relative value, and how many of them have one."""
    lost = [note for value, _, note in relative if value is None and note]
    if not lost or all(value is None for value, _, _ in relative):
        return relative[0][2]
    found = len(relative) - len(lost)
    return f"relative to a centralized run for {found} of {len(relative)} seeds only; {lost[0]}"


def _clients(runs: Sequence[Run], every: Sequence[Run]) -> list[Record]:
    """The main metric at each client that all runs measured, and its differences to baselines, the worst first.

    Of several runs they are means; empty if these have different clients.
    """
    if _population(runs) is None:
        return []
    by_run = [_measured_clients(run, every) for run in runs]
    shared = [[of[name] for of in by_run if name in of] for name in by_run[0]]
    rows = [
        {
            "client": same[0].client,
            "examples": same[0].examples,
            "held_out": same[0].held_out,
            "value": mean(each.last for each in same),
            "to_centralized": _mean_of_all([each.to_centralized for each in same]),
            "to_local_only": _mean_of_all([each.to_local_only for each in same]),
        }
        for same in shared
        if len(same) == len(runs)
    ]
    return sorted(rows, key=lambda row: better(runs[0].metric(), row["value"]))


def _measured_clients(run: Run, every: Sequence[Run]) -> dict[str, ClientResult]:
    others = () if run.part("algorithm") in BASELINES else every
    return {result.client: result for result in with_references(run, others) if result.last is not None}


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    return None if None in values else mean(values)


def _population(runs: Sequence[Run]) -> str | None:
    """The dataset, the partition, and its seed if that makes other clients; None if it is not the same for all."""
    texts = set()
    for run in runs:
        data, seed = subtable(run.config, "data"), run.config.get("seed")
        seed = subtable(run.config, "seeds").get("partition", seed)
        if run.part("data", "partition") in _NAMED_CLIENTS:
            seed = None
        named = data.get("partition", data.get("parties"))
        texts.add(repr([data.get("dataset"), named, bool(data.get("reassign")), seed]))
    return texts.pop() if len(texts) == 1 else None


def _partition(run: Run) -> str | None:
    """The partition with its settings other than the number of clients: `dirichlet alpha=0.1`."""
    data = subtable(run.config, "data")
    table = subtable(data, "partition") or subtable(data, "parties")
    settings = [f"{key}={value}" for key, value in table.items() if key not in ("name", "clients", "seed")]
    name = run.part("data", "partition") or ("parties" if "parties" in data else None)
    return name and " ".join([name, *settings, *(["reassigned"] if data.get("reassign") else [])])


def readable(rows: Sequence[Record]) -> list[dict[str, str]]:
    """The rows of `compare` as text for a table, with the same columns in every row.

    The column `runs` needs a row of several seeds, `relative` a run with a relative accuracy, the columns of clients a
    run with per-client evaluation, and `measured on` a run without a single global model. A mean over seeds has its
    deviation behind it.
    """
    metrics = {row["metric"] for row in rows}
    metric = label("".join(metrics)) if len(metrics) == 1 else ""
    # "best" alone would read as the best value of the curve.
    chosen = {row["chosen_on"] for row in rows if row["best"] is not None}
    by_validation = chosen == {"validation"} and any(row["measured_on"] == "test" for row in rows)
    few = all(0 < len(row["clients"]) < FEW for row in rows if row["clients_worst_decile"] is not None)
    titles = {
        **{key: key for key in ("run", "runs", "algorithm", "partition", "dataset", "rounds")},
        "final": f"final {metric}".strip(),
        "best": f"{metric} at best validation round".strip() if by_validation else f"best {metric}".strip(),
        "relative_accuracy": "relative",
        "clients_mean": "mean of clients",
        "clients_worst_decile": "worst client" if few else "worst tenth of clients",
        **{"emd": "EMD", "seconds": "time", "bytes": "data", "measured_on": "measured on"},
    }
    if all(row["runs"] == 1 for row in rows):
        del titles["runs"]
    if all(row["measured_on"] == "test" for row in rows):
        del titles["measured_on"]
    for key in ("relative_accuracy", "clients_mean", "clients_worst_decile"):
        if all(row[key] is None for row in rows):
            del titles[key]
    return [{title: _text(row, key, not metric) for key, title in titles.items()} for row in rows]


def _text(row: Record, key: str, several: bool) -> str:
    """A cell of the table; of `several` metrics, values name theirs."""
    if write := _FORMATS.get(key):
        return write(row[key])
    if key not in _DEVIATIONS:
        return str(row[key] or MISSING)
    metric = "accuracy" if key == "relative_accuracy" else row["metric"]
    text = metric_value(metric, row[key], row["std"].get(key))
    if several and key in ("final", "best"):
        return f"{text} {metric}"
    named = key == "clients_worst_decile" and row["worst_client"] is not None
    return f"{text} ({row['worst_client']})" if named else text


def _notes(rows: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know: the bounds of relative accuracy, why one is missing, warnings."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if bound := row["bound"]:
            value = metric_value(row["metric"], bound["value"])
            against = f"relative to the centralized run {bound['run']}, {value}{_length(bound)}"
            said.setdefault(against, []).append(f"{row['run']}{_length(row)}")
        warned = row["warnings"] and f"{many(row['warnings'], 'warning')} on the page of the run"
        for sentence in filter(None, (row["note"], warned)):
            said.setdefault(sentence, []).append(row["run"])
    return [f"{', '.join(runs)}: {sentence}" for sentence, runs in said.items()]


def _length(row: Record) -> str:
    """How long a run trained: " (60 passes over the data)"."""
    return f" ({row['passes']:.3g} passes over the data)" if row["passes"] else ""


def client_table(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """(the head, one row of texts a client) of a comparison; the worst client comes first.

    For each run with clients measured: the value of its metric at the client in the last round, and, where a
    centralized or a local-only run with the same clients is among the runs, the difference to it. Runs on
    another partition than the first federated run are left out: they have other clients. A client is sorted by its
    value in the first run that measured it. Empty without measured clients.
    """
    measured = _with_clients(groups)
    rows = [group.row for group in measured if group.population == measured[0].population]
    if not rows:
        return [], []
    # A difference is of the only run that is no baseline, if there is one only.
    alone = sum(row["algorithm"] not in BASELINES for row in rows) == 1
    head, columns = ["client", "held out"], []
    order: dict[str, tuple[int, float]] = {}
    held_out: dict[str, int] = {}
    for place, row in enumerate(rows):
        name, metric = row["run"], row["metric"]
        by_client = {each["client"]: each for each in row["clients"]}
        for client, each in by_client.items():
            order.setdefault(client, (place, better(metric, each["value"])))
            held_out.setdefault(client, each["held_out"])
        for key, words, write in (
            ("value", name, metric_value),
            ("to_centralized", "vs centralized" if alone else f"{name} vs centralized", signed),
            ("to_local_only", "vs local-only" if alone else f"{name} vs local-only", signed),
        ):
            values = {c: write(metric, v) for c, each in by_client.items() if (v := each[key]) is not None}
            if values:
                head.append(words)
                columns.append(values)
    clients = sorted(order, key=lambda client: (*order[client], client))
    return head, [[c, f"{held_out[c]:,}", *(texts.get(c, MISSING) for texts in columns)] for c in clients]


def _client_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Why clients of a run are not in the table, or cannot be compared with those of the first run."""
    notes = [
        f"{group.row['run']}: its seeds have different clients, so it is not in the table of clients"
        for group in groups
        if group.row["clients_mean"] is not None and not group.row["clients"] and group.population is None
    ]
    measured = _with_clients(groups)
    for group in measured[1:]:
        first = measured[0]
        if group.population != first.population:
            notes.append(
                f"{group.row['run']}: its clients have other images than those of {first.row['run']}, so they are not "
                "in the table of clients; compare it alone to see them"
            )
        elif _held_out(group).isdisjoint(_held_out(first)):
            notes.append(
                f"{group.row['run']}: its clients hold out other images than those of {first.row['run']}, so their "
                "values differ by chance too"
            )
    return notes


def _with_clients(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Those that measured clients, federated runs first."""
    measured = [group for group in groups if group.row["clients"]]
    return sorted(measured, key=lambda group: group.row["algorithm"] in BASELINES)


def _held_out(group: RunGroup) -> set[str | None]:
    """The digests of the held-out images of a group's runs; None stands for an older run without one."""
    return {run.recorded("partition", "held_out_digest") for run in group.runs}
