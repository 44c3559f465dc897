"""The analyses of a study's runs, made by the worker that carried out the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.analyses.analyze import FOLDER, analyze, file_name, read_index
from fedlens.analyses.registry import ANALYSES, needs_of
from fedlens.base.errors import ConfigError, nearest
from fedlens.files import jsonl
from fedlens.results.row_of_run import rounded
from fedlens.run.rundir import RunDir
from fedlens.studies.cells import StudyCells
from fedlens.studies.planned import PlannedRun
from fedlens.studies.study_file import StudySource

Rows = Sequence[Mapping[str, Any]]
_KINDS = ("local_models", "updates")


def records(run: PlannedRun) -> bool:
    """Whether a run records local models or updates."""
    table = run.settings.get("record")
    return isinstance(table, Mapping) and any(table.get(kind) for kind in _KINDS)


def analyzed(
    directory: Path, analyses: Mapping[str, Mapping[str, Any]], data_dir: Path | None
) -> dict[str, Rows]:
    """The rows of the analyses of a finished run. Its recordings are removed afterwards.

    The rows are written into the run directory before, so a study that is killed in between reads them there.

    Raises `FedlensError` if an analysis fails.
    """
    folder = directory / FOLDER
    made = read_index(folder)
    missing = [name for name in analyses if name not in made]
    if missing:
        analyze(directory, missing, settings={name: analyses[name] for name in missing}, data_dir=data_dir)
    rows: dict[str, Rows] = {
        name: _kept(jsonl.read(folder / f"{file_name(name)}.jsonl")) for name in analyses
    }
    shutil.rmtree(RunDir(directory).recordings_path, ignore_errors=True)
    return rows


def _kept(rows: Rows) -> list[dict[str, Any]]:
    """The rows without their lists over clients, with the digits that a line has."""
    return [{key: _rounded(value) for key, value in row.items() if not _over_clients(value)} for row in rows]


def _over_clients(value: Any) -> bool:
    """Whether a value is a list of tables, one for each client."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "client" in item for item in value)
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return rounded(value)


def refuse_analyses(cells: StudyCells, source: StudySource) -> None:
    """Raises `ConfigError` for an analysis that does not exist, or whose recordings no run of the study makes."""
    places, wanted = source.places, source.settings.analyses
    for name in wanted:
        where = places.locate("analyses", name)
        if ":" not in name and name not in dict(ANALYSES.rows()):
            raise ConfigError(
                f"unknown analysis '{name}'", where=where, hint=nearest(name, dict(ANALYSES.rows()))
            )
        needs = needs_of(name)
        kinds = _KINDS if needs != "local models" else _KINDS[:1]
        made = any(
            asked is not None and any(map(asked.includes, range(1, config.rounds + 1)))
            for config in cells.configs
            for kind in kinds
            for asked in [
                {"local_models": config.record.local_models, "updates": config.record.updates}[kind]
            ]
        )
        if needs != "nothing" and not made:
            raise ConfigError(
                f"the analysis '{name}' needs {needs}, which no run of the study records",
                where=where,
                hint=f'set "record.{kinds[0]}" = {{ every = 5 }}',
            )
