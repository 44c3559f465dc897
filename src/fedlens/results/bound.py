"""The centralized run that a federated run is measured against, and why another one is no bound for it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fedlens.base.errors import FedlensError, RunDirectoryError
from fedlens.base.format import is_share, metric_value, setting
from fedlens.base.parse_text import read_text
from fedlens.files.atomic_files import open_readable
from fedlens.results.figures import chart as figures
from fedlens.results.run import Run, read_run, subtable
from fedlens.run.rundir import RunDir
from fedlens.settings.keys import changes, changing, diff

CENTRALIZED = "centralized"
SEEDS = ("data", "initialization")  # what a run shares with its bound: images, held-out images, first weights
CONVERGED = 0.005  # a bound has converged if its last quarter gained less
_SAME_PASSES = 0.9  # share of a run's passes over the data that its bound has to have
_SAME_IMAGES = 0.01  # relative difference of two numbers of training images
_NOT_DATA = (
    "dataset",
    "partition",
    "reassign",
)  # the dataset is compared by itself, a bound is free of the others
_CANDIDATES = 300  # directories beside a run whose settings are looked at


def mismatch(run: Run, other: Run) -> tuple[str, int] | None:
    """Why the centralized run `other` is no bound for `run`, and how far the two agree; None if it is one.

    Compared, in this order: the dataset; the model; the settings of the data except the partition; the seeds of the
    data and of the initial weights; that `other` is finished and has a value of the same metric; the number of
    training images; and the passes over them: as many as those of `run`, or so many that `other` has converged. The
    `[local]` settings may differ, because a bound is tuned for itself.
    """
    settings = settings_mismatch(run.config, other.config)
    if settings is not None:
        return settings
    if other.status != "finished":
        return f"is not finished ({other.status})", 4
    metric, split = run.metric(), run.split()
    if (other.metric(), other.split()) != (metric, split):
        return f"has {other.split()} {other.metric()}, and this run has {split} {metric}", 5
    value = other.final(metric)[1]
    if value is None or value <= 0:
        return f"has no {metric} above 0", 5
    images, pool = (_number(each.recorded("partition", "examples")) for each in (run, other))
    if images and pool and abs(images - pool) > _SAME_IMAGES * max(images, pool):
        return f"trains on {pool:,.0f} images, and this run on {images:,.0f}", 6
    own, passed = passes(run), passes(other)
    if own is None or passed is None or passed >= _SAME_PASSES * own:
        return None
    gained = last_gain(other, metric)
    if gained is not None and gained < CONVERGED:
        return None
    rising = "" if gained is None else f" (it gained {100 * gained:.1f} points in its last quarter)"
    return f"made {passed:.3g} passes over the data, this run {own:.3g}, and had not converged{rising}", 7


def settings_mismatch(config: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, int] | None:
    """What differs in the settings of two runs that a bound has to share, and how far they agree; or None."""
    ours, theirs = _shared(config), _shared(other)
    for stage, what in enumerate(ours):
        changed = diff(ours[what], theirs[what])
        if not changed:
            continue
        if any(key == "name" for key, _, _ in changed):
            return f"has another {what}: {theirs[what].get('name')}, not {ours[what].get('name')}", stage
        prefix = f"{what}." if what in ("data", "seeds") else f"{what} "
        listed = ", ".join(f"{prefix}{key} {_shown(b)}, not {_shown(a)}" for key, a, b in changed[:2])
        if what == "seeds" and config.get("seed") != other.get("seed"):
            listed = f"seed {other.get('seed')}, not {config.get('seed')}"
        return f"has {listed}", stage
    return None


def best_bound(run: Run, centralized: Sequence[Run]) -> tuple[list[Run], str | None]:
    """The bound of a run among centralized runs, and why there is none.

    The bound is every matching run (see `mismatch`) of one setting, repeated runs included; of several settings, such
    as learning rates, the one with the best mean. Without a match, the sentence names the run that comes closest.
    """
    matching: dict[str, list[Run]] = {}
    misses = []
    for other in centralized:
        miss = mismatch(run, other)
        if miss is None:
            matching.setdefault(seedless(other), []).append(other)
        else:
            misses.append((miss[1], f"the centralized run {other.name} {miss[0]}"))
    if matching:
        metric = run.metric()
        means = {
            text: statistics.fmean(_final(each, metric) for each in runs) for text, runs in matching.items()
        }
        return matching[max(means, key=means.__getitem__)], None
    # Of those that come equally close, the first.
    return [], max(misses, key=lambda miss: miss[0])[1] if misses else None


def seedless(run: Run) -> str:
    """The settings of a run as text, without its name, its seeds, and what changes no result."""
    settings = {key: value for key, value in run.config.items() if key not in ("seed", "seeds")}
    return _text(changing(settings, "experiment"))


def seeds_of(run: Run) -> str:
    """The seeds of a run as text."""
    return _text([run.config.get("seed"), dict(subtable(run.config, "seeds"))])


def passes(run: Run) -> float | None:
    """How often the run went over its training images, or None if that is unknown."""
    trained, images = run.total("examples"), _number(run.recorded("partition", "examples"))
    return trained / images if trained and images else None


def last_gain(run: Run, metric: str) -> float | None:
    """How much the best value of a metric rose in the last quarter of the run, 0 at least.

    None with fewer than four evaluated rounds, or for a metric that is not a share.
    """
    values = [value for value in run.series(f"{run.split()}_{metric}")[1] if value is not None]
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
            if settings_mismatch(run.config, RunDir.open(directory).read_config()) is None:
                other = read_run(directory)
                if mismatch(run, other) is None:
                    return other
    return None


def bound_line(run: Run, bound: Run, rounds: Sequence[float]) -> figures.Series:
    """The final value of the bound of a run as a dashed line over `rounds`."""
    metric = run.metric()
    value = _final(bound, metric)
    name = f"centralized: {bound.name} {metric_value(metric, value)}"
    flat = [value] * len(rounds)
    return figures.Series(rounds, flat, name, color="var(--train)", dash="dash", width=1.5)


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
    named = []
    for folder in islice(_folders_beside(directory), _CANDIDATES):
        with suppress(OSError, ValueError, RunDirectoryError), open_readable(folder / "config.toml") as file:
            if CENTRALIZED.encode() in read_text(file):  # much faster than reading TOML
                named.append(folder)
    return sorted(named, reverse=True)


def _folders_beside(directory: Path) -> Iterator[Path]:
    yield from (folder for folder in _folders(directory.parent) if folder != directory)
    if directory.parent.parent.name == "runs":
        for name in _folders(directory.parent.parent):
            if name != directory.parent:
                yield from _folders(name)


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted((Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)), reverse=True)
    except OSError:
        return []


def _shown(value: Any) -> str:
    return "unset" if value is None else setting(value, 3)


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"name": value}


def _shared(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that a run shares with its bound; those that come first are the furthest from agreeing."""
    data, seeds = subtable(config, "data"), subtable(config, "seeds")
    ignored = _NOT_DATA if data.get("validation") else (*_NOT_DATA, "validation_from")
    return {
        "dataset": _table(data.get("dataset")),
        "model": _table(config.get("model")),
        "data": {k: v for k, v in data.items() if k not in ignored and changes(f"data.{k}", "bits")},
        "seeds": {key: seeds.get(key, config.get("seed", 0)) for key in SEEDS},
    }


def _final(run: Run, metric: str) -> float:
    value = run.final(metric)[1]
    return -math.inf if value is None else value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
