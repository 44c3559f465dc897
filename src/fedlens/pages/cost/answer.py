"""What federation costs, computed from the runs below one directory: overall and for each client."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.base.errors import FedlensError
from fedlens.base.format import finite, is_share, is_share_of_images
from fedlens.pages.cost.curves import curve_warnings
from fedlens.pages.cost.labels import label_findings, label_warnings
from fedlens.pages.cost.measures import MEASURES, WORDS, measure
from fedlens.pages.cost.sentences import next_steps, sentences
from fedlens.pages.data_notes import notes_of
from fedlens.results.client_results import ClientResult, client_results
from fedlens.results.run import Run, read_run, subtable
from fedlens.results.statistics import (
    LEAST_SEEDS,
    Interval,
    Values,
    difference,
    share_interval,
    verdict,
)


def cost_answer(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs below `directory` say. `about` is what `fedlens.cost` planned: name, seeds, work, notes, runs.

    Keys, besides those of `about`:

    - `metric`, `measured_on`: the main metric, and the measure of the first two differences, "test" or "clients"
      (where each client has a model of its own).
    - `measures`: the name of each measure in words. "test" is on the test images, of clients' own models the mean over
      these models; "clients" is the mean over the clients on their held-out images, each counting the same.
    - `overall`: by role, `test` and `clients`, each with mean, std (None with one seed) and n, or None with the reason
      in `missing`; `models`: "one", "own" (one at each client) or "tuned" (tuned at each client).
    - `bytes_per_client`: by role, see `fedlens.pages.cost.answer`; None for centralized training.
    - `differences`: by name ("partition": federated - IID; "federation": federated - centralized, on
      `measured_on`; "joining": federated - local-only, mean over clients): mean, low, high, seeds, sign, on (as
      `measured_on`). These intervals cover the seeds, not which images are tested. With fewer than three seeds there
      is none.
    - `clients`: one row a client, the lowest federated value first: client, examples, held_out, classes, a mean for
      each role, `interval` of the federated value (Wilson, on the held-out images, which all seeds share; only of the
      accuracy, a share of images), `largest`
      (the share of its held-out images in its most frequent training class), `vs_centralized` and `vs_local_only` as
      in `differences` but with the sampling error of the held-out images, and `verdict`.
    - `low_clients`, `suspicious`: what the runs say about labels; see `fedlens.pages.cost.labels.label_findings`.
    - `sentences`: the answer in words. `warnings`: why final values are not to be trusted, in words.
    - `next_steps`: what to try, each with `why` and `command`.
    - `data_notes`: what the runs note on their data, such as clients with like names and files that were skipped.
    - `emd`: of the federated clients' classes.
    - `runs`: one row a run: name, role, seed, status, error, rounds, passes, seconds, warnings (how many), and
      both measures.
    """
    runs = {row["name"]: read_or_none(directory / row["name"]) for row in about["runs"]}
    rows = [run_row(row, runs[row["name"]]) for row in about["runs"]]
    finished = {
        (row["role"], row["seed"]): run
        for row in rows
        if (run := runs[row["name"]]) is not None and row["status"] == "finished"
    }
    federated = [run for (role, _), run in finished.items() if role == "federated"]
    readable = [*federated, *(run for run in runs.values() if run is not None)]
    metric = readable[0].metric() if readable else "accuracy"
    tested, at_clients = _by_role(finished, metric), _at_clients(finished)
    means = {
        role: {
            seed: statistics.fmean(_last(result) for result in results.values())
            for seed, results in by_seed.items()
        }
        for role, by_seed in at_clients.items()
    }
    for row in rows:
        row["test"], row["clients"] = (of.get(row["role"], {}).get(row["seed"]) for of in (tested, means))
    models = {role: _models(run, metric) for (role, _), run in finished.items()}
    overall = {
        role: {
            "test": _spread(tested.get(role, {})),
            "clients": _spread(means.get(role, {})),
            "models": models[role],
            "missing": _missing(
                role in tested,
                role in means,
                next((row["untested"] for row in rows if row["role"] == role and row.get("untested")), None),
            ),
        }
        for role in WORDS
        if role in tested or role in means
    }
    on = "test" if tested.get("federated") and models.get("federated") != "own" else "clients"
    largest = about["work"].get("largest_class") or {}
    clients = _client_rows(at_clients, metric, largest if metric == "accuracy" else {})
    answer = {
        **about,
        "runs": rows,
        "metric": metric,
        "measured_on": on,
        "measures": {name: measure(metric, name) for name in MEASURES},
        "overall": overall,
        "bytes_per_client": {
            role: None
            if role == "centralized"
            else client_bytes([run for (of, _), run in finished.items() if of == role])
            for role in overall
        },
        "differences": _differences(tested, means, on, 1.0 if is_share(metric) else math.inf),
        "clients": clients,
        "data_notes": notes_of(readable),
        "emd": next((run.emd() for (role, _), run in finished.items() if role == "federated"), None),
    }
    answer |= label_findings(finished)
    answer["warnings"] = [*label_warnings(answer), *curve_warnings(finished, answer)]
    return {**answer, "sentences": sentences(answer), "next_steps": next_steps(answer)}


def _differences(
    tested: Mapping[str, Values], means: Mapping[str, Values], on: str, most: float
) -> dict[str, dict[str, Any] | None]:
    """The `differences` of `cost_answer`; `most` is the largest difference that the metric can have."""
    federation = "test" if on == "test" and tested.get("centralized") else "clients"
    rows: dict[str, dict[str, Any] | None] = {}
    for name, where, reference in (
        ("partition", on, "iid"),
        ("federation", federation, "centralized"),
        ("joining", "clients", "local-only"),
    ):
        values = tested if where == "test" else means
        row = _difference(values.get("federated", {}), values.get(reference, {}), most)
        rows[name] = None if row is None else {**asdict(row), "sign": row.sign, "on": where}
    return rows


def read_or_none(directory: Path) -> Run | None:
    """The run in a directory; None if there is none that can be read."""
    with suppress(FedlensError):
        return read_run(directory)
    return None


def run_row(row: Mapping[str, Any], run: Run | None) -> dict[str, Any]:
    """A planned run with how it went."""
    if run is None:
        return {**row, "status": "failed" if row["error"] else "not started", "rounds": 0, "seconds": None}
    status = "failed" if row["error"] else run.status
    examples, images = run.total("examples"), run.recorded("partition", "examples")
    return {
        **row,
        "status": status,
        "rounds": run.rounds_done,
        "passes": examples / images if examples and images else None,
        "seconds": run.seconds(),
        "warnings": len(run.warnings),
    }


def _difference(
    first: Values, second: Values, most: float, held_out: int = 0, resolution: float = 0.0
) -> Interval | None:
    """`difference`, without an interval below three seeds."""
    found = difference(first, second, most, held_out, resolution)
    if found is None or found.seeds >= LEAST_SEEDS:
        return found
    return replace(found, low=None, high=None)


def _models(run: Run, metric: str) -> str:
    """Whose models a run measures: "one" for all, "own" of each client, or one "tuned" at each client."""
    if run.split() == "validation":
        return "own"
    return "tuned" if "mean_before" in run.spread().get(metric, {}) else "one"


def _missing(tested: bool, at_clients: bool, untested: str | None) -> dict[str, str]:
    """Why a measure has no value, by its name; `untested` says why the clients' own models were not tested."""
    why = {} if tested else {"test": untested or "no run recorded it"}
    return why if at_clients else {**why, "clients": "no client was measured"}


def _by_role(finished: Mapping[tuple[str, int], Run], metric: str) -> dict[str, dict[int, float]]:
    """The final test value of each role and seed; of clients' own models the mean over these models."""
    values: dict[str, dict[int, float]] = {}
    for (role, seed), run in finished.items():
        value = run.final(metric)[1] if run.split() == "test" else _test_of_own_models(run, metric)
        if value is not None:
            values.setdefault(role, {})[seed] = value
    return values


def _test_of_own_models(run: Run, metric: str) -> float | None:
    """The mean over the clients of each one's own model on the test data; None if they were not tested."""
    with suppress(FedlensError):
        tests = run.read_client_tests() or {}
        if tests.get("round") == run.rounds_done:
            rows = [row for row in subtable(tests, "clients").values() if isinstance(row, Mapping)]
            values = [value for row in rows if (value := finite(row.get(metric))) is not None]
            return statistics.fmean(values) if values else None
    return None


def _at_clients(finished: Mapping[tuple[str, int], Run]) -> dict[str, dict[int, dict[str, ClientResult]]]:
    """Each client's result, by role, seed and client."""
    results: dict[str, dict[int, dict[str, ClientResult]]] = {}
    for (role, seed), run in finished.items():
        measured = {row.client: row for row in client_results(run) if row.last is not None}
        if measured:
            results.setdefault(role, {})[seed] = measured
    return results


def _client_rows(
    at_clients: Mapping[str, Mapping[int, Mapping[str, ClientResult]]],
    metric: str,
    largest: Mapping[str, float],
) -> list[dict[str, Any]]:
    of_images = is_share_of_images(metric)
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
        most = 1.0 if is_share(metric) else math.inf
        images = result.held_out if of_images else 0
        compared = {
            key: _difference(values["federated"], values.get(role, {}), most, images, one_image)
            for key, role in (("vs_centralized", "centralized"), ("vs_local_only", "local-only"))
        }
        rows.append(
            {
                "client": name,
                "examples": result.examples,
                "held_out": result.held_out,
                "classes": list(result.classes),
                **{role: statistics.fmean(v.values()) if v else None for role, v in values.items()},
                "interval": share_interval(statistics.fmean(values["federated"].values()), images)
                if images
                else None,
                "largest": largest.get(name),
                **{key: _as_row(each) for key, each in compared.items()},
                "verdict": verdict(compared["vs_local_only"]),
            }
        )
    return sorted(rows, key=lambda row: (row["federated"], str(row["client"])))


def _last(result: ClientResult) -> float:
    """The last value of a client that was measured."""
    assert result.last is not None
    return result.last


def _as_row(each: Interval | None) -> dict[str, Any] | None:
    return None if each is None else {**asdict(each), "sign": each.sign}


def _spread(values: Values) -> dict[str, Any] | None:
    if not values:
        return None
    numbers = list(values.values())
    std = statistics.stdev(numbers) if len(numbers) > 1 else None
    return {"mean": statistics.fmean(numbers), "std": std, "n": len(numbers)}


def client_bytes(runs: Sequence[Run]) -> dict[str, float] | None:
    """Bytes of one client, as means over runs; None if no run trained at clients and counted its messages.

    Keys: `down_round` and `up_round`, of a client that takes part in a round; `down` and `up`, in all rounds, the mean
    of all clients; `measuring_down` and `measuring_up`, of one evaluation at the clients, which the others leave out.
    """
    counted = [each for run in runs if (each := _of_run(run)) is not None]
    if not counted:
        return None
    return {key: statistics.fmean(each[key] for each in counted) for key in counted[0]}


def _of_run(run: Run) -> dict[str, float] | None:
    rows = subtable(subtable(run.summary, "traffic"), "clients")
    traffic = {op: subtable(rows, op) for op in rows}
    clients, replies = run.clients(), sum(value for value in run.finite("clients"))
    if not clients or not replies or not traffic:
        return None
    measuring = traffic.pop(EVALUATE_OWN, {})
    counted: dict[str, float] = {}
    for way, messages in (("down", "asks"), ("up", "replies")):
        total = sum(finite(row.get(f"bytes_{way}")) or 0.0 for row in traffic.values())
        measured, times = (finite(measuring.get(key)) for key in (f"bytes_{way}", messages))
        counted |= {
            f"{way}_round": total / replies,
            way: total / clients,
            f"measuring_{way}": (measured or 0.0) / (times or 1.0),
        }
    return counted
