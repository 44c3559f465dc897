"""The table of clients of a comparison: a row a client, a column a run."""

from __future__ import annotations

from collections.abc import Sequence

from fedlens.base.format import MISSING, metric_value, signed, smaller_is_better
from fedlens.report.compare_rows import Record, RunGroup


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
