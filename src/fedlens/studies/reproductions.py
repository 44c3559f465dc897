"""The files of the studies that reproduce figures and tables of the documents, by name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.shell_command import quoted_command, shell_command

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "studies"
COPY = "study.toml"
"""The copy of a study file in the folder of its results."""
_DOCUMENT = ".document.toml"
_ROWS = "documents.csv"
_OTHERS = {"record.toml", "names.toml"}  # of the folder that are no studies


@dataclass(frozen=True)
class DocumentRow:
    """One thing that the documents describe, of documents.csv.

    Attributes:
        papers: the short names of the documents.
        kind: "system", "algorithm", "training", "dataset", "model", "partition", "metric", "figure" or "table".
        what: the thing; of a figure or table "Figure 5: what it shows".
        where: where fedlens has it.
        pointers: what shows it, such as "study:hsu2019/fig5", "page:tasks.md#segmentation" or "command:fedlens cost".
        state: "works", "partly" or "not there"; empty if a study draws it, whose records tell.
        why: why it is not there, or what is missing.
    """

    papers: tuple[str, ...]
    kind: str
    what: str
    where: str
    pointers: tuple[str, ...]
    state: str
    why: str

    @property
    def studies(self) -> tuple[str, ...]:
        """The studies that draw it."""
        return tuple(each.removeprefix("study:") for each in self.pointers if each.startswith("study:"))

    @property
    def name(self) -> str:
        """The name that a study of this figure or table has, or would have."""
        number = self.what.partition(":")[0].lower().replace("figure ", "fig").replace("table ", "table")
        return f"{self.papers[0]}/{number.replace(' ', '')}"


@cache
def document_rows() -> tuple[DocumentRow, ...]:
    """Everything that the five documents describe, in the order of documents.csv.

    >>> sorted({row.kind for row in document_rows()})[:3]
    ['algorithm', 'dataset', 'figure']
    """
    with (FOLDER / _ROWS).open(encoding="utf-8", newline="") as file:
        return tuple(
            DocumentRow(tuple(papers.split()), kind, what, where, tuple(pointers.split("; ")), state, why)
            for papers, kind, what, where, pointers, state, why in islice(csv.reader(file), 1, None)
        )


@cache
def left_out() -> dict[str, str]:
    """The figures and tables of documents that have no study, with the reason, or where they are.

    >>> "chen2022/table7" in left_out()
    True
    """
    drawn = [row for row in document_rows() if row.kind in ("figure", "table") and row.state]
    rows = [row for row in drawn if row.name[-1].isdigit()]  # the others have no number to ask for
    return {row.name: row.why if row.state == "not there" else row.where or row.why for row in rows}


def reproductions() -> dict[str, Path]:
    """The file of every study by its name.

    >>> "hsu2019/fig5" in reproductions()
    True
    """
    paths = [path for path in sorted(FOLDER.rglob("*.toml")) if not path.name.endswith(_DOCUMENT)]
    return {_name(path): path for path in paths if path.name not in _OTHERS}


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def reproduction(name: str) -> Path:
    """The file of a study. Raises `ConfigError` with the nearest name if no study has this one, or with
    the reason if it is left out.

    >>> reproduction("hsu2019/fig9")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: unknown study 'hsu2019/fig9'; did you mean 'hsu2019/fig6'.
    """
    paths = reproductions()
    if name in paths:
        return paths[name]
    if name in left_out():
        raise ConfigError(
            f"'{name}' has no study: {left_out()[name]}",
            hint=f"{quoted_command('reproduce', list=True)} lists all",
        )
    parts = [other for other in paths if name and other.startswith(name)]
    hint = f"choose one of {', '.join(parts)}" if parts else nearest(name, paths)
    raise ConfigError(f"unknown study '{name}'", hint=hint)


def folder_of(name: str, scale: str) -> Path:
    """Returns the default folder of the results of a study.

    >>> folder_of("hsu2019/fig5", "laptop").as_posix()
    'studies/hsu2019/fig5/laptop'
    """
    return Path("studies", *name.split("/"), scale)


def study_command(
    path: Path | None,
    scale: str,
    folder: Path | None = None,
    usual: Path | None = None,
    *,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    data_dir: Path | str | None = None,
) -> str:
    """The command that makes the results of a study again, with everything that was given.

    Args:
        path: the study file; None for a study in Python, of which `folder` has a copy.
        scale: "" for a study without scales.
        folder: of the results; None for the one without `--out`.
        usual: the folder of `fedlens sweep` without `--out`.
        changes, seeds: what replaced settings and seeds of the file.

    >>> study_command(reproduction("hsu2019/fig5"), "laptop", Path("here"), Path("studies/fig5/laptop"))
    'fedlens reproduce hsu2019/fig5 --scale laptop --out here'
    >>> usual = Path("studies/my study")
    >>> study_command(Path("my study.toml"), "", usual, usual, changes=["rounds=2"], seeds=[3, 4])
    "fedlens sweep 'my study.toml' --set rounds=2 --seeds 3,4"
    """
    if path is not None and path.resolve().is_relative_to(FOLDER) and not changes and seeds is None:
        name, scale = _name(path.resolve()), scale or "paper"
        out = folder if folder != folder_of(name, scale) else None
        return shell_command("reproduce", name, scale=scale, out=out, data_dir=data_dir)
    if path is None:
        path = Path("STUDY_FILE") if folder is None else folder / COPY
    return shell_command(
        "sweep",
        path,
        changes=changes,
        scale=scale if scale not in ("", "paper") else None,
        seeds=seeds,
        out=folder if folder != usual else None,
        data_dir=data_dir,
    )
