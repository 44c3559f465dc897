"""The studies that reproduce figures and tables of the documents: their files, costs, data and records."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedlens.core.errors import ConfigError, DataError, nearest
from fedlens.data.catalogue import CATALOGUE, presence
from fedlens.experiment.datadir import data_directory
from fedlens.report.study_results import StudyResults

SCALES = ("smoke", "laptop", "paper")
_FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "studies"
_DOCUMENT = ".document.toml"
_FILES = {"record.toml", "speeds.toml"}  # of the folder that are no studies


@dataclass(frozen=True)
class ScaleCost:
    """What a scale of a study costs and needs, see `fedlens.studies.study_cost.StudyCost`."""

    runs: int
    images: float
    hours: float | None
    datasets: Sequence[str]


@dataclass(frozen=True)
class StudyRecord:
    """One time that a study was run.

    Attributes:
        version: of fedlens.
        cpu_hours: of one core.
        outcome: one sentence on what the result shows.
    """

    scale: str
    version: str
    cpu_hours: float
    outcome: str


@dataclass(frozen=True)
class ListedStudy:
    """One study of `fedlens reproduce --list`.

    Attributes:
        description: the first line of its file.
        costs: by scale.
        absent: datasets of all scales that are not on this machine.
        local: by scale, what the folder `studies/` holds: (finished runs, planned runs).
        records: when we ran it.
    """

    name: str
    description: str
    costs: Mapping[str, ScaleCost]
    absent: Sequence[str]
    local: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    records: Sequence[StudyRecord] = ()


def reproductions() -> dict[str, Path]:
    """The file of every study by its name.

    >>> "hsu2019/fig5" in reproductions()
    True
    """
    paths = sorted(path for path in _FOLDER.rglob("*.toml") if not path.name.endswith(_DOCUMENT))
    return {
        path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in paths if path.name not in _FILES
    }


def reproduction(name: str) -> Path:
    """The file of a study. Raises `ConfigError` with the nearest name if no study has this one.

    >>> reproduction("hsu2019/fig9")
    Traceback (most recent call last):
    fedlens.core.errors.ConfigError: unknown study 'hsu2019/fig9'; did you mean 'hsu2019/fig6'.
    """
    known = reproductions()
    if name in known:
        return known[name]
    parts = [other for other in known if other.startswith(name) and len(name) > 3]
    hint = f"it has several parts: {', '.join(parts)}" if parts else nearest(name, known)
    raise ConfigError(f"unknown study '{name}'", hint=hint)


def folder_of(name: str, scale: str) -> Path:
    """Where the results of a study go unless another folder is named.

    >>> folder_of("hsu2019/fig5", "laptop").as_posix()
    'studies/hsu2019/fig5/laptop'
    """
    return Path("studies", *name.split("/"), scale)


def command_of(name: str, scale: str) -> str:
    """The command that makes the results of a study."""
    return f"fedlens reproduce {shlex.quote(name)} --scale {scale}"


def refuse_absent(datasets: Sequence[str], data_dir: Path | None, download: bool) -> None:
    """Raises `DataError` if a dataset is not on this machine, with how to get it.

    Args:
        download: whether datasets with published archives may be fetched.
    """
    root = data_directory(data_dir)
    for name in datasets:
        facts = CATALOGUE.get(name)
        if facts is None or (download and facts.archives):
            continue
        found = presence(facts, root)
        if found.state in ("absent", "partly"):
            what = "is not" if found.state == "absent" else "is only in part"
            lacking = f" ({len(found.lacking)} of its files are missing)" if found.state == "partly" else ""
            raise DataError(f"the study needs {name}, which {what} in {root}{lacking}", hint=facts.how)


@cache
def costs() -> Mapping[str, Mapping[str, ScaleCost]]:
    """The costs of each study by scale, from costs.json."""
    text = (files("fedlens") / "recipes" / "studies" / "costs.json").read_text(encoding="utf-8")
    return {
        name: {scale: ScaleCost(**cost) for scale, cost in scales.items()}
        for name, scales in json.loads(text).items()
    }


def computed_costs(name: str) -> dict[str, Any]:
    """The costs of a study by scale as costs.json has them, computed anew. Plans all runs, which can take a minute."""
    from fedlens.studies.study_cost import study_cost
    from fedlens.studies.study_plan import StudyPlan

    path, made = reproduction(name), {}
    for scale in SCALES:
        cost = study_cost(StudyPlan.load(path, scale))
        hours = None if cost.hours is None else float(f"{cost.hours:.3g}")
        made[scale] = {**asdict(cost), "images": round(cost.images), "hours": hours, "datasets": [*cost.datasets]}
    return made


def records(path: Path | None = None) -> dict[str, list[StudyRecord]]:
    """What we have run, from record.toml, by study. Raises `ConfigError` if an entry is wrong."""
    path = path or _FOLDER / "record.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return {name: [StudyRecord(**entry) for entry in entries] for name, entries in tables.items()}
    except TypeError as error:
        hint = "an entry has scale, version, cpu_hours and outcome"
        raise ConfigError(f"an entry is wrong: {error}", where=str(path), hint=hint) from None


def listed_studies(data_dir: Path | None = None, studies: Path | None = None) -> list[ListedStudy]:
    """All studies with their costs, the data that are missing, and whether they have been run.

    Args:
        studies: the folder with local results, by default `studies`.
    """
    root, recorded, known = data_directory(data_dir), records(), costs()
    found: list[ListedStudy] = []
    states: dict[str, str] = {}
    for name, path in reproductions().items():
        by_scale = known.get(name, {})
        needed = dict.fromkeys(dataset for cost in by_scale.values() for dataset in cost.datasets)
        for dataset in needed:
            if dataset not in states:
                facts = CATALOGUE.get(dataset)
                states[dataset] = presence(facts, root).state if facts else "here"
        absent = [dataset for dataset in needed if states[dataset] in ("absent", "partly")]
        local = {
            scale: counts
            for scale, cost in by_scale.items()
            if (counts := _local(name, scale, cost, studies or Path("studies"))) is not None
        }
        found.append(ListedStudy(name, _first_line(path), by_scale, absent, local, recorded.get(name, ())))
    return found


def _local(name: str, scale: str, cost: ScaleCost, studies: Path) -> tuple[int, int] | None:
    """(finished runs, planned runs) of a study in the local folder; None if it was never started."""
    folder = studies.joinpath(*name.split("/"), scale)
    try:
        results = StudyResults.read(folder)
    except DataError:
        return None
    finished = sum(line.status == "finished" for line in results.lines.values())
    planned = {entry.digest for entry in results.info.entries}
    known = all(digest in results.lines for digest in planned)
    return finished, len(results.lines) if known else max(cost.runs, len(planned))


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
