"""Warnings about runs whose final values say little: curves not at rest at their end, and models without skill."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.base.format import is_share, label, metric_value, points, smaller_is_better
from fedlens.pages.cost.measures import MEASURES
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
    curves = (list(run.measured(key).items()) for key in (f"test_{metric}", f"clients_{metric}_mean"))
    curve = next((curve for curve in curves if len(curve) >= 3), None)
    if curve is None:
        return None
    last, value = curve[-1]
    first = max((at for at, _ in curve if at <= 0.75 * last), default=curve[0][0])
    scale = 1.0 if is_share(metric) else abs(value) or 1.0
    sign = -1 if smaller_is_better(metric) else 1
    tail = [(sign * v / scale, at) for at, v in curve if at >= min(first, curve[-3][0])]
    values = [v for v, _ in tail]
    top, at = max(tail)
    gained, swing = values[-1] - values[0], top - min(values)
    return CurveEnd(seed, top - values[-1], last - at, gained, swing, last - tail[0][1])


def curve_warnings(finished: Mapping[str, Mapping[int, Run]], answer: Mapping[str, Any]) -> list[str]:
    """Sentences: models that learned nothing; roles whose curves fall, rise or jump at their end; a reference below."""
    metric, said = answer["metric"], []
    for role, name in _NAMES.items():
        found = (curve_end(run, seed, metric) for seed, run in finished[role].items())
        ends = [end for end in found if end is not None]
        if ends and (words := _end_words(ends, metric, answer["work"].get("rounds"))):
            said.append(f"{name} {words}")
    overfitted = _overfitted(
        list(finished["centralized"].values()), longer=any("more rounds" in sentence for sentence in said)
    )
    said += [*overfitted, *_below(answer, overfits=bool(overfitted))]
    shared = [run for role in _NAMES for run in finished[role].values()]
    return [*_learned_nothing(shared, answer), *said]


def _learned_nothing(shared: Sequence[Run], answer: Mapping[str, Any]) -> list[str]:
    """A sentence if no model of any run finds objects, or every shared model ends at chance."""
    metric = answer["metric"]
    means = [row[on]["mean"] for row in answer["overall"].values() for on in MEASURES if row[on] is not None]
    if metric.startswith("map"):
        nothing = max(means, default=1.0) < _LEAST_MAP
    else:
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


def _end_words(ends: Sequence[CurveEnd], metric: str, rounds: int | None) -> str:
    def size(value: float) -> str:
        return points(metric, value) if is_share(metric) else f"{100 * value:.0f} % of its {label(metric)}"

    worst, last = max(ends, key=lambda end: end.lost), _in_last(ends[0].rounds)
    lost = statistics.fmean(end.lost for end in ends)
    gained = statistics.fmean(end.gained for end in ends)
    swing = statistics.fmean(end.swing for end in ends)
    if lost >= _LOST or worst.lost >= _LOST_ONCE:
        seed = f" (seed {worst.seed})" if len(ends) > 1 else ""
        return (
            f"lost {size(worst.lost)} {_in_last(worst.since)}{seed}: its final value is noise. "
            "Try a smaller local.lr or more rounds."
        )
    if gained >= max(_GAINED, swing / 2):
        more = f" (rounds = {2 * rounds})" if rounds else ""
        return f"still gained {size(gained)} {last}: its final value is not its limit. Try more rounds{more}."
    if swing >= _SWING:
        return f"moved up and down by {size(swing)} {last}: its final value is noise. Try a smaller local.lr."
    return ""


def _in_last(rounds: int) -> str:
    return "in its last round" if rounds == 1 else f"in its last {rounds:,} rounds"


def _overfitted(runs: Sequence[Run], longer: bool) -> list[str]:
    """A sentence if the test loss of most centralized runs rises while the loss of training falls.

    With `longer`, another sentence advises more rounds, so that this one does not advise fewer.
    """
    rises = []
    for run in runs:
        test, train = run.measured("test_loss"), run.measured("local_loss")
        if not test:
            continue
        low, last = min(test, key=lambda at: (test[at], at)), max(test)
        if test[last] > _RISE * test[low] and train.get(last, math.inf) < train.get(low, -math.inf):
            rises.append((low, test[low], test[last]))
    if 2 * len(rises) <= len(runs):
        return []
    (at, least, end), fewer = rises[0], "" if longer else "fewer rounds, or "
    return [
        f"The centralized reference overfits: its test loss rose from {least:.3g} in round {at} to {end:.3g}, "
        f"while its training loss fell. Try {fewer}augmentation (data.augment)."
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
