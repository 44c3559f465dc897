"""Repeats rounds of a run to record them, and checks that every number comes out as it did."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedlens.api import resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.base.shell_command import shell_command
from fedlens.engines.devices import resolved
from fedlens.engines.hardware import hardware
from fedlens.files.atomic_files import make_folder, refuse_link, refused
from fedlens.observers.read_recordings import folder_of, intact_round
from fedlens.run.changes import check_lines
from fedlens.run.checkpoint import peek, rounds_saved
from fedlens.run.rundir import RunDir
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since

if TYPE_CHECKING:
    from torch import nn

_CLOCK = ("seconds", "elapsed")
_COPIED = ("environment.json", "partition.npz", "roster.json", "initial.safetensors")


def repeat_rounds(
    directory: Path | str,
    rounds: Sequence[int],
    *,
    data_dir: Path | str | None = None,
    model: nn.Module | None = None,
    needs_models: bool = False,
    accept_changes: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Repeats a run from its last checkpoint before `rounds`, or from the start, and records these rounds.

    The recordings are added to the run directory. Rounds whose local models are recorded are left as they are, unless a
    file is corrupt; where the algorithm's replies hold no local models, rounds whose updates are recorded.

    Args:
        needs_models: whether updates alone are of no use.
        accept_changes: repeat the rounds although lines before them, or Python files of your own, were edited.

    Raises `ConfigError` if they are not, and the algorithm's replies hold no local models, before anything is trained;
    `RunDirectoryError` if a round is beyond those that are done, if the run was edited, if it trained on a GPU and this
    machine has none, or if a metric comes out differently, as with another version of PyTorch or another machine.
    """
    run = RunDir.open(Path(directory))
    with run.lock():
        environment = run.read_environment() or {}
        refuse_edited_since("the run trained", environment.get(OWN_FILES), run.read_config(), accept_changes)
        missing = sorted(round for round in set(rounds) if not _is_recorded(run, round))
        if not missing:
            return
        lines = {int(line["round"]): line for line in run.read_metrics()}
        if missing[-1] not in lines:
            raise RunDirectoryError(
                f"round {missing[-1]} cannot be repeated, because the run has {max(lines, default=0)} rounds so far",
                where=str(run.path),
                hint="name rounds that are done",
            )
        engine = _engine_here(run)
        try:
            scratch = Path(tempfile.mkdtemp(dir=run.path, prefix=".repeated-"))
        except OSError as error:
            raise refused(error, "a folder for the repeated rounds", run.path) from error
        try:
            again = RunDir(scratch / "run")
            start = _copied(run, again, missing)
            _, about = peek(again.checkpoint_path) or (0, {})
            # The copy is compared when it is resumed, and errors about it would name a folder that is removed.
            accepting = shell_command("analyze", run.path, record=missing, accept_changes=True)
            check_lines(run, start, about, accept_changes, accepting)
            say(f"repeating rounds {start + 1} to {missing[-1]} to record {', '.join(map(str, missing))}")

            def repeat(*kinds: str) -> None:
                _write_settings(run, again, engine, missing, kinds)
                resume(
                    again.path, data_dir=data_dir, report=False, model=model, until=missing[-1],
                    accept_changes=accept_changes,
                )  # fmt: skip

            try:
                repeat("local_models", "updates")
            except ConfigError as error:
                _refuse_unrecorded(run, error, needs_models)
                say(f"{error.what}; what clients send is recorded")
                repeat("updates")
            _check_equal(run, {int(line["round"]): line for line in again.read_metrics()}, lines, start)
            _take_recordings(run, again, missing)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _refuse_unrecorded(run: RunDir, error: ConfigError, needs_models: bool) -> None:
    """Raises the error of a repeated run, unless it is about local models and updates alone are of use."""
    where = error.where or ""
    if ": record" not in where:
        raise error
    has_updates = ": record.local_models" in where
    if needs_models or not has_updates:
        # The place is in the folder of the repeated run, which is removed.
        drift = "'drift', which needs only what clients send, or " if has_updates else ""
        raise ConfigError(
            error.what, where=str(run.path), hint=f"analyze {drift}a run of another algorithm"
        ) from error


def _take_recordings(run: RunDir, again: RunDir, rounds: Sequence[int]) -> None:
    """Moves the recordings of the repeated rounds into the run directory."""
    make_folder(run.recordings_path)
    for round in rounds:
        target = folder_of(run.recordings_path, round)
        refuse_link(target)
        if target.exists():
            shutil.rmtree(target)
        folder_of(again.recordings_path, round).rename(target)


def _is_recorded(run: RunDir, round: int) -> bool:
    found = intact_round(run, round)
    return found is not None and (found.local_models or not found.trains)


def _copied(run: RunDir, again: RunDir, rounds: Sequence[int]) -> int:
    """Copies the run as it was at its last checkpoint before `rounds`; returns the round of this checkpoint, or 0."""
    again.path.mkdir()
    for name in _COPIED:
        if (run.path / name).exists():
            shutil.copy2(run.path / name, again.path / name)
    saved = [round for round in rounds_saved(run.checkpoint_path) if round < rounds[0]]
    if not saved:
        return 0
    start = max(saved)
    name = f"round-{start:06d}"
    shutil.copytree(run.checkpoint_path / name, again.checkpoint_path / name)
    if run.states_path.exists():
        shutil.copytree(run.states_path, again.states_path)
    for path in run.appended:
        if path.exists():
            shutil.copy2(path, again.path / path.name)
    again.truncate_metrics(start)
    again.truncate_clients(start)
    return start


def _engine_here(run: RunDir) -> Any:
    """The run's engine; where this machine has another number of GPUs, with one that is there."""
    engine = run.read_config().get("engine", {})
    kind, _, number = str(engine.get("device", "")).partition(":") if isinstance(engine, dict) else ("",) * 3
    gpus = len(hardware().gpus) if kind == "cuda" else 1
    if gpus == 0:
        raise RunDirectoryError(
            "the run trained on a GPU and this machine has none, so its rounds cannot be repeated",
            where=str(run.path),
            hint="record them on a machine with a GPU; what is recorded can be analyzed here",
        )
    return {**engine, "device": resolved("auto")} if kind == "cuda" and int(number or 0) >= gpus else engine


def _write_settings(
    run: RunDir, again: RunDir, engine: Any, rounds: Sequence[int], kinds: Sequence[str]
) -> None:
    """Writes config.toml of the repeated run: that of the run with this engine, which records these rounds."""
    config = run.read_config()
    kept = {k: v for k, v in config.get("record", {}).items() if k not in ("local_models", "updates")}
    record = {**kept, **{kind: {"rounds": list(rounds)} for kind in kinds}}
    again.write_config(tomli_w.dumps({**config, "engine": engine, "record": record}))


def _check_equal(run: RunDir, repeated: Mapping[int, Any], lines: Mapping[int, Any], start: int) -> None:
    edited = bool((run.read_summary() or {}).get("changes"))
    for round, line in repeated.items():
        before = lines.get(round, {})  # lost, and accepted as lost
        # A round that was the last one at some time was evaluated, and need not be in the repeated run.
        for key in before.keys() & line.keys():
            if round > start and key not in _CLOCK and not _same(before[key], line[key]):
                hint = "use the versions and the machine in environment.json, or train the run anew with recordings"
                if edited:
                    hint = "the settings of the run were edited while it was stopped: train it anew with recordings"
                raise RunDirectoryError(
                    f"round {round} came out differently when it was repeated: {key} is {line[key]}, and was "
                    f"{before[key]}",
                    where=str(run.path),
                    hint=hint,
                )


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, float) and isinstance(b, float)
    return a == b or (both and math.isnan(a) and math.isnan(b))
