"""Reads `NAME.document.toml`: the numbers that a document states in its text and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedlens.base.errors import ConfigError
from fedlens.base.parse_text import parse_toml, read_text
from fedlens.files.regular_file import open_regular
from fedlens.results.claims import check_claim
from fedlens.results.rows import StudyInfo
from fedlens.results.stated import StatedValue
from fedlens.studies.study_file import CaseSettings, MethodSettings, StudySettings, StudySource


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
    lost: str = ""  # content of figures that the text of the document does not state
    claims: list[_Claim] = []
    values: list[StatedValue] = []


def read_document(path: Path, named: str | None = None) -> dict[str, Any]:
    """Returns the numbers of a document, in the form of `StudyInfo.document`.

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
    try:
        with open_regular(path) as file:
            document = _Document.model_validate(parse_toml(read_text(file)))
    except FileNotFoundError:
        raise ConfigError(
            f"the file {path} with the document's numbers does not exist",
            where=named,
            hint="copy or write it beside the study file, or remove 'document'",
        ) from None
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        what = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"invalid value: {what}", where=f"{path}: {key}", hint=_hint(problem)) from None
    except ValueError as error:
        raise ConfigError(f"the file is not valid TOML: {error}", where=str(path)) from None
    return {"lost": "", "claims": [], "values": [], **document.model_dump(exclude_defaults=True)}


def stated_document(source: StudySource) -> dict[str, Any]:
    """The document's numbers that the tables and figures of a study name, as `StudyInfo.document` has them.

    Values of several files are joined. A value of a method or a case that others stand for has their names here, and
    "labels" has the labels of methods at the scale of the document, where they are others. Raises `ConfigError` as
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
    """The documents that the tables and figures of a study name, by path."""
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
