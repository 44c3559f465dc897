"""Finds run directories: named ones, those below a folder, and those that match a pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedlens.base.errors import FedlensError, RunDirectoryError
from fedlens.results.run import Run, read_run

_DEPTH = (
    4  # folders below a parent folder that are searched: runs/<name>/<id> and runs/<name>-cost/<run> are two
)


def find_runs(paths: Sequence[Path | str]) -> list[Path]:
    """The run directories that `paths` name, each once.

    A path is a run directory, a folder with runs below it, or a pattern such as `runs/*/2026*`; runs below a folder or
    of a pattern are sorted by path. Links to folders below a folder are not followed.

    Raises `RunDirectoryError` if a path or a pattern gives no run.
    """
    runs: dict[Path, Path] = {}
    for path in map(str, paths):
        here = Path(path).expanduser()
        matches = (
            [here] if here.exists() or not glob.has_magic(path) else sorted(map(Path, glob.glob(str(here))))
        )
        below = [run for match in matches if match.is_dir() for run in _runs_at(match, _DEPTH)]
        if not below:
            raise _no_runs(path, here, matches)
        for run in below:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def read_runs(paths: Sequence[Path | str]) -> tuple[list[Run], list[str]]:
    """The runs that `paths` name (see `find_runs`), and a sentence for each that cannot be read.

    Raises `RunDirectoryError` if there is no run, or if none can be read.
    """
    runs, skipped = [], []
    for path in find_runs(paths):
        try:
            runs.append(read_run(path))
        except FedlensError as error:
            skipped.append((path, error))
    if not runs:
        raise skipped[0][1]
    return runs, [f"skipped {path}: {error}" for path, error in skipped]


def _runs_at(path: Path, depth: int) -> Iterator[Path]:
    if (path / "config.toml").is_file():
        yield path
        return
    if depth == 0:
        return
    try:
        with os.scandir(path) as entries:
            names = sorted(
                e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
            )
    except OSError:
        return
    for name in names:
        yield from _runs_at(path / name, depth - 1)


def _no_runs(path: str, here: Path, matches: Sequence[Path]) -> RunDirectoryError:
    hint = "give run directories, a folder with runs below it, or a pattern such as 'runs/*/2026*'"
    if not matches:
        return RunDirectoryError(f"no directory matches the pattern {path}", hint=hint)
    if not here.exists() and len(matches) == 1:
        return RunDirectoryError("the directory does not exist", where=path)
    if here.is_file():
        return RunDirectoryError(f"{path} is a file, not a run directory", hint=hint)
    return RunDirectoryError(f"no run found in {path}", hint=hint)
