"""Writes what a person looks at after a study: frames, tables, figures and the page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fedlens.experiment.atomic_files import read_regular, refused, write_atomically
from fedlens.report.study_figures import write_study_figures
from fedlens.report.study_frames import write_frames
from fedlens.report.study_page import write_study_page
from fedlens.report.study_results import StudyResults
from fedlens.report.study_tables import study_tables

TABLES, FIGURES = "tables", "figures"
WRITTEN = "outputs.json"
"""The SHA-256 of each file in `tables` and `figures`, by its path in the folder."""


def write_outputs(folder: Path) -> list[Path]:
    """Writes the files of results of the study in `folder`, from study.json and results.jsonl alone; their paths.

    runs and cells (.csv, .parquet), cells.tex, tables/*.tex and *.csv, figures/* if matplotlib is installed, and the
    page study.html, the last. A table or a figure of an earlier call that the study does not ask for any more is
    removed, unless somebody edited it.

    Raises `DataError` if the folder has no study, `RunFailed` if the disk refuses, and `ConfigError` if a table or
    figure that the study asks for is wrong.
    """
    results = StudyResults.read(folder)
    written = write_frames(results, folder)
    for table in study_tables(results):
        for suffix, text in (("tex", table.to_latex()), ("csv", table.to_csv())):
            path = _folder(folder / TABLES) / f"{table.name}.{suffix}"
            write_atomically(path, text.encode())
            written.append(path)
    drawn = find_spec("matplotlib") is not None
    if drawn:
        written += write_study_figures(results, _folder(folder / FIGURES))
    _remove_stale(folder, written, (TABLES, FIGURES) if drawn else (TABLES,))
    return [*written, write_study_page(folder)]


def _remove_stale(folder: Path, written: Sequence[Path], made: Sequence[str]) -> None:
    """Removes what an earlier call wrote into the folders `made` and this one did not; notes what was written.

    A file that is not as it was written, or that no call wrote, is a user's, and stays.
    """
    now = {path.relative_to(folder).as_posix(): _sha256(path) for path in written if path.parent != folder}
    for name, sha256 in _earlier(folder).items():
        path = folder / name
        if name in now or path.parent.parent != folder:
            continue
        if path.parent.name not in made:  # without matplotlib the figures stay as they are
            now[name] = sha256
        elif _sha256(path) == sha256:
            with suppress(OSError):  # it is only superfluous
                path.unlink()
    write_atomically(folder / WRITTEN, (json.dumps(dict(sorted(now.items())), indent=1) + "\n").encode())


def _earlier(folder: Path) -> dict[str, str]:
    """What the last call wrote; empty if that is not known."""
    try:
        values = json.loads(read_regular(folder / WRITTEN))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError:
        return None


def _folder(path: Path) -> Path:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise refused(error, path.name, path) from error
    return path
