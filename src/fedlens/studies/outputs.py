"""Writes what a person looks at after a study: frames, tables, figures and the page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedlens.experiment.atomic_files import refused, write_atomically
from fedlens.report.study_figures import write_study_figures
from fedlens.report.study_frames import write_frames
from fedlens.report.study_page import write_study_page
from fedlens.report.study_results import StudyResults
from fedlens.report.study_tables import study_tables

TABLES, FIGURES = "tables", "figures"


def write_outputs(folder: Path) -> list[Path]:
    """Writes the files of results of the study in `folder`, from study.json and results.jsonl alone; their paths.

    runs and cells (.csv, .parquet), cells.tex, tables/*.tex and *.csv, figures/* if matplotlib is installed, and the
    page study.html, the last.

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
    if find_spec("matplotlib") is not None:
        written += write_study_figures(results, _folder(folder / FIGURES))
    return [*written, write_study_page(folder)]


def _folder(path: Path) -> Path:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise refused(error, path.name, path) from error
    return path
