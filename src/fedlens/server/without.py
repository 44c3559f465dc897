"""Begins a run anew without sites, from the last checkpoint that has nothing of them: `fedlens serve --without`."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace

from fedlens.base.errors import ConfigError
from fedlens.base.parse_text import parse_toml
from fedlens.data.partition.roster import Roster
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.server.retention import ServedRuns, held
from fedlens.server.serve_record import ServeRecord
from fedlens.server.withdraw import has_site, rounds_with, saved_before


def begin_without(
    directory: RunDir, new: ServeRecord, sites: Collection[str], runs: ServedRuns, experiment: str
) -> tuple[ServeRecord, str]:
    """The record of a run without some sites, and a sentence on where it begins; fills its empty directory.

    The last run of the experiment with one of the sites gives its last checkpoint before their first answer. The new
    run goes on from it under the same identity, so that the states at other sites are those of the checkpoint; the rows
    of the sites stay in the roster, and are never asked. The old run is superseded, and not resumed any more. Without
    such a checkpoint, if another run goes on from it, or if images of the sites are in the mean and the deviation, it
    begins from the start, with a roster of the others.

    Args:
        directory: of the new run, and `new` its record.
        sites: the names of those that have left.
        runs: those that the federation has served.
        experiment: digest of the settings without `sites`.

    Raises `ConfigError` if the run sums securely and had an answer.
    """
    for base in (RunDir(path) for path in reversed(runs.paths)):
        record = ServeRecord.read(base)
        same = record is not None and (record.experiment, record.root) == (experiment, new.root)
        if record is None or not same or not any(has_site(base, site) for site in sites):
            continue
        with held(base):
            if _summed(base, new):
                what = "the run sums securely, and sites never sum a model twice"
                hint = "serve a new experiment with another seed"
                raise ConfigError(what, where=str(base.path), hint=hint)
            summary = base.read_summary() or {}
            if (other := summary.get("superseded")) is not None:
                return new, f"it begins from the start: {base.path} goes on in {other}"
            last = _last_without(base, sites)
            if last is not None:
                # First: sites would take both for one run.
                base.write_summary({**summary, "superseded": str(directory.path.resolve())})
                _copy(base, directory, last)
                record = replace(record, experiment=new.experiment).with_terms(new)
                return record, f"it goes on after round {last} of {base.path}"
        return new, f"it begins from the start: {base.path} has no checkpoint without them"
    return new, "it begins from the start: no run of this experiment had them"


def _summed(base: RunDir, new: ServeRecord) -> bool:
    """Whether the models of a run may be in a secure sum: without a log of answers they may."""
    if parse_toml(new.contract).get("aggregate", {}).get("name") != "secagg":
        return False
    return any(rounds_with(base, site) != [] for site in set(Roster.load(base.roster_path).sites))


def _last_without(base: RunDir, sites: Collection[str]) -> int | None:
    """The round of the last checkpoint that has nothing of these sites; None without one."""
    rounds = [rounds_with(base, site) for site in sites]
    if any(each is None for each in rounds) or Roster.load(base.roster_path).moments is not None:
        return None
    first = min((round for each in rounds for round in each or ()), default=2**63)
    return max(saved_before(base, first), default=None)


def _copy(base: RunDir, directory: RunDir, last: int) -> None:
    """Copies what a run was up to a round; lines of later rounds go when it is resumed."""
    described = (base.environment_path, base.roster_path, base.initial_path)
    lines = [path for path in base.path.glob("*.jsonl") if path != base.serve_log_path]
    for path in (*described, *lines):
        if path.exists():
            shutil.copy2(path, directory.path)
    for round in saved_before(base, last + 1):
        path = checkpoint.path_of(base.checkpoint_path, round)
        shutil.copytree(path, directory.checkpoint_path / path.name)
    if base.states_path.exists():
        shutil.copytree(base.states_path, directory.states_path)
    shutil.copy2(base.config_path, directory.path)  # last: with it the run is begun
