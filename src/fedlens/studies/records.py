"""The recorded runs of studies, from record.toml: numbers, cost, and the folder of the files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlens.base.errors import ConfigError
from fedlens.studies.reproductions import FOLDER, study_command

RECORD = "record.toml"


@dataclass(frozen=True)
class StudyRecord:
    """One time that a study was run.

    Attributes:
        version: of fedlens.
        cpu_hours: of one core.
        outcome: a sentence on the results, and one on the claims of the document.
        commit: of the repository; with "+" after it if sources were edited, "" if it is not known.
        date: of the end, as YYYY-MM-DD.
        hours: of the clock.
        folder: of the files, in the repository.
        stale: what changed in the study since; "" if the record is that of the study.
        metric: the name and the unit of the numbers.
        numbers: "of" (method and case), "here" (ours), and "paper" (the paper's, "" where it states none).
        verdicts: "claim", "where" the paper states it, and "verdict": "shows", "does not show" or "cannot tell".
    """

    scale: str
    version: str
    cpu_hours: float
    outcome: str
    commit: str = ""
    date: str = ""
    hours: float = 0.0
    folder: str = ""
    stale: str = ""
    metric: str = ""
    numbers: Sequence[Mapping[str, str]] = ()
    verdicts: Sequence[Mapping[str, str]] = ()

    def command(self, name: str) -> str:
        """The command that makes the results of the study `name` again."""
        return study_command(FOLDER / f"{name}.toml", self.scale)


def records(path: Path | None = None) -> dict[str, list[StudyRecord]]:
    """The recorded runs of each study, from record.toml. Raises `ConfigError` if an entry is wrong."""
    path = path or FOLDER / RECORD
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return {name: [StudyRecord(**entry) for entry in entries] for name, entries in tables.items()}
    except TypeError as error:
        hint = "an entry has scale, version, cpu_hours and outcome"
        raise ConfigError(f"an entry is wrong: {error}", where=str(path), hint=hint) from None
