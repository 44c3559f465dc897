"""The centralized run that a federated run is measured against, and why another one is no bound for it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fedlens.base.errors import FedlensError, RunDirectoryError
from fedlens.base.format import finite, is_share, metric_value, setting
from fedlens.base.parse_text import read_text
from fedlens.files.atomic_files import open_readable
from fedlens.results.figures import chart as figures
from fedlens.results.run import Run, subtable
from fedlens.results.statistics import mean
from fedlens.run.rundir import runs_below
from fedlens.settings.keys import changes, changing, diff

CENTRALIZED = "centralized"
SEEDS = ("data", "initialization")  # what a run shares with its bound: images, held-out images, first weights
CONVERGED = 0.005  # a bound has converged if its last quarter gained less
_SAME_PASSES = 0.9  # share of a run's passes over the data that its bound has to have
_SAME_IMAGES = 0.01  # relative difference of two numbers of training images
# The dataset is compared by itself, and a bound is free of the others.
_NOT_DATA = {"dataset", "partition", "reassign"}
_CANDIDATES = 300  # directories beside a run whose settings are looked at


def mismatch(run: Run, other: Run) -> tuple[int, str] | None:
    """How far the centralized run `other` agrees with `run`, and why it is no bound for it; None if it is one.

    Compared, in this order: the dataset; the model; the settings of the data except the partition; the seeds of the
    data and of the initial weights; that `other` is finished and has a value of the same metric; the number of
    training images; and the passes over them: as many as those of `run`, or so many that `other` has converged. The
    `[local]` settings may differ, because a bound is tuned for itself. Metrics are read only if the settings match.
    """
    return next(((agreed, why) for agreed, why in enumerate(_mismatches(run, other)) if why), None)


def _mismatches(run: Run, other: Run) -> Iterator[str | None]:
    """A sentence for each thing that is compared, None where the runs agree."""
    ours, theirs = _shared(run.config), _shared(other.config)
    for what in ours:
        changed = diff(ours[what], theirs[what])
        if what == "seeds" and changed and run.config.get("seed") != other.config.get("seed"):
            yield f"has seed {other.config.get('seed')}, not {run.config.get('seed')}"
        else:
            yield _changed_words(what, changed)
    yield None if other.status == "finished" else f"is not finished ({other.status})"
    metric, split = run.metric(), run.split()
    value = other.final(metric)[1]
    if (other.metric(), other.split()) != (metric, split):
        yield f"has {other.split()} {other.metric()}, and this run has {split} {metric}"
    else:
        yield None if value is not None and value > 0 else f"has no {metric} above 0"
    images, pool = (finite(each.recorded("partition", "examples")) for each in (run, other))
    differ = images and pool and abs(images - pool) > _SAME_IMAGES * max(images, pool)
    yield f"trains on {pool:,.0f} images, and this run on {images:,.0f}" if differ else None
    own, passed = run.passes(), other.passes()
    if own is None or passed is None or passed >= _SAME_PASSES * own:
        return
    gained = last_gain(other, metric)
    if gained is None or gained >= CONVERGED:
        rising = "" if gained is None else f" (it gained {100 * gained:.1f} points in its last quarter)"
        yield f"made {passed:.3g} passes over the data, this run {own:.3g}, and had not converged{rising}"


def _changed_words(what: str, changed: Sequence[tuple[str, Any, Any]]) -> str | None:
    for key, a, b in changed:
        if key == "name":
            return f"has another {what}: {b}, not {a}"
    prefix = f"{what}." if what in ("data", "seeds") else f"{what} "
    listed = [f"{prefix}{key} {_shown(b)}, not {_shown(a)}" for key, a, b in changed[:2]]
    return f"has {', '.join(listed)}" if listed else None


def best_bound(run: Run, others: Sequence[Run]) -> tuple[dict[str, Any] | None, str | None]:
    """The bound of a run among the centralized ones of other runs, or why there is none.

    The bound is every matching run (see `mismatch`) of one setting, repeated runs included; of several settings, such
    as learning rates, the one with the best mean. Its keys are run (the name of the first), value (the mean of their
    final values) and passes. Without a match, the sentence names the run that comes closest.
    """
    metric = run.metric()
    matching: dict[str, list[Run]] = {}
    misses = []
    for other in others:
        if other.part("algorithm") != CENTRALIZED:
            continue
        miss = mismatch(run, other)
        if miss is None:
            matching.setdefault(seedless(other), []).append(other)
        else:
            misses.append((miss[0], f"the centralized run {other.name} {miss[1]}"))
    means = [(mean(each.final(metric)[1] for each in runs) or 0.0, runs[0]) for runs in matching.values()]
    if means:
        value, first = max(means, key=lambda pair: pair[0])
        return {"run": first.name, "value": value, "passes": first.passes()}, None
    # Of those that come equally close, the first.
    return None, max(misses, key=lambda miss: miss[0])[1] if misses else None


def seedless(run: Run) -> str:
    """The settings of a run as text, without its name, its seeds, and what changes no result."""
    settings = {key: value for key, value in run.config.items() if key not in ("seed", "seeds")}
    return _text(changing(settings, "experiment"))


def seeds_of(run: Run) -> str:
    """The seeds of a run as text."""
    return _text([run.config.get("seed"), dict(subtable(run.config, "seeds"))])


def last_gain(run: Run, metric: str) -> float | None:
    """How much the best value of a metric rose in the last quarter of the run, 0 at least.

    None with fewer than four evaluated rounds, or for a metric that is not a share.
    """
    values = run.finite(f"{run.split()}_{metric}")
    if not is_share(metric) or len(values) < 5:  # with that of round 0
        return None
    quarter = math.ceil((len(values) - 1) / 4)
    return max(0.0, max(values[-quarter:]) - max(values[:-quarter]))


def bound_beside(run: Run) -> Run | None:
    """The centralized run that bounds `run` and lies in the same parent folder, or None.

    In the layout runs/<name>/<id>, runs of other names are looked at too. Of several bounds it is the latest by path.
    Reads the settings of at most a few hundred directories, and everything only of those that match.
    """
    if run.part("algorithm") == CENTRALIZED:
        return None
    for directory in _centralized_beside(run.path.resolve()):
        with suppress(FedlensError):
            other = Run.open(directory)
            if other.part("algorithm") == CENTRALIZED and mismatch(run, other) is None:
                return other
    return None


def bound_line(run: Run, bound: Run, rounds: Sequence[float]) -> figures.Series:
    """The final value of the bound of a run as a dashed line over `rounds`."""
    value = bound.final(run.metric())[1]
    name = f"centralized: {bound.name} {metric_value(run.metric(), value)}"
    return figures.Series(rounds, [value] * len(rounds), name, color="var(--train)", dash="dash", width=1.5)


def bound_sentence(run: Run, bound: Run) -> str:
    """Which run the dashed line is: its directory as seen from that of `run`, its rounds and its learning rate."""
    directory = os.path.relpath(bound.path.resolve(), run.path.resolve())
    rate = subtable(bound.config, "local").get("lr")
    trained = f"{bound.rounds_done} rounds" + ("" if rate is None else f", local.lr = {setting(rate)}")
    return (
        f"The dashed line is the final value of the centralized run {bound.name} in {directory} ({trained})."
    )


def _centralized_beside(directory: Path) -> list[Path]:
    """Run directories whose settings name the centralized algorithm, the last ones by path first."""
    beside = [*runs_below(directory.parent, 1)][::-1]
    if directory.parent.parent.name == "runs":
        beside += [*runs_below(directory.parent.parent, 2)][::-1]
    named = []
    for folder in islice(dict.fromkeys(beside), _CANDIDATES):
        with suppress(OSError, ValueError, RunDirectoryError), open_readable(folder / "config.toml") as file:
            if CENTRALIZED.encode() in read_text(file):  # much faster than reading TOML
                named.append(folder)
    return sorted(named, reverse=True)


def _shown(value: Any) -> str:
    return "unset" if value is None else setting(value, 3)


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"name": value}


def _shared(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that a run shares with its bound; those that come first are the furthest from agreeing."""
    data, seeds = subtable(config, "data"), subtable(config, "seeds")
    ignored = _NOT_DATA if data.get("validation") else _NOT_DATA | {"validation_from"}
    return {
        "dataset": _table(data.get("dataset")),
        "model": _table(config.get("model")),
        "data": {k: v for k, v in data.items() if k not in ignored and changes(f"data.{k}", "bits")},
        "seeds": {key: seeds.get(key, config.get("seed", 0)) for key in SEEDS},
    }


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
