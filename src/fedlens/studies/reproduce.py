"""The studies that reproduce figures and tables: costs by scale, missing data, our recorded runs, and the user's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.parse_text import parse_json
from fedlens.data.catalogue import CATALOGUE, data_directory, presence
from fedlens.results.rows import Results
from fedlens.studies.reproductions import FOLDER, folder_of, reproduction, reproductions, study_command

SCALES = ("smoke", "minutes", "laptop", "paper")
COSTS = "costs.json"


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study at one scale.

    Attributes:
        runs: runs of tuning and final runs.
        images: trained on in all runs, counting each use.
        datasets: the names of the datasets that it reads, in order.
        pretraining_images: of its pre-trainings, which the other numbers leave out; an image of two views counts twice.
    """

    runs: int
    images: int
    datasets: Sequence[str]
    pretraining_images: int = 0


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
    costs: Mapping[str, StudyCost]
    absent: Sequence[str]
    local: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    records: Sequence[StudyRecord] = ()


def absent_data(datasets: Sequence[str], data_dir: Path | None) -> list[str]:
    """The datasets that are not on this machine, or only in part."""
    root, catalogued = data_directory(data_dir), [name for name in datasets if name in CATALOGUE]
    return [name for name in catalogued if presence(CATALOGUE[name], root).state in ("absent", "partly")]


def refuse_absent(datasets: Sequence[str], data_dir: Path | None, download: bool) -> None:
    """Raises `DataError` if a dataset is not on this machine, with how to get it.

    Args:
        download: whether datasets with published archives may be fetched.
    """
    root = data_directory(data_dir)
    for name in absent_data(datasets, data_dir):
        facts = CATALOGUE[name]
        if not (download and facts.archives):
            where = "not" if presence(facts, root).state == "absent" else "only in part"
            raise DataError(f"the study needs {name}, which is {where} in {root}", hint=facts.how)


@cache
def costs() -> Mapping[str, Mapping[str, StudyCost]]:
    """The costs of each study by scale, from costs.json."""
    tables = parse_json((FOLDER / COSTS).read_bytes())
    return {
        name: {scale: StudyCost(**cost) for scale, cost in scales.items()} for name, scales in tables.items()
    }


def study_scales(name: str) -> list[str]:
    """The scales of a study, the smallest first.

    >>> study_scales("hsu2019/fig5")[-2:]
    ['laptop', 'paper']
    """
    scales = {*tomllib.loads(reproduction(name).read_text(encoding="utf-8")).get("scales", {}), "paper"}
    return [scale for scale in SCALES if scale in scales]


def chosen_scale(name: str, scale: str | None = None) -> str:
    """The scale to run: the given one, else "minutes", or "smoke" for a study without it.

    Raises `ConfigError` if the study does not have the given scale.
    """
    scales = study_scales(name)
    if scale is None:
        return "minutes" if "minutes" in scales else "smoke"
    if scale not in scales:
        known = ", ".join(scales)
        raise ConfigError(f"{name} has no scale '{scale}'", hint=f"choose one of its scales: {known}")
    return scale


def listed_studies(data_dir: Path | None = None, studies: Path | None = None) -> list[ListedStudy]:
    """Returns all studies with their costs, missing data, and completed runs.

    Args:
        studies: the folder with local results, by default `studies`.
    """
    recorded, costs_by_study = records(), costs()
    everything = dict.fromkeys(
        each for scales in costs_by_study.values() for cost in scales.values() for each in cost.datasets
    )
    missing = set(absent_data([*everything], data_dir))
    rows: list[ListedStudy] = []
    for name, path in reproductions().items():
        by_scale = costs_by_study.get(name, {})
        needed = dict.fromkeys(dataset for cost in by_scale.values() for dataset in cost.datasets)
        absent = [dataset for dataset in needed if dataset in missing]
        local = {
            scale: counts
            for scale, cost in by_scale.items()
            if (counts := _local(name, scale, cost, studies or Path("studies"))) is not None
        }
        rows.append(ListedStudy(name, _first_line(path), by_scale, absent, local, recorded.get(name, ())))
    return rows


def _local(name: str, scale: str, cost: StudyCost, studies: Path) -> tuple[int, int] | None:
    """(finished runs, planned runs) of a study in the local folder; None if it was never started."""
    try:
        results = Results.read(studies / folder_of(name, scale).relative_to("studies"))
    except DataError:
        return None
    planned = {entry.digest for entry in results.info.entries}
    finished = sum(
        digest in results.lines and results.lines[digest].status == "finished" for digest in planned
    )
    if planned <= results.lines.keys():
        return finished, len(planned)
    return finished, max(cost.runs, len(planned))


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


RECORD = "record.toml"


@dataclass(frozen=True)
class StudyRecord:
    """One time that a study was run.

    Attributes:
        version: of fedlens.
        cpu_hours: of one core.
        outcome: a sentence on the results, and one on the claims of the paper.
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
