"""Warnings about runs whose final values say little: curves not at rest at their end, and models without skill."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlens.base.format import is_share, label, metric_value, points, smaller_is_better
from fedlens.results.run import Run

_NAMES = {
    "federated": "The federated run",
    "iid": "The run with IID clients",
    "centralized": "The centralized reference",
}
# Of a metric in per cent, as shares; of any other, relative to the final value.
_LOST, _LOST_ONCE, _GAINED, _SWING, _ABOVE = 0.03, 0.06, 0.02, 0.05, 0.01
_LEAST_MAP = 0.05  # of a detector that finds some objects
_RISE = 1.2  # test loss at the end, relative to its minimum


@dataclass(frozen=True)
class CurveEnd:
    """The end of one curve: its evaluations from three quarters of the rounds on, at least the last three.

    Args:
        lost: the fall from the highest value to the last one; 0 or more.
        since: the rounds from there to the end.
        gained: the last value less the first.
        swing: the highest value less the lowest.
        rounds: the rounds from the first evaluation to the last.
    """

    seed: int
    lost: float
    since: int
    gained: float
    swing: float
    rounds: int


def curve_end(run: Run, seed: int, metric: str) -> CurveEnd | None:
    """The end of a run's curve of the main metric, of test or else of the clients' mean; None if it is too short."""
    for key in (f"test_{metric}", f"clients_{metric}_mean"):
        curve = [(at, v) for at, v in zip(*run.series(key), strict=True) if v is not None]
        if len(curve) < 3:
            continue
        first = max((at for at, _ in curve if at <= 0.75 * curve[-1][0]), default=curve[0][0])
        tail = [pair for pair in curve if pair[0] >= min(first, curve[-3][0])]
        scale = 1.0 if is_share(metric) else abs(tail[-1][1]) or 1.0
        sign = -1 if smaller_is_better(metric) else 1
        values = [sign * value / scale for _, value in tail]
        top = max(range(len(values)), key=lambda k: (values[k], k))
        last = tail[-1][0]
        return CurveEnd(
            seed,
            values[top] - values[-1],
            last - tail[top][0],
            values[-1] - values[0],
            max(values) - min(values),
            last - tail[0][0],
        )
    return None


def curve_warnings(finished: Mapping[tuple[str, int], Run], answer: Mapping[str, Any]) -> list[str]:
    """Sentences: models that learned nothing; roles whose curves fall, rise or jump at their end; a reference below."""
    metric, said = answer["metric"], []
    for role, name in _NAMES.items():
        runs = {seed: run for (of, seed), run in finished.items() if of == role}
        ends = [end for seed, run in runs.items() if (end := curve_end(run, seed, metric)) is not None]
        if ends and (words := _end_words(ends, metric, answer["work"].get("rounds"))):
            said.append(f"{name} {words}")
    runs = {seed: run for (of, seed), run in finished.items() if of == "centralized"}
    overfitted = _overfitted(runs, longer=any("more rounds" in sentence for sentence in said))
    said += [*overfitted, *_below(answer, overfits=bool(overfitted))]
    return [*_learned_nothing(finished, answer), *said]


def _learned_nothing(finished: Mapping[tuple[str, int], Run], answer: Mapping[str, Any]) -> list[str]:
    """A sentence if no model of any run finds objects, or every shared model ends at chance."""
    metric = answer["metric"]
    spreads = [row[on] for row in answer["overall"].values() for on in ("test", "clients")]
    means = [spread["mean"] for spread in spreads if spread is not None]
    if metric.startswith("map"):
        nothing = bool(means) and max(means) < _LEAST_MAP
    else:
        shared = [run for (role, _), run in finished.items() if role in _NAMES]
        nothing = bool(means and shared) and all(map(_ends_at_chance, shared))
    if not nothing:
        return []
    return [
        f"The models have learned next to nothing ({label(metric)} {metric_value(metric, max(means))} at most): the "
        "differences say nothing. Train longer (rounds, local.epochs), or try another local.lr."
    ]


def _ends_at_chance(run: Run) -> bool:
    """Whether the run warned that its score is that of a model without skill, and it was still at the end."""
    kinds = ("accuracy-at-chance", "nothing-learned")
    warned = [warning for warning in run.warnings if warning.get("kind") in kinds]
    rounds = [at for warning in warned for at in run.series(str(warning.get("metric")))[0]]
    return bool(rounds) and any(warning["until"] >= max(rounds) for warning in warned)


def _end_words(ends: list[CurveEnd], metric: str, rounds: int | None) -> str:
    def size(value: float) -> str:
        return points(metric, value) if is_share(metric) else f"{100 * value:.0f} % of its {label(metric)}"

    worst = max(ends, key=lambda end: end.lost)
    seed = f" (seed {worst.seed})" if len(ends) > 1 else ""
    if statistics.fmean(end.lost for end in ends) >= _LOST or worst.lost >= _LOST_ONCE:
        return (
            f"lost {size(worst.lost)} {_in_last(worst.since)}{seed}: its final value is noise. "
            "Try a smaller local.lr or more rounds."
        )
    gained = statistics.fmean(end.gained for end in ends)
    swing = statistics.fmean(end.swing for end in ends)
    if gained >= max(_GAINED, swing / 2):
        more = f" (rounds = {2 * rounds})" if rounds else ""
        last = _in_last(ends[0].rounds)
        return f"still gained {size(gained)} {last}: its final value is not its limit. Try more rounds{more}."
    if swing >= _SWING:
        last = _in_last(ends[0].rounds)
        return f"moved up and down by {size(swing)} {last}: its final value is noise. Try a smaller local.lr."
    return ""


def _in_last(rounds: int) -> str:
    return "in its last round" if rounds == 1 else f"in its last {rounds:,} rounds"


def _overfitted(runs: Mapping[int, Run], longer: bool) -> list[str]:
    """A sentence if the test loss of most centralized runs rises while the loss of training falls.

    With `longer`, another sentence advises more rounds, so that this one does not advise fewer.
    """
    rises = []
    for run in runs.values():
        test = [(v, at) for at, v in zip(*run.series("test_loss"), strict=True) if v is not None]
        train = {at: v for at, v in zip(*run.series("local_loss"), strict=True) if v is not None}
        if not test or not train:
            continue
        (low, at), (end, last) = min(test), test[-1]
        if end > _RISE * low and at in train and last in train and train[last] < train[at]:
            rises.append((at, low, end))
    if not rises or 2 * len(rises) <= len(runs):
        return []
    at, low, end = rises[0]
    return [
        f"The centralized reference overfits: its test loss rose from {low:.3g} in round {at} to {end:.3g}, while its "
        f"training loss fell. Try {'' if longer else 'fewer rounds, or '}augmentation (data.augment)."
    ]


def _below(answer: Mapping[str, Any], overfits: bool) -> list[str]:
    row, metric = answer["differences"]["federation"], answer["metric"]
    if row is None or metric == "loss" or row["mean"] <= 0:
        return []
    if row["sign"] != 1 and (not is_share(metric) or row["mean"] < _ABOVE):
        return []
    return [
        f"The centralized reference ends {points(metric, row['mean'])} below the federated run: it is not an upper "
        f"bound here. Tune local.lr for it{'' if overfits else ', or train more rounds'}."
    ]
