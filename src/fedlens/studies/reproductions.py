"""The files of the studies that reproduce figures and tables of the papers, by name, and what the papers state.

`NAME.document.toml` has the numbers that a paper states in its text and tables.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.shell_command import quoted_command, shell_command
from fedlens.results.claims import check_claim
from fedlens.results.rows import StudyInfo
from fedlens.results.stated import StatedValue
from fedlens.settings.config_source import read_toml
from fedlens.studies.study_file import StudySource
from fedlens.studies.study_settings import CaseSettings, MethodSettings, StudySettings

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "studies"
COPY = "study.toml"
"""The copy of a study file in the folder of its results."""
_DOCUMENT = ".document.toml"
_ROWS = "papers.csv"
_LONGEST = 120  # characters of the name of a folder
_OTHERS = {"record.toml", "names.toml"}  # of the folder that are no studies
_NO_NAME = re.compile(r"[^\w.]+")  # in a setting, what the name of its folder leaves out


@dataclass(frozen=True)
class Paper:
    """One of the papers that fedlens is built from."""

    authors: str
    title: str
    link: str


PAPERS: Mapping[str, Paper] = {
    "hsu2019": Paper(
        "Hsu et al. 2019",
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        "https://arxiv.org/abs/1909.06335",
    ),
    "hsu2020": Paper(
        "Hsu et al. 2020",
        "Federated Visual Classification with Real-World Data Distribution",
        "https://arxiv.org/abs/2003.08082",
    ),
    "fedcv": Paper(
        "He et al. 2021",
        "FedCV: A Federated Learning Framework for Diverse Computer Vision Tasks",
        "https://arxiv.org/abs/2111.11066",
    ),
    "chen2022": Paper(
        "Chen et al. 2022", "On Pre-Training for Federated Learning", "https://arxiv.org/abs/2206.11488"
    ),
    "ghaemi2022": Paper(
        "Ghaemi 2022",
        "Federated Learning for Image Classification: FedAvg, FedProx, and ADMM-Based Algorithms",
        "https://github.com/hafezgh/Federated-Deep-Learning-for-Image-Classfication",
    ),
}
"""The papers by their short names, which are the folders of their studies."""


@dataclass(frozen=True)
class PaperRow:
    """One thing that the papers describe, of papers.csv.

    Attributes:
        papers: the short names of the papers.
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
def paper_rows() -> tuple[PaperRow, ...]:
    """Everything that the five papers describe, in the order of papers.csv.

    >>> sorted({row.kind for row in paper_rows()})[:3]
    ['algorithm', 'dataset', 'figure']
    """
    with (FOLDER / _ROWS).open(encoding="utf-8", newline="") as file:
        return tuple(
            PaperRow(tuple(papers.split()), kind, what, where, tuple(pointers.split("; ")), state, why)
            for papers, kind, what, where, pointers, state, why in islice(csv.reader(file), 1, None)
        )


@cache
def left_out() -> dict[str, str]:
    """The figures and tables of papers that have no study, with the reason, or where they are.

    >>> "chen2022/table7" in left_out()
    True
    """
    drawn = [row for row in paper_rows() if row.kind in ("figure", "table") and row.state]
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


def paper_of(path: Path | None) -> Paper | None:
    """The paper that a study file of fedlens belongs to; None for a study of the user.

    >>> paper_of(reproduction("hsu2019/fig5")).link
    'https://arxiv.org/abs/1909.06335'
    """
    return PAPERS.get(path.resolve().parent.name) if _is_ours(path) and path is not None else None


def _is_ours(path: Path | None) -> bool:
    return path is not None and path.resolve().is_relative_to(FOLDER)


def folder_of(name: str, scale: str, changes: Sequence[str] = ()) -> Path:
    """Returns the default folder of the results of a study; changed settings have a folder of their own.

    >>> folder_of("hsu2019/fig5", "laptop").as_posix(), folder_of("hsu2019/fig5", "laptop", ["rounds=3"]).name
    ('studies/hsu2019/fig5/laptop', 'laptop-rounds-3')
    """
    return Path("studies", *name.split("/"), _NO_NAME.sub("-", " ".join([scale, *changes]))[:_LONGEST])


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
    if path is not None and _is_ours(path) and seeds is None:
        name, scale = _name(path.resolve()), scale or "paper"
        out = folder if folder != folder_of(name, scale, changes) else None
        return shell_command("reproduce", name, changes=changes, scale=scale, out=out, data_dir=data_dir)
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


class _Claim(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(min_length=1)
    where: str = Field(min_length=1)
    holds: str = ""  # see `fedlens.results.claims`
    why: str = ""  # the claim has no expression
    metric: str | None = None
    at: dict[Literal["rounds", "batches", "bytes", "target", "relative_target", "changes"], float] = Field(
        {}, max_length=1
    )

    @model_validator(mode="after")
    def _computed_or_not(self) -> _Claim:
        if bool(self.holds) == bool(self.why):
            raise ValueError("exactly one of holds and why must be set")
        return self


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)
    lost: str = ""  # content of figures that the text of the paper does not state
    claims: list[_Claim] = []
    values: list[StatedValue] = []


def read_document(path: Path, named: str | None = None) -> dict[str, Any]:
    """Returns the numbers of a paper, in the form of `StudyInfo.document`.

    Keys: "source", "lost" (what only a figure showed), "claims" (a list of tables, see
    `fedlens.results.claims`), and "values": a list of tables, see `fedlens.results.stated.StatedValue`.

    Args:
        named: the place in the study file that names it.

    Raises `ConfigError` if the file is missing, is not TOML, or an entry is wrong.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "fig5.document.toml"
    >>> entry = '[[values]]\\nmethod = "fedavgm"\\nmetric = "test_accuracy"\\nlow = 0.75\\nwhere = "section 4.2"\\n'
    >>> _ = path.write_text(f'source = "hsu2019, figure 5"\\n{entry}')
    >>> read_document(path)["values"][0]["low"]
    0.75
    """
    if not path.exists():
        raise ConfigError(
            f"the file {path} with the paper's numbers does not exist",
            where=named,
            hint="copy or write it beside the study file, or remove 'document'",
        )
    _, values = read_toml(path, "")
    try:
        document = _Document.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        what = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"invalid value: {what}", where=f"{path}: {key}", hint=_hint(problem)) from None
    return {"lost": "", "claims": [], "values": [], **document.model_dump(exclude_defaults=True)}


def stated_document(source: StudySource) -> dict[str, Any]:
    """The paper's numbers that the tables and figures of a study name, as `StudyInfo.document` has them.

    Values of several files are joined. A value of a method or a case that others stand for has their names here, and
    "labels" has the labels of methods at the scale of the paper, where they are others. Raises `ConfigError` as
    `read_document` does.
    """
    documents = list(_documents(source).values())
    if not documents:
        return {}
    joined = {key: [item for each in documents for item in each[key]] for key in ("claims", "values")}
    joined["values"] = [one for each in joined["values"] for one in of_stand_ins(each, source.settings)]
    words = {key: "; ".join(filter(None, (each[key] for each in documents))) for key in ("source", "lost")}
    return {**words, **joined, **_labels(source)}


def check_claims(source: StudySource, paper: StudyInfo) -> None:
    """Raises `ConfigError` for a claim that cannot be read, or names what the scale "paper" does not have."""
    for path, document in _documents(source).items():
        for number, claim in enumerate(document["claims"], 1):
            if "holds" in claim:
                check_claim(claim["holds"], paper, f"{path}: claim {number}")


def _documents(source: StudySource) -> dict[Path, dict[str, Any]]:
    """The stated numbers that the tables and figures of a study name, by the path of their file."""
    study = source.settings
    files: dict[str, str] = {}  # and the first place that names each
    for kind, specs in (("tables", study.tables), ("figures", study.figures)):
        for number, spec in enumerate(specs):
            if isinstance(name := spec.get("document"), str):
                files.setdefault(name, source.places.locate_listed(kind, number, "document"))
    return {source.folder / name: read_document(source.folder / name, place) for name, place in files.items()}


def of_stand_ins(value: Mapping[str, Any], study: StudySettings) -> list[dict[str, Any]]:
    """A value for each method and case that is its own or stands for it; itself if none does."""
    values = [{**value, "method": name} for name in _standing(study.methods, value["method"])]
    case = value.get("case", {})
    if "case" not in case:
        return values
    names = _standing(study.cases, case["case"])
    return [{**one, "case": {**case, "case": name}} for one in values for name in names]


def _standing(tables: Mapping[str, MethodSettings | CaseSettings] | None, own: str) -> list[str]:
    return [name for name, table in (tables or {}).items() if (table.stands_for or name) == own] or [own]


def _labels(source: StudySource) -> dict[str, dict[str, str]]:
    now, full = source.settings.methods or {}, source.full.get("methods", {})
    here = {name: table.label or name for name, table in now.items()}
    targets = dict.fromkeys(full, "") | {name: table.stands_for or "" for name, table in now.items()}
    labels = {name: full.get(own or name, {}).get("label") or own or name for name, own in targets.items()}
    labels = {name: label for name, label in labels.items() if label != here.get(name, name)}
    return {"labels": labels} if labels else {}


def _hint(problem: Mapping[str, Any]) -> str:
    keys = "method, metric, where, case, at, and one of value, low, high, about"
    if "claims" in problem["loc"]:
        return "the keys of [[claims]] are text, where, one of holds and why, metric, and at"
    return f"the keys of [[values]] are {keys}" if "values" in problem["loc"] else "see docs/reproduce.md"
