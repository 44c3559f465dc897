"""Compares a run directory with its checkpoint before the run is resumed: edited settings, edited or missing lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens.base.errors import RunDirectoryError
from fedlens.base.shell_command import quoted_command, shell_command
from fedlens.base.summary_text import conjoined
from fedlens.engines.traits import traits_of
from fedlens.files.jsonl import difference, is_after, read_digest
from fedlens.run.rundir import RunDir
from fedlens.settings.config import Config, plain
from fedlens.settings.config_source import Source
from fedlens.settings.keys import changing, diff, flat
from fedlens.settings.own_files import OWN_FILES, edited_files, refuse_edited_since

ENGINE: Mapping[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "precision": "fp32",
    "channels_last": "auto",
    "group": 1,
    "gpus": 0.0,
}
"""Defaults of an engine's settings that results depend on, for engines that do not have them."""

RESCALING = frozenset({"local", "algorithm", "client", "server", "select", "aggregate", "data", "model"})
"""Tables with settings that can change the scale of the replies."""

_LONG = 60  # characters of a value in a message
_MANY = 8  # changes in a message
_NOT_SET = "not set"

Change = dict[str, Any]
"""`after_round`, `key`, `before` and `after`, as summary.json has it."""


def defining(config: Config) -> dict[str, Any]:
    """The settings that define an experiment's numbers, by dotted key, as JSON can hold them.

    >>> from fedlens.settings.config import read_config
    >>> config = read_config({
    ...     "rounds": 3, "model": "linear", "local": {"lr": 0.1}, "engine": {"name": "processes", "workers": 2},
    ...     "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}})
    >>> found = defining(config)
    >>> found["local.lr"], found["engine.name"], found["engine.threads"], "engine.workers" in found
    (0.1, 'processes', 1, False)
    """
    return {f"engine.{key}": default for key, default in ENGINE.items()} | changing(plain(config), "bits")


def device_of(about: Mapping[str, Any]) -> str | None:
    """The device that a run had at a checkpoint; None if the checkpoint does not say it."""
    settings = about.get("settings")
    device = settings.get("engine.device") if isinstance(settings, Mapping) else None
    return device if isinstance(device, str) else None


def changed(before: Mapping[str, Any], config: Config, source: Source) -> list[Change]:
    """The settings that differ from those of a checkpoint, each with `key`, `before` and `after` (None: not set).

    A setting that the checkpoint does not have, and that `source` does not set, is new in this version of fedlens.
    """
    now = json.loads(json.dumps(defining(config)))
    written = flat(source.values)

    def added(key: str) -> bool:
        return key not in before and not any(name == key or name.startswith(f"{key}.") for name in written)

    return [
        {"key": key, "before": old, "after": new}
        for key, old, new in sorted(diff(before, now), key=itemgetter(0))
        if not added(key) and not _same(key, old, new)
    ]


def check(
    run: RunDir, round: int, about: Mapping[str, Any], config: Config, source: Source, accept: bool
) -> list[Change]:
    """What was edited or lost since the checkpoint of `round`. Raises `RunDirectoryError` unless it is accepted."""
    edited = check_settings(run, round, about, config, source, accept)
    command = quoted_command("resume", run.path, accept_changes=True)
    refuse_edited_since(f"round {round}", about.get(OWN_FILES), source.values, accept, command)
    files = edited_files(about.get(OWN_FILES), source.values)
    changed = [
        {"after_round": round, "key": name, "before": old, "after": new} for name, (old, new) in files.items()
    ]
    return edited + changed + check_lines(run, round, about, accept)


def check_settings(
    run: RunDir,
    round: int,
    about: Mapping[str, Any],
    config: Config,
    source: Source,
    accept: bool,
    finished: bool = False,
) -> list[Change]:
    """The settings changed since the checkpoint of `round`. Raises `RunDirectoryError` unless they are accepted.

    With `finished`, the run has no rounds left: changes are refused unless `rounds` is raised.
    Nothing is compared with a checkpoint of an older version, which has no settings in it.
    """
    before = about.get("settings")
    changes = changed(before, config, source) if isinstance(before, Mapping) else []
    if config.rounds < round:
        new = quoted_command("run", run.config_path, out="DIR")
        raise RunDirectoryError(
            f"rounds is {config.rounds}, but {round} rounds are done",
            where=source.locate("rounds"),
            hint=f"set rounds to {round} or more, or start a new run with {new}",
        )
    _refuse_private_from_now(run, changes, source)
    one = len(changes) == 1
    where = source.locate(changes[0]["key"]) if one else str(run.config_path)
    if changes and finished and config.rounds == round:
        new = quoted_command("run", run.config_path, out="DIR")
        raise RunDirectoryError(
            f"the run is finished, and config.toml was edited since: {_listed(changes)}",
            where=where,
            hint=f"undo the {'change' if one else 'changes'}, or start a new run with these settings: {new}",
        )
    if changes and not accept:
        raise RunDirectoryError(
            f"config.toml was edited since round {round}: {_listed(changes)}",
            where=where,
            hint=f"undo the {'change' if one else 'changes'}, or continue with {'it' if one else 'them'}: "
            f"{shell_command('resume', run.path, accept_changes=True)}",
        )
    return [{"after_round": round, **change} for change in changes]


def _refuse_private_from_now(run: RunDir, changes: Sequence[Change], source: Source) -> None:
    """Raises `RunDirectoryError` for a run whose rounds were not private and that would promise privacy from now on."""
    for change in changes:
        if (change["key"], change["before"]) in (("privacy.noise", "seeded"), ("record.unsafe", True)):
            raise RunDirectoryError(
                f"the rounds so far were not private, and the run would promise that they were: {sentence(change)}",
                where=source.locate(change["key"]),
                hint=f"undo the change, or start a new run with {quoted_command('run', run.config_path, out='DIR')}",
            )


def rescaling(changes: Sequence[Change]) -> bool:
    """Whether a change can change the scale of the replies, so that norms from before it say nothing.

    >>> rescaling([{"key": "rounds"}, {"key": "local.lr"}]), rescaling([{"key": "rounds"}])
    (True, False)
    """
    return any(
        change["key"].partition(".")[0] in RESCALING or change["key"].endswith(".py") for change in changes
    )


def check_lines(
    run: RunDir, round: int, about: Mapping[str, Any], accept: bool, command: str | None = None
) -> list[Change]:
    """The lines of metrics.jsonl and clients.jsonl before `round` that are missing, there twice, or edited.

    Missing lines that `about`, of the checkpoint, lists as accepted earlier are left out. Only missing lines are seen
    where it has no digest of the lines, as those of older versions. Raises `RunDirectoryError` unless the others are
    accepted, with the `command` that accepts them; by default it resumes the run.
    """
    earlier, digests = _accepted(about), line_digests(about)
    missing = _missing_lines(run, round, digests.get(run.clients_path.name), about.get("client_lines"))
    faults = [(path, what) for path, what in missing if (path.name, what) not in earlier]
    known = {path.name for path, _ in faults}
    for path in run.appended:
        if path.name in digests and path.name not in known:
            edited = difference(path, round, digests[path.name])
            faults += [] if edited is None else [(path, edited)]
    if faults and not accept:
        path, what = faults[0]
        raise RunDirectoryError(
            f"{path.name} was edited or cut: {what}, and the run is at round {round}",
            where=str(path),
            hint="restore the file, or continue with it as it is: "
            f"{command or shell_command('resume', run.path, accept_changes=True)}",
        )
    return [{"after_round": round, "key": path.name, "before": None, "after": what} for path, what in faults]


def line_digests(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The digests of the lines before a checkpoint, by file; those of an older version have none.

    >>> line_digests({"client_lines": 3})
    {}
    """
    saved = about.get("lines")
    found = {name: read_digest(value) for name, value in saved.items()} if isinstance(saved, Mapping) else {}
    return {name: digest for name, digest in found.items() if digest is not None}


def _missing_lines(
    run: RunDir, round: int, digest: Mapping[str, Any] | None, client_lines: Any
) -> list[tuple[Path, str]]:
    """The rounds before `round` without a line in metrics.jsonl or with two, and lines missing from clients.jsonl.

    `digest` is that of clients.jsonl; a checkpoint of an older version has only the number of its lines.
    """
    faults: list[tuple[Path, str]] = []
    metrics = run.read_metrics()
    kept = Counter(number for number in map(_round_of, metrics) if number is not None and number < round)
    missing = [number for number in range(round) if number not in kept]
    twice = sorted(number for number, count in kept.items() if count > 1)
    if missing:
        faults.append((run.metrics_path, f"{_rounds(missing)} missing"))
    if twice:
        faults.append((run.metrics_path, f"{_rounds(twice)} there more than once"))
    wanted = client_lines if digest is None else digest["lines"]
    if isinstance(wanted, int):
        rounds = [row.get("round") for row in run.stream_clients()]
        counted = [number for number in rounds if not is_after(number, round - 1)]
        if len(counted) < wanted or (len(counted) > wanted and digest is None):
            trained = {_round_of(row) for row in metrics if row.get("clients")}
            gone = sorted(set(kept).intersection(trained).difference(counted))
            what = f"{len(counted)} of {wanted} lines are there"
            faults.append((run.clients_path, f"{_rounds(gone)} missing" if gone else what))
    return faults


def _round_of(row: Mapping[str, Any]) -> int | None:
    number = row.get("round")
    return number if isinstance(number, int) else None


def _accepted(about: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The files and faults of lines that an earlier `resume` accepted, as the checkpoint lists them."""
    listed = about.get("changes")
    changes = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return {(str(one.get("key")), str(one.get("after"))) for one in changes}


def check_fits(run: RunDir, initial: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises `RunDirectoryError` if the server state of a checkpoint cannot belong to the changed settings.

    Args:
        initial: the state that a run of the changed settings would start from.
        saved: the state in the checkpoint.
    """
    misfit = _misfit("", initial, saved)
    if misfit is not None:
        raise RunDirectoryError(
            f"the changed settings do not fit the checkpoint: {misfit}",
            where=str(run.config_path),
            hint=f"undo them, or start a new run with {quoted_command('run', run.config_path, out='DIR')}",
        )


def sentence(change: Change) -> str:
    """One change in words.

    >>> sentence({"key": "local.lr", "before": 0.1, "after": 0.5, "after_round": 4})
    'local.lr is 0.5, was 0.1'
    """
    if change["key"].endswith(".jsonl"):
        return f"{change['key']}: {change['after']}"
    if change["key"].endswith(".py"):
        return f"{change['key']} was edited"
    return f"{change['key']} is {_shown(change['after'])}, was {_shown(change['before'])}"


def _listed(changes: Sequence[Change]) -> str:
    more = f"; and {len(changes) - _MANY} more" if len(changes) > _MANY else ""
    return "; ".join(map(sentence, changes[:_MANY])) + more


def _shown(value: Any) -> str:
    text = _NOT_SET if value is None else json.dumps(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _same(key: str, before: Any, after: Any) -> bool:
    """Whether two different values of a setting give the same numbers."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return False
    if key == "engine.name":
        return all(traits_of({"name": name}).exact for name in (before, after))
    if key == "engine.device":  # the number of a GPU changes no number
        return before.partition(":")[0] == after.partition(":")[0]
    # A user's own file may have been moved together with the run.
    return ".py:" in before and ".py:" in after and Path(before).name == Path(after).name


def _rounds(numbers: Sequence[int]) -> str:
    """
    >>> _rounds([2]), _rounds([0, 1, 2, 7])
    ('round 2 is', 'rounds 0 to 2 and 7 are')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    shown = [*words[:_MANY], f"{len(words) - _MANY} more spans"] if len(words) > _MANY else words
    return f"round{'s' if len(numbers) > 1 else ''} {conjoined(shown)} {'are' if len(numbers) > 1 else 'is'}"


def _misfit(place: str, initial: Any, saved: Any) -> str | None:
    """The first place where two states differ in kind, keys or shape; a state that is empty at first may fill."""
    if isinstance(initial, Mapping) and isinstance(saved, Mapping):
        if place == "" or (initial and saved):
            for key in sorted(initial.keys() ^ saved.keys()):
                return f"{place}{key} is {'missing from it' if key in initial else 'only in it'}"
        for key in sorted(initial.keys() & saved.keys()):
            if (misfit := _misfit(f"{place}{key}.", initial[key], saved[key])) is not None:
                return misfit
        return None
    if isinstance(initial, Tensor) and isinstance(saved, Tensor) and initial.shape != saved.shape:
        return f"{place.rstrip('.')} has shape {tuple(saved.shape)} in it, and {tuple(initial.shape)} now"
    return None
