"""The rows of a comparison: one a run, or one for runs that differ in the seed alone; and the table of clients."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.base.format import (
    MISSING,
    count,
    duration,
    is_share,
    label,
    many,
    metric_value,
    number,
    percent,
    signed,
    size,
    smaller_is_better,
)
from fedlens.results.bound import CENTRALIZED, best_bound, passes, seedless, seeds_of
from fedlens.results.client_results import FEW, client_results, with_references, worst_clients
from fedlens.results.run import Run, subtable

Record = dict[str, Any]
_FORMATS: dict[str, Callable[[Any], str]] = {
    "rounds": count,
    "runs": count,
    "emd": lambda emd: number(None if emd is None else round(emd, 3)),
    "seconds": duration,
    "bytes": size,
}
# What a row of several seeds has the mean of; those of `_DEVIATIONS` have a deviation too.
_MEANS = (
    *("final", "best", "accuracy", "best_accuracy", "relative_accuracy"),
    *("clients_mean", "clients_worst_decile", "emd", "seconds", "bytes", "passes"),
)
_DEVIATIONS = _MEANS[:7]


# The clients of these are named by the data or a file, so that a seed does not make other clients.
_NAMED_CLIENTS = ("natural", "file", "federated-csv")


@dataclass(frozen=True)
class RunGroup:
    """Runs that are one row, and the row."""

    runs: Sequence[Run]
    row: Record

    @property
    def population(self) -> str | None:
        """The clients of the runs as text: equal for groups with the same clients; None if the runs' own differ."""
        populations = {population(run) for run in self.runs}
        return populations.pop() if len(populations) == 1 else None


def run_groups(runs: Sequence[Run], *, each: bool = False) -> list[RunGroup]:
    """The rows of a comparison, in the order of the first run of each; with `each`, one row a run."""
    centralized = [run for run in runs if run.part("algorithm") == CENTRALIZED]
    rows = [_row(run, name, centralized, runs) for run, name in zip(runs, labels(runs), strict=True)]
    if each:
        return [RunGroup([run], row) for run, row in zip(runs, rows, strict=True)]
    members: dict[tuple[str, ...], list[int]] = {}
    repeats = Counter[tuple[str, str]]()
    for k, run in enumerate(runs):
        if run.status != "finished":
            members[("alone", str(k))] = [k]
            continue
        settings, seeds = seedless(run), seeds_of(run)
        # A second run with the same seeds belongs to another row: it adds nothing to a mean over seeds.
        members.setdefault((settings, str(repeats[settings, seeds])), []).append(k)
        repeats[settings, seeds] += 1
    groups = [
        RunGroup([runs[k] for k in ks], merged([runs[k] for k in ks], [rows[k] for k in ks]))
        for ks in members.values()
    ]
    for group, name in zip(groups, group_labels(groups), strict=True):
        group.row["run"] = name
    return groups


def group_labels(groups: Sequence[RunGroup]) -> list[str]:
    """A name for each row: rows whose runs share a name get what differs, the algorithm, partition or folder."""
    named = [group.runs[0].name for group in groups]
    names = [group.row["run"] for group in groups]
    for name in {name for name in named if named.count(name) > 1}:
        places = [k for k, other in enumerate(named) if other == name]
        rows = [groups[k].row for k in places]
        folders = [groups[k].runs[0].path.resolve() for k in places]
        for differs in (
            [str(row["algorithm"]) for row in rows],
            [str(row["partition"]) for row in rows],
            [folder.parent.name for folder in folders],
            [folder.name for folder in folders],
        ):
            if len(set(differs)) == len(places):
                for k, part in zip(places, differs, strict=True):
                    names[k] = f"{name} ({part})"
                break
    return names


def population(run: Run) -> str:
    """The clients of a run as text: the dataset, the partition, and its seed if that makes other clients."""
    data, name = subtable(run.config, "data"), run.part("data", "partition")
    seed = (
        None
        if name in _NAMED_CLIENTS
        else subtable(run.config, "seeds").get("partition", run.config.get("seed"))
    )
    return repr(
        [data.get("dataset"), data.get("partition", data.get("parties")), bool(data.get("reassign")), seed]
    )


def merged(runs: Sequence[Run], rows: Sequence[Record]) -> Record:
    """One row for runs that differ in the seed alone: means, and deviations in `std`."""
    if len(rows) == 1:
        return rows[0]
    names = [run.name for run in runs]
    first = rows[0]
    row = {**first, "run": names[0] if len(set(names)) == 1 else first["run"], "runs": len(rows)}
    row["worst_client"] = None
    row |= {"seed": None, "seeds": [each["seed"] for each in rows], "best_round": None, "directory": None}
    row["directories"] = [each["directory"] for each in rows]
    row["warnings"] = sum(each["warnings"] for each in rows)
    for key in _MEANS:
        values = [each[key] for each in rows if each[key] is not None]
        row[key] = statistics.fmean(values) if values else None
        if key in _DEVIATIONS:
            row["std"] = row["std"] | {key: statistics.stdev(values) if len(values) > 1 else None}
    bounds = [each["bound"] for each in rows if each["bound"]]
    row["bound"] = {**bounds[0], "value": statistics.fmean(b["value"] for b in bounds)} if bounds else None
    without = [each for each in rows if each["relative_accuracy"] is None and each["note"]]
    if row["relative_accuracy"] is not None and without:
        found = len(rows) - len(without)
        row["note"] = (
            f"relative to a centralized run for {found} of {len(rows)} seeds only; {without[0]['note']}"
        )
    same = len({population(run) for run in runs}) == 1
    row["clients"] = _merged_clients([each["clients"] for each in rows]) if same else []
    return row


def _row(run: Run, name: str, centralized: Sequence[Run], runs: Sequence[Run]) -> Record:
    metric = run.metric()
    _, final = run.final(metric)
    best_round, best, chosen_on = run.best(metric)
    up, down, peer = (run.total(f"bytes_{way}") for way in ("up", "down", "peer"))
    accuracy = metric == "accuracy"
    spread = run.spread().get(metric, {})
    seed = run.summary.get("seed", run.config.get("seed"))
    row: Record = {
        "run": name,
        "runs": 1,
        "status": run.status,
        "warnings": len(run.warnings),
        "algorithm": run.part("algorithm"),
        "partition": _partition(run),
        "dataset": run.part("data", "dataset"),
        "model": run.part("model"),
        "seed": seed,
        "seeds": [seed],
        "rounds": run.rounds_done,
        "passes": passes(run),
        "metric": metric,
        "measured_on": run.split(),
        "final": final,
        "best": best,
        "best_round": best_round,
        "chosen_on": chosen_on,
        "accuracy": final if accuracy else None,
        "best_accuracy": best if accuracy else None,
        "relative_accuracy": None,
        "bound": None,
        "note": None,
        "clients_mean": spread.get("mean"),
        "clients_worst_decile": spread.get("worst_decile"),
        "worst_client": worst.client if (worst := worst_clients(run)) else None,
        "emd": run.emd(),
        "seconds": run.seconds(),
        "bytes": None if up is None and down is None else (up or 0) + (down or 0) + (peer or 0),
        "std": {},
        "directory": str(run.path),
        "directories": [str(run.path)],
        "clients": _clients(run, runs),
    }
    return row | _relative(run, final, centralized)


def _relative(run: Run, final: float | None, centralized: Sequence[Run]) -> Record:
    """relative_accuracy with its bound, or a note why there is none."""
    if run.part("algorithm") == CENTRALIZED:
        known = final is not None and final > 0 and run.status == "finished"
        return {"relative_accuracy": 1.0 if known else None}
    bounds, why = best_bound(run, centralized)
    if not bounds:
        return {"note": why and f"no relative {label(run.metric())}: {why}"}
    bound = statistics.fmean(value for each in bounds if (value := each.final(run.metric())[1]) is not None)
    about = {"run": bounds[0].name, "value": bound, "passes": passes(bounds[0])}
    return {"relative_accuracy": None if final is None else final / bound, "bound": about}


def _clients(run: Run, runs: Sequence[Run]) -> list[Record]:
    """The main metric at each client in the last round, and the differences to centralized and local-only runs."""
    alone = run.part("algorithm") in (CENTRALIZED, "local-only")
    results = client_results(run) if alone else with_references(run, runs)
    return [
        {
            "client": result.client,
            "examples": result.examples,
            "held_out": result.held_out,
            "value": result.last,
            "to_centralized": result.to_centralized,
            "to_local_only": result.to_local_only,
        }
        for result in results
        if result.last is not None
    ]


def _merged_clients(by_run: Sequence[Sequence[Record]]) -> list[Record]:
    """The means of each client that all runs measured, the worst first."""
    by_client = [{row["client"]: row for row in rows} for rows in by_run]
    rows = []
    for row in by_run[0]:
        same = [clients[row["client"]] for clients in by_client if row["client"] in clients]
        if len(same) == len(by_run):
            values = {
                key: [each[key] for each in same] for key in ("value", "to_centralized", "to_local_only")
            }
            means = {key: None if None in each else statistics.fmean(each) for key, each in values.items()}
            rows.append({**row, **means})
    return sorted(rows, key=lambda row: row["value"])


def _partition(run: Run) -> str | None:
    """The partition with its settings other than the number of clients: `dirichlet alpha=0.1`."""
    data = subtable(run.config, "data")
    table = subtable(data, "partition") or subtable(data, "parties")
    settings = [f"{key}={value}" for key, value in table.items() if key not in ("name", "clients", "seed")]
    name = run.part("data", "partition") or ("parties" if "parties" in data else None)
    return name and " ".join([name, *settings, *(["reassigned"] if data.get("reassign") else [])])


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, with its run id if two share the name, and a number if they share both."""
    names = Counter(run.name for run in runs)
    with_ids = [run.name if names[run.name] == 1 else f"{run.name} ({run.run_id})" for run in runs]
    repeats = Counter(with_ids)
    return [
        name if repeats[name] == 1 else f"{name} #{with_ids[: k + 1].count(name)}"
        for k, name in enumerate(with_ids)
    ]


def readable(rows: Sequence[Record]) -> list[dict[str, str]]:
    """The rows of `compare` as text for a table, with the same columns in every row.

    The column `runs` needs a row of several seeds, `relative` a run with a relative accuracy, the columns of clients a
    run with per-client evaluation, and `measured on` a run without a single global model. A mean over seeds has its
    deviation behind it.
    """
    metrics = {row["metric"] for row in rows}
    suffix = "" if len(metrics) > 1 else " " + label("".join(metrics))

    def text(row: Record, key: str) -> str:
        if key in ("final", "best"):
            return _with_deviation(row, key) + ("" if suffix else f" {row['metric']}")
        if key == "relative_accuracy" or key.startswith("clients_"):
            named = key == "clients_worst_decile" and row["worst_client"] is not None
            return _with_deviation(row, key) + (f" ({row['worst_client']})" if named else "")
        write = _FORMATS.get(key)
        return write(row[key]) if write else str(row[key] or MISSING)

    titles = {key: key for key in ("run", "runs", "algorithm", "partition", "dataset", "rounds")}
    if all(row["runs"] == 1 for row in rows):
        del titles["runs"]
    # "best" alone would read as the best value of the curve.
    chosen = {row["chosen_on"] for row in rows if row["best"] is not None}
    by_validation = chosen == {"validation"} and any(row["measured_on"] == "test" for row in rows)
    best = f"{suffix.strip()} at best validation round".strip() if by_validation else f"best{suffix}"
    titles |= {"final": f"final{suffix}", "best": best}
    optional = {
        "relative_accuracy": "relative",
        "clients_mean": "mean of clients",
        "clients_worst_decile": "worst tenth of clients",
    }
    if all(0 < len(row["clients"]) < FEW for row in rows if row["clients_worst_decile"] is not None):
        optional["clients_worst_decile"] = "worst client"
    titles |= {key: title for key, title in optional.items() if any(row[key] is not None for row in rows)}
    titles |= {"emd": "EMD", "seconds": "time", "bytes": "data"}
    if any(row["measured_on"] != "test" for row in rows):
        titles["measured_on"] = "measured on"
    return [{title: text(row, key) for key, title in titles.items()} for row in rows]


def _with_deviation(row: Record, key: str) -> str:
    """A value, and the deviation over seeds in the same unit."""
    share = key == "relative_accuracy" or is_share(row["metric"])
    value = percent(row[key]) if share else metric_value(row["metric"], row[key])
    deviation = row["std"].get(key)
    if deviation is None:
        return value
    return f"{value} ± {100 * deviation:.1f}" if share else f"{value} ± {number(deviation)}"


def notes(rows: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know: the bounds of relative accuracy, why one is missing, warnings."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["bound"]:
            value = metric_value(row["metric"], row["bound"]["value"])
            against = f"relative to the centralized run {row['bound']['run']}, {value}{_length(row['bound'])}"
            said.setdefault(against, []).append(f"{row['run']}{_length(row)}")
        if row["note"]:
            said.setdefault(row["note"], []).append(row["run"])
        if row["warnings"]:
            said.setdefault(f"{many(row['warnings'], 'warning')} on the page of the run", []).append(
                row["run"]
            )
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
    baselines = ("centralized", "local-only")
    measured = [group for group in groups if group.row["clients"]]
    measured.sort(key=lambda group: group.row["algorithm"] in baselines)  # stable: federated runs first
    ordered = [group.row for group in measured if group.population == measured[0].population]
    if not ordered:
        return [], []
    columns, head = [], ["client", "held out"]
    for row in ordered:
        by_client = {each["client"]: each for each in row["clients"]}
        columns.append((row, "value", by_client))
        head.append(row["run"])
        for key, words in (("to_centralized", "vs centralized"), ("to_local_only", "vs local-only")):
            if any(each[key] is not None for each in row["clients"]):
                columns.append((row, key, by_client))
                head.append(
                    words if len(ordered) == 1 or _alone(ordered, baselines) else f"{row['run']} {words}"
                )
    first: dict[str, tuple[int, float]] = {}
    held_out: dict[str, int] = {}
    for place, row in enumerate(ordered):
        sign = -1 if smaller_is_better(row["metric"]) else 1
        for each in row["clients"]:
            first.setdefault(each["client"], (place, sign * each["value"]))
            held_out.setdefault(each["client"], each["held_out"])
    texts = [
        [client, f"{held_out[client]:,}", *(_cell(row, by.get(client), key) for row, key, by in columns)]
        for client in sorted(first, key=lambda client: (*first[client], client))
    ]
    return head, texts


def client_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Why clients of a run are not in the table, or cannot be compared with those of the first run."""
    baselines = ("centralized", "local-only")
    measured = sorted(
        (group for group in groups if group.row["clients"]),
        key=lambda group: group.row["algorithm"] in baselines,
    )
    notes = []
    for group in groups:
        spread = group.row["clients_mean"] is not None
        if spread and not group.row["clients"] and group.population is None:
            notes.append(
                f"{group.row['run']}: its seeds have different clients, so it is not in the table of clients"
            )
    for group in measured[1:]:
        first, name = measured[0], group.row["run"]
        if group.population != first.population:
            notes.append(
                f"{name}: its clients have other images than those of {first.row['run']}, so they are not in the table "
                "of clients; compare it alone to see them"
            )
        elif _held_out(group).isdisjoint(_held_out(first)):
            notes.append(
                f"{name}: its clients hold out other images than those of {first.row['run']}, so their values differ "
                "by chance too"
            )
    return notes


def _held_out(group: RunGroup) -> set[str | None]:
    """The digests of the held-out images of a group's runs; None stands for an older run without one."""
    return {run.recorded("partition", "held_out_digest") for run in group.runs}


def _alone(ordered: Sequence[Record], baselines: Sequence[str]) -> bool:
    """Whether only one run is no baseline, so that a difference can only be its own."""
    return sum(row["algorithm"] not in baselines for row in ordered) == 1


def _cell(row: Record, client: Record | None, key: str) -> str:
    if client is None or client[key] is None:
        return MISSING
    if key == "value":
        return metric_value(row["metric"], client[key])
    return signed(row["metric"], client[key])
