"""What federation costs, computed from the runs below one directory: overall and for each client."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedlens.core.errors import FedlensError
from fedlens.report.client_results import ClientResult, client_results
from fedlens.report.format import is_share, label, metric_value, points, signed
from fedlens.report.read import Run, read_run

Values: TypeAlias = dict[int, float]  # by seed

WORDS = {
    "federated": "federated",
    "iid": "IID clients",
    "centralized": "centralized",
    "local-only": "local-only",
}
UNSURE = "no clear difference"


@dataclass(frozen=True)
class Difference:
    """The mean of a difference over seeds, paired by seed, and its 95 % interval.

    Args:
        low, high: mean -/+ t(0.975, n - 1) s / sqrt(n), s being the sample deviation of the n differences; never
            narrower than `resolution` to each side. None with a single seed.
        seeds: n.
        resolution: what one image changes.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    resolution: float = 0.0

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def sign(self) -> int | None:
        """1 or -1 if the interval excludes 0, 0 if it does not, None with a single seed."""
        if self.low is None:
            return None
        return int(math.copysign(1, self.mean)) if self.certain else 0


def difference(
    first: Values, second: Values, resolution: float = 0.0, most: float = math.inf
) -> Difference | None:
    """`first` - `second` over the seeds that both have; None if they share none.

    The interval is cut at -`most` and `most`, the largest possible differences.

    >>> d = difference({0: 0.9, 1: 0.8, 2: 0.85}, {0: 0.7, 1: 0.65, 2: 0.6})
    >>> round(d.mean, 4), round(d.low, 4), round(d.high, 4), d.sign
    (0.2, 0.0758, 0.3242, 1)
    >>> difference({0: 0.9, 1: 0.9}, {0: 0.8, 1: 0.8}, resolution=0.25).sign
    0
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    values = [first[seed] - second[seed] for seed in seeds]
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Difference(mean, None, None, 1, resolution)
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / math.sqrt(n)
    half = max(half, resolution, 1e-12)
    return Difference(mean, max(mean - half, -most), min(mean + half, most), n, resolution)


def cost_answer(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs below `directory` say. `about` is what `fedlens.cost` planned: name, seeds, work, notes, runs.

    Keys, besides those of `about`:

    - `metric`, `measured_on`: the main metric, and "test" or "clients" (personal models have no test value).
    - `overall`: by role, `test` and `clients` (mean over clients), each with mean, std (None with one seed) and n.
    - `differences`: by name ("partition": federated - IID; "federation": federated - centralized, on
      `measured_on`; "joining": federated - local-only, mean over clients): mean, low, high, seeds, sign.
    - `clients`: one row a client, the lowest federated value first: client, examples, held_out, classes, a mean for
      each role, `vs_centralized` and `vs_local_only` as in `differences`, and `verdict`.
    - `sentences`: the answer in words.
    - `runs`: one row a run: name, role, seed, status, error, rounds, passes, value, seconds.
    """
    runs = {row["name"]: _read(directory / row["name"]) for row in about["runs"]}
    rows = [_run_row(row, runs[row["name"]]) for row in about["runs"]]
    finished = {
        (row["role"], row["seed"]): run
        for row in rows
        if (run := runs[row["name"]]) is not None and row["status"] == "finished"
    }
    metric = next((run.metric() for (role, _), run in finished.items() if role == "federated"), "accuracy")
    tested, at_clients = _by_role(finished, metric), _at_clients(finished)
    means = {
        role: {
            seed: statistics.fmean(_last(result) for result in results.values())
            for seed, results in by_seed.items()
        }
        for role, by_seed in at_clients.items()
    }
    overall = {
        role: {"test": _spread(tested.get(role, {})), "clients": _spread(means.get(role, {}))}
        for role in WORDS
        if role in tested or role in means
    }
    on = "test" if tested.get("federated") else "clients"
    values = tested if on == "test" else means
    none: Values = {}
    most = 1.0 if is_share(metric) else math.inf
    differences = {
        "partition": difference(values.get("federated", none), values.get("iid", none), most=most),
        "federation": difference(
            (values if values.get("centralized") else means).get("federated", none),
            (values if values.get("centralized") else means).get("centralized", none),
            most=most,
        ),
        "joining": difference(means.get("federated", none), means.get("local-only", none), most=most),
    }
    clients = _client_rows(at_clients, most)
    answer = {
        **about,
        "runs": rows,
        "metric": metric,
        "measured_on": on,
        "overall": overall,
        "differences": {name: _as_row(each) for name, each in differences.items()},
        "clients": clients,
    }
    return {**answer, "sentences": sentences(answer)}


def _read(directory: Path) -> Run | None:
    with suppress(FedlensError):
        return read_run(directory)
    return None


def _run_row(row: Mapping[str, Any], run: Run | None) -> dict[str, Any]:
    if run is None:
        return {**row, "status": "failed" if row["error"] else "not started", "rounds": 0, "seconds": None}
    status = "failed" if row["error"] else run.status
    examples, images = run.total("examples"), run.recorded("partition", "examples")
    return {
        **row,
        "status": status,
        "rounds": run.rounds_done,
        "passes": examples / images if examples and images else None,
        "value": run.final(run.metric())[1],
        "measured_on": run.split(),
        "seconds": run.seconds(),
    }


def _by_role(finished: Mapping[tuple[str, int], Run], metric: str) -> dict[str, Values]:
    """The final test value of each role and seed."""
    values: dict[str, Values] = {}
    for (role, seed), run in finished.items():
        value = run.final(metric)[1]
        if run.split() == "test" and value is not None:
            values.setdefault(role, {})[seed] = value
    return values


def _at_clients(finished: Mapping[tuple[str, int], Run]) -> dict[str, dict[int, dict[str, ClientResult]]]:
    """Each client's result, by role, seed and client."""
    results: dict[str, dict[int, dict[str, ClientResult]]] = {}
    for (role, seed), run in finished.items():
        measured = {row.client: row for row in client_results(run) if row.last is not None}
        if measured:
            results.setdefault(role, {})[seed] = measured
    return results


def _client_rows(
    at_clients: Mapping[str, Mapping[int, Mapping[str, ClientResult]]], most: float
) -> list[dict[str, Any]]:
    federated = at_clients.get("federated", {})
    first = {name: result for results in federated.values() for name, result in results.items()}
    rows = []
    for name, result in first.items():
        # The IID twin has other images at each client.
        values = {
            role: {seed: _last(results[name]) for seed, results in by_seed.items() if name in results}
            for role, by_seed in at_clients.items()
            if role != "iid"
        }
        one_image = 1 / result.held_out if result.held_out else 0.0
        compared = {
            key: difference(values["federated"], values.get(role, {}), one_image, most)
            for key, role in (("vs_centralized", "centralized"), ("vs_local_only", "local-only"))
        }
        rows.append(
            {
                "client": name,
                "examples": result.examples,
                "held_out": result.held_out,
                "classes": list(result.classes),
                **{role: statistics.fmean(v.values()) if v else None for role, v in values.items()},
                **{key: _as_row(each) for key, each in compared.items()},
                "verdict": verdict(compared["vs_local_only"]),
            }
        )
    return sorted(rows, key=lambda row: (row["federated"], str(row["client"])))


def _last(result: ClientResult) -> float:
    """The last value of a client that was measured."""
    assert result.last is not None
    return result.last


def verdict(joining: Difference | None) -> str | None:
    """Whether a client gains or loses by joining, from federated - local-only; None if it is unknown."""
    if joining is None or joining.sign is None:
        return None
    return {1: "gains", -1: "loses", 0: UNSURE}[joining.sign]


def _as_row(each: Difference | None) -> dict[str, Any] | None:
    return None if each is None else {**asdict(each), "sign": each.sign}


def _spread(values: Values) -> dict[str, Any] | None:
    if not values:
        return None
    numbers = list(values.values())
    std = statistics.stdev(numbers) if len(numbers) > 1 else None
    return {"mean": statistics.fmean(numbers), "std": std, "n": len(numbers)}


def interval_text(metric: str, row: Mapping[str, Any] | None) -> str:
    """The interval of a difference: "-5.2 to -3.0"; empty without one."""
    if row is None or row["low"] is None:
        return ""
    return f"{signed(metric, row['low'])} to {signed(metric, row['high'])}"


def sentences(answer: Mapping[str, Any]) -> list[str]:
    """The answer in words: the cost of the partition, the worst client, who gains by joining."""
    said = [_partition_sentence(answer), _federation_sentence(answer), _worst_sentence(answer)]
    said.append(_joining_sentence(answer))
    first = ("the ", "federation ", "what ")  # a client's name stays as it is
    return [s[:1].upper() + s[1:] if s.startswith(first) else s for s in said if s]


def _value_of(answer: Mapping[str, Any], role: str, on: str) -> str | None:
    spread = (answer["overall"].get(role) or {}).get(on)
    return None if spread is None else metric_value(answer["metric"], spread["mean"])


def _cost_words(answer: Mapping[str, Any], row: Mapping[str, Any], what: str) -> str:
    """The cost with its interval: "the partition costs 4.1 points of accuracy (95 % interval 3.0 to 5.2, 3 seeds)"."""
    metric = answer["metric"]
    of = f" of {label(metric)}" if is_share(metric) else ""
    seeds = f"{row['seeds']} seed{'' if row['seeds'] == 1 else 's'}"
    gain = row["mean"] > 0 and points(metric, row["mean"]) != points(metric, 0.0)
    if row["sign"] == 0:
        cost = signed(metric, -row["mean"])
        bounds = _bounds(metric, -row["high"], -row["low"])
        unit = f" points{of}" if of else ""
        return f"{what} has no clear cost: {cost}{unit} (95 % interval {bounds}, {seeds})"
    words = f"{what} {'gains' if gain else 'costs'} {points(metric, row['mean'])}{of}"
    if row["low"] is None:
        return f"{words} ({seeds})"
    ends = (row["low"], row["high"]) if gain else (-row["high"], -row["low"])
    return f"{words} (95 % interval {_bounds(metric, *ends)}, {seeds})"


def _bounds(metric: str, low: float, high: float) -> str:
    """An interval without plus signs: "3.0 to 5.2"."""
    return " to ".join(signed(metric, bound).removeprefix("+") for bound in (low, high))


def _partition_sentence(answer: Mapping[str, Any]) -> str:
    on, row = answer["measured_on"], answer["differences"]["partition"]
    if row is None:
        return ""
    centralized = _value_of(answer, "centralized", on)
    more = f" and {centralized} centralized" if centralized else ""
    return (
        f"{_cost_words(answer, row, 'the partition')}: {_value_of(answer, 'federated', on)} instead of "
        f"{_value_of(answer, 'iid', on)} with IID clients{more}."
    )


def _federation_sentence(answer: Mapping[str, Any]) -> str:
    row = answer["differences"]["federation"]
    return (
        ""
        if row is None
        else f"{_cost_words(answer, row, 'federation as a whole')} against centralized training."
    )


def _worst_sentence(answer: Mapping[str, Any]) -> str:
    if not answer["clients"]:
        return ""
    worst, metric = answer["clients"][0], answer["metric"]
    compared = [
        f"{metric_value(metric, worst[role])} {words}"
        for role, words in (
            ("centralized", "with the centralized model"),
            ("local-only", "with a model of its own"),
        )
        if worst.get(role) is not None
    ]
    instead = f" ({', '.join(compared)})" if compared else ""
    return (
        f"{_named(worst['client'])} does worst: {metric_value(metric, worst['federated'])} on its "
        f"{worst['held_out']:,} held-out images{instead}."
    )


def _named(client: str) -> str:
    """A client at the start of a sentence: its name, or "Client 7" for a number."""
    return f"Client {client}" if client.isdigit() else client


def _joining_sentence(answer: Mapping[str, Any]) -> str:
    joining = [row for row in answer["clients"] if row["vs_local_only"] is not None]
    if not joining:
        return ""
    if joining[0]["verdict"] is None:
        better = sum(row["vs_local_only"]["mean"] > 0 for row in joining)
        return (
            f"{better} of {len(joining)} clients do better in the federation than with a model of their own; one seed "
            "cannot say how certain that is (--seeds 3)."
        )
    counts = {word: sum(row["verdict"] == word for row in joining) for word in ("gains", "loses", UNSURE)}
    return (
        f"Of {len(joining)} clients, {counts['gains']} gain by joining, {counts['loses']} lose, and "
        f"{counts[UNSURE]} show {UNSURE}."
    )
