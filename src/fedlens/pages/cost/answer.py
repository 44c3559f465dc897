"""What federation costs, computed from the runs below one directory: overall and for each client."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.base.errors import FedlensError
from fedlens.base.format import finite, is_share, is_share_of_images
from fedlens.pages.cost.curves import curve_warnings
from fedlens.pages.cost.labels import label_findings, label_warnings
from fedlens.pages.cost.measures import MEASURES, REFERENCES, WORDS, measure
from fedlens.pages.cost.next_steps import next_steps
from fedlens.pages.cost.sentences import sentences
from fedlens.pages.data_notes import notes_of
from fedlens.results.client_results import ClientResult, client_results
from fedlens.results.run import Run, read_run, subtable
from fedlens.results.statistics import (
    LEAST_SEEDS,
    UNSURE,
    Values,
    deviation,
    difference,
    mean,
    share_interval,
)

_VERDICTS = {1: "gains", -1: "loses", 0: UNSURE}  # by the sign of federated - local-only


@dataclass(frozen=True)
class RoleRuns:
    """The finished runs of one role by seed, and what they measured of a metric."""

    runs: Mapping[int, Run]
    metric: str

    @cached_property
    def test(self) -> dict[int, float]:
        """The final value on the test images by seed; of clients' own models the mean over these models."""
        return _known({seed: _tested(run, self.metric) for seed, run in self.runs.items()})

    @cached_property
    def clients(self) -> dict[int, dict[str, ClientResult]]:
        """The result of each measured client, by seed."""
        found = {
            seed: {row.client: row for row in client_results(run) if row.last is not None}
            for seed, run in self.runs.items()
        }
        return {seed: rows for seed, rows in found.items() if rows}

    @cached_property
    def means(self) -> dict[int, float]:
        """The mean over the clients on their held-out images by seed, each client counting the same."""
        return _known({seed: mean(row.last for row in rows.values()) for seed, rows in self.clients.items()})

    def values(self, measure: str) -> dict[int, float]:
        """The values of a measure, "test" or "clients", by seed."""
        return self.test if measure == "test" else self.means

    def at(self, client: str) -> dict[int, float]:
        """The values at one client by seed."""
        return _known({seed: rows[client].last for seed, rows in self.clients.items() if client in rows})

    @property
    def models(self) -> str:
        """Whose models are measured: "one" for all, "own" of each client, or one "tuned" at each client."""
        if any(run.split() == "validation" for run in self.runs.values()):
            return "own"
        tuned = any("mean_before" in run.spread().get(self.metric, {}) for run in self.runs.values())
        return "tuned" if tuned else "one"


def _known(values: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if value is not None}


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
    runs, rows = cost_runs(directory, about)
    finished = by_role(rows, runs)
    federated = list(finished["federated"].values())
    readable = [*federated, *runs.values()]
    metric = readable[0].metric() if readable else "accuracy"
    roles = {role: RoleRuns(of, metric) for role, of in finished.items()}
    for row in rows:
        row |= {on: roles[row["role"]].values(on).get(row["seed"]) for on in MEASURES}
    measured = {role: of for role, of in roles.items() if of.test or of.clients}
    on = "test" if roles["federated"].test and roles["federated"].models != "own" else "clients"
    answer = {
        **about,
        "runs": rows,
        "metric": metric,
        "measured_on": on,
        "measures": {name: measure(metric, name) for name in MEASURES},
        "overall": {
            role: _overall(of, [row for row in rows if row["role"] == role]) for role, of in measured.items()
        },
        "bytes_per_client": {
            role: None if role == "centralized" else client_bytes(of.runs.values())
            for role, of in measured.items()
        },
        "differences": _differences(roles, on, metric),
        "clients": _client_rows(roles, metric, about["work"].get("largest_class") or {}),
        "data_notes": notes_of(readable),
        "emd": federated[0].emd() if federated else None,
    }
    answer |= label_findings(finished)
    answer["warnings"] = [*label_warnings(answer), *curve_warnings(finished, answer)]
    return {**answer, "sentences": sentences(answer), "next_steps": next_steps(answer)}


def cost_runs(directory: Path, about: Mapping[str, Any]) -> tuple[dict[str, Run], list[dict[str, Any]]]:
    """The planned runs that can be read, by name, and how each planned run went."""
    runs: dict[str, Run] = {}
    for row in about["runs"]:
        with suppress(FedlensError):
            runs[row["name"]] = read_run(directory / row["name"])
    return runs, [_run_row(row, runs.get(row["name"])) for row in about["runs"]]


def by_role(rows: Iterable[Mapping[str, Any]], runs: Mapping[str, Run]) -> dict[str, dict[int, Run]]:
    """The finished runs by role and seed; `rows` and `runs` are those of `cost_runs`."""
    finished = [row for row in rows if row["status"] == "finished"]
    return {
        role: {row["seed"]: runs[row["name"]] for row in finished if row["role"] == role} for role in WORDS
    }


def _run_row(row: Mapping[str, Any], run: Run | None) -> dict[str, Any]:
    if run is None:
        return {**row, "status": "failed" if row["error"] else "not started", "rounds": 0, "seconds": None}
    return {
        **row,
        "status": "failed" if row["error"] else run.status,
        "rounds": run.rounds_done,
        "passes": run.passes(),
        "seconds": run.seconds(),
        "warnings": len(run.warnings),
    }


def _tested(run: Run, metric: str) -> float | None:
    """The final value on the test data; the mean over the clients' own models, None if they were not tested."""
    if run.split() == "test":
        return run.final(metric)[1]
    with suppress(FedlensError):
        tests = run.read_client_tests() or {}
        if tests.get("round") == run.rounds_done:
            rows = [row for row in subtable(tests, "clients").values() if isinstance(row, Mapping)]
            return mean(finite(row.get(metric)) for row in rows)
    return None


def _overall(of: RoleRuns, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of a role in `overall`; `rows` are its runs."""
    untested = next((row["untested"] for row in rows if row.get("untested")), None)
    why = {"test": untested or "no run recorded it", "clients": "no client was measured"}
    spreads = {on: _spread(of.values(on)) for on in MEASURES}
    missing = {on: why[on] for on, spread in spreads.items() if spread is None}
    return {**spreads, "models": of.models, "missing": missing}


def _spread(values: Values) -> dict[str, Any] | None:
    numbers = values.values()
    return {"mean": mean(numbers), "std": deviation(numbers), "n": len(numbers)} if numbers else None


def _differences(roles: Mapping[str, RoleRuns], on: str, metric: str) -> dict[str, dict[str, Any] | None]:
    """The `differences` of `cost_answer`."""
    federation = on if roles["centralized"].test else "clients"
    measures = {"partition": on, "federation": federation, "joining": "clients"}
    rows: dict[str, dict[str, Any] | None] = {}
    for name, role in REFERENCES.items():
        first, second = (roles[of].values(measures[name]) for of in ("federated", role))
        row = compared(first, second, _most(metric))
        rows[name] = row and {**row, "on": measures[name]}
    return rows


def _most(metric: str) -> float:
    """The largest difference that the metric can have."""
    return 1.0 if is_share(metric) else math.inf


def compared(
    first: Values, second: Values, most: float = math.inf, held_out: int = 0, resolution: float = 0.0
) -> dict[str, Any] | None:
    """A `difference` and its sign, without an interval below three seeds; None if no seed is in both."""
    found = difference(first, second, most, held_out, resolution)
    if found is None:
        return None
    if found.seeds < LEAST_SEEDS:
        found = replace(found, low=None, high=None)
    return {**asdict(found), "sign": found.sign}


def _client_rows(
    roles: Mapping[str, RoleRuns], metric: str, largest: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The `clients` of `cost_answer`."""
    rows = []
    federated = {name: row for each in roles["federated"].clients.values() for name, row in each.items()}
    for name, result in federated.items():
        # The IID twin has other images at each client.
        values = {role: of.at(name) for role, of in roles.items() if role != "iid" and of.clients}
        means = {role: mean(each.values()) for role, each in values.items()}
        one_image = 1 / result.held_out if result.held_out else 0.0
        images = result.held_out if is_share_of_images(metric) else 0
        differences = {
            key: compared(values["federated"], values.get(role, {}), _most(metric), images, one_image)
            for key, role in (("vs_centralized", "centralized"), ("vs_local_only", "local-only"))
        }
        joining = differences["vs_local_only"]
        rows.append(
            {
                "client": name,
                "examples": result.examples,
                "held_out": result.held_out,
                "classes": list(result.classes),
                **means,
                "interval": share_interval(means["federated"] or 0.0, images) if images else None,
                "largest": largest.get(name) if metric == "accuracy" else None,
                **differences,
                "verdict": _VERDICTS.get(joining["sign"]) if joining else None,
            }
        )
    return sorted(rows, key=lambda row: (row["federated"], str(row["client"])))


def client_bytes(runs: Iterable[Run]) -> dict[str, float] | None:
    """Bytes of one client, as means over runs; None if no run trained at clients and counted its messages.

    Keys: `down_round` and `up_round`, of a client that takes part in a round; `down` and `up`, in all rounds, the mean
    of all clients; `measuring_down` and `measuring_up`, of one evaluation at the clients, which the others leave out.
    """
    counted = [each for run in runs if (each := _of_run(run)) is not None]
    return {key: statistics.fmean(each[key] for each in counted) for key in counted[0]} if counted else None


def _of_run(run: Run) -> dict[str, float] | None:
    traffic = dict(subtable(subtable(run.summary, "traffic"), "clients"))
    clients, replies = run.clients(), sum(run.finite("clients"))
    if not clients or not replies or not traffic:
        return None
    measuring = subtable(traffic, EVALUATE_OWN)
    counted: dict[str, float] = {}
    for way, messages in (("down", "asks"), ("up", "replies")):
        sent = {op: finite(subtable(traffic, op).get(f"bytes_{way}")) or 0.0 for op in traffic}
        total = sum(size for op, size in sent.items() if op != EVALUATE_OWN)
        counted |= {
            f"{way}_round": total / replies,
            way: total / clients,
            f"measuring_{way}": sent.get(EVALUATE_OWN, 0.0) / (finite(measuring.get(messages)) or 1.0),
        }
    return counted
