"""Results of studies with made-up learning curves, in every shape that figures have to draw."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.results.rows import Results, Row, StudyInfo

ALPHA = "data.partition.alpha"
FACTS = {"batch_size": 64.0, "chance": 0.1, "cpu_seconds": 90.0}


def curve(
    final: float, seed: int, rounds: int = 200, every: int = 10, split: str = "test"
) -> dict[str, list[Any]]:
    """A rising curve of accuracy with noise, with batches, bytes and images."""
    rng = random.Random(f"{final}{seed}")
    at = list(range(every, rounds + 1, every))
    accuracy = [
        0.1 + (final - 0.1) * (1 - math.exp(-3.5 * k / rounds)) + rng.gauss(0, 0.012 * (1.2 - final))
        for k in at
    ]
    return {
        "round": at,
        "examples": [2500 * k for k in at],
        "batches": [8 * k + rng.randrange(1, 30) for k in at],
        "bytes": [70_000_000 * k for k in at],
        "bytes_client": [14_000_000 * k for k in at],
        "elapsed": [0.4 * k for k in at],
        f"{split}_accuracy": accuracy,
        f"{split}_loss": [-math.log(max(a, 1e-3)) * 1.1 for a in accuracy],
    }


def line(
    digest: str,
    final: float,
    seed: int,
    split: str = "test",
    facts: Mapping[str, float] | None = None,
    **more: Any,
) -> Row:
    """The line of a run that finished."""
    made = curve(final, seed, split=split)
    return Row(
        digest, digest, "finished", None, 200, f"{split}_accuracy", made, {**FACTS, **(facts or {})}, **more
    )


def results(
    methods: Mapping[str, str],
    cases: Sequence[Mapping[str, Any]],
    finals: Mapping[tuple[str, int], float],
    seeds: Sequence[int] = range(5),
    **info: Any,
) -> Results:
    """A study without tuning; `finals` has the final accuracy by (method, place of the case)."""
    entries, lines = [], {}
    for place, case in enumerate(cases):
        for method in methods:
            for seed in seeds:
                digest = f"{method}-{place}-{seed}"
                entries.append(Row.planned(digest, digest, method, case, {}, "final", seed))
                if (method, place) in finals:
                    noise = random.Random(digest).gauss(0, 0.012)
                    lines[digest] = line(digest, finals[method, place] + noise, seed)
    dimensions = {key: key.rpartition(".")[2] for case in cases for key in case}
    basic = {
        "name": "fake",
        "title": "FedAvg and FedAvgM on non-identical clients",
        "metric": None,
        "last": 1,
        "targets": [0.5],
        "baseline": next(iter(methods)),
    }
    made = StudyInfo(
        **{
            **basic,
            "seeds": list(seeds),
            "methods": dict(methods),
            "dimensions": dimensions,
            "cases": list(cases),
            "entries": entries,
            **info,
        }
    )
    return Results(made, lines)


def by_alpha(centralized: bool = False, **info: Any) -> Results:
    """Two methods at four alphas, 0 among them, with five seeds, as in figure 5 of hsu2019."""
    methods = {"fedavg": "FedAvg", "fedavgm": "FedAvgM"} | (
        {"centralized": "Centralized"} if centralized else {}
    )
    cases = [{ALPHA: alpha} for alpha in (0.0, 0.1, 1.0, 100.0)]
    values = {
        "fedavg": (0.35, 0.55, 0.71, 0.76),
        "fedavgm": (0.62, 0.7, 0.76, 0.79),
        "centralized": (0.86,) * 4,
    }
    finals = {(m, k): v for m in methods for k, v in enumerate(values[m])}
    return results(methods, cases, finals, **info)


def tuned(**info: Any) -> Results:
    """Tuning of two methods over the effective rate and the momentum, with two seeds, at two alphas."""
    methods = {"fedavg": "FedAvg", "fedavgm": "FedAvgM"}
    cases = [{ALPHA: 0.1}, {ALPHA: 1.0}]
    rates = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    entries, lines = [], {}
    for case in cases:
        for method in methods:
            for momentum in (0.0,) if method == "fedavg" else (0.7, 0.9, 0.97):
                for rate in rates:
                    point = {"effective_lr": rate} | (
                        {"algorithm.momentum": momentum} if method == "fedavgm" else {}
                    )
                    top = 0.5 + 0.2 * momentum + 0.08 * case[ALPHA]
                    final = max(0.1, top - 0.12 * math.log10(rate / 0.07) ** 2)
                    for seed in (100, 101):
                        digest = f"tune-{method}-{case[ALPHA]}-{momentum}-{rate}-{seed}"
                        entries.append(Row.planned(digest, digest, method, case, point, "tune", seed))
                        lines[digest] = line(digest, final, seed, split="validation")
    made = results(methods, cases, {(m, k): 0.6 + 0.05 * k for m in methods for k in (0, 1)}, **info)
    whole = StudyInfo(**{**vars(made.info), "entries": [*entries, *made.info.entries]})
    return Results(whole, {**lines, **made.lines})
