"""Writes what a person looks at after a study: frames, tables, figures and the page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fedlens.base.errors import RunDirectoryError
from fedlens.files.atomic_files import make_folder, read_regular, write_atomically
from fedlens.files.text_files import read_json
from fedlens.pages.study_page import write_study_page
from fedlens.results.figures.study_figures import write_study_figures
from fedlens.results.frames import write_frames
from fedlens.results.rows import Results
from fedlens.results.tables import study_tables

TABLES, FIGURES = "tables", "figures"
WRITTEN = "outputs.json"
"""The SHA-256 of each file in `tables` and `figures`, by its path in the folder."""


def write_outputs(folder: Path) -> list[Path]:
    """Writes the files of results of the study in `folder`, from study.json and results.jsonl alone; their paths.

    runs and cells (.csv, .parquet), cells.tex, tables/*.tex and *.csv, figures/* if matplotlib is installed, and the
    page study.html, the last. A table or a figure of an earlier call that the study does not ask for any more is
    removed, unless somebody edited it.

    Raises `DataError` if the folder has no study, `RunDirectoryError` if a file in it is damaged or a link,
    `RunFailed` if the disk refuses, and `ConfigError` if a table or figure that the study asks for is wrong.
    """
    # What would be refused is refused before anything is written.
    earlier = read_json(folder / WRITTEN) or {}
    results = Results.read(folder)
    drawn = find_spec("matplotlib") is not None
    tables, *figures = [make_folder(folder / name) for name in ((TABLES, FIGURES) if drawn else (TABLES,))]
    written = write_frames(results, folder)
    for table in study_tables(results):
        for suffix, text in (("tex", table.to_latex()), ("csv", table.to_csv())):
            path = tables / f"{table.name}.{suffix}"
            write_atomically(path, text.encode())
            written.append(path)
    for place in figures:
        written += write_study_figures(results, place)
    _remove_stale(folder, earlier, written, [path.name for path in (tables, *figures)])
    return [*written, write_study_page(folder)]


def _remove_stale(
    folder: Path, earlier: Mapping[str, str], written: Sequence[Path], made: Sequence[str]
) -> None:
    """Removes what an earlier call wrote into the folders `made` and this one did not; notes what was written.

    A file that is not as it was written, or that no call wrote, is a user's, and stays.
    """
    now = {path.relative_to(folder).as_posix(): _sha256(path) for path in written if path.parent != folder}
    for name, sha256 in earlier.items():
        path = folder / name
        if name in now or path.parent.parent != folder:
            continue
        if path.parent.name not in made:  # without matplotlib the figures stay as they are
            now[name] = sha256
        elif _sha256(path) == sha256:
            with suppress(OSError):  # it is only superfluous
                path.unlink()
    write_atomically(folder / WRITTEN, (json.dumps(dict(sorted(now.items())), indent=1) + "\n").encode())


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except (OSError, RunDirectoryError):
        return None
