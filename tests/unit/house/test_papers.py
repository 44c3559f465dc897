"""The table of what the documents describe: every row points to something, and nothing is claimed without it."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
import typer

from fedlens.cli.main import app
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.partition.registry import PARTITIONS
from fedlens.models.registry import MODELS
from fedlens.settings.config_source import recipes
from fedlens.studies.reproduce import StudyRecord, records
from fedlens.studies.reproductions import FOLDER, left_out, paper_rows, reproductions
from tools import set_ups_page
from tools.papers_page import KINDS, PAGE, README, ROOT, counts, rendered, state

ROWS = paper_rows()
PAPERS = {  # short name: its last figure and its last table
    "hsu2019": (6, 0),
    "hsu2020": (10, 5),
    "fedcv": (15, 16),
    "chen2022": (13, 9),
    "ghaemi2022": (1, 0),
}
COMMANDS = typer.main.get_command(app)


def is_command(value: str) -> bool:
    words = shlex.split(value)
    if words[:2] == ["python", "-m"]:
        return importlib.util.find_spec(words[2]) is not None
    found: Any = COMMANDS
    for word in words[1:]:
        if word.startswith("--"):
            if not any(word in parameter.opts for parameter in found.params):
                return False
            continue
        if not isinstance(
            found, typer.core.TyperGroup
        ):  # what a command lists or names, such as `list models`
            continue
        if word not in found.commands:
            return False
        found = found.commands[word]
    return words[0] == "fedlens"


def is_test(value: str) -> bool:
    file, _, function = value.partition("::")
    path = ROOT / file
    return path.is_file() and (not function or f"\ndef {function}(" in path.read_text(encoding="utf-8"))


HELD = {
    "study": lambda value: value in reproductions(),
    "page": lambda value: (
        ROOT / "docs" / value.partition("#")[0]
    ).is_file(),  # `make check` finds a wrong anchor
    "test": is_test,
    "recipe": lambda value: value in recipes(),
    "dataset": lambda value: value in CATALOGUE,
    "model": lambda value: value in MODELS,
    "partition": lambda value: value in PARTITIONS,
    "command": is_command,
}


WORDS = re.compile(r"(?<![./`])\bdocuments?\b(?!['\"]?[]=.:)`]| =| type| in JSON)", re.IGNORECASE)


def test_a_paper_is_called_a_paper() -> None:
    """In the pages, the labels and the commands: "document" is the name of a setting, which a study file keeps."""
    files = [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        *FOLDER.rglob("*.toml"),
        *FOLDER.rglob("*.csv"),
    ]
    files += [ROOT / "src/fedlens/cli/reproduce.py", *(ROOT / "src/fedlens/pages/templates").glob("*.j2")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if WORDS.search(line)
    ]
    assert found == []


def test_every_pointer_points_to_something() -> None:
    wrong = [
        f"{row.what}: {pointer}"
        for row in ROWS
        for pointer in row.pointers
        if not HELD[pointer.partition(":")[0]](pointer.partition(":")[2])
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("command", "fedlens data shows"),
        ("command", "fedlens cost --no-such-option"),
        ("command", "fedlens nothing"),
        ("test", "tests/identity/test_fedavg.py::test_nothing"),
        ("page", "nothing.md#here"),
    ],
)
def test_a_pointer_to_nothing_is_seen(pointer: str, value: str) -> None:
    assert not HELD[pointer](value)


def test_every_row_has_a_state_or_a_study_and_what_is_missing_has_a_reason() -> None:
    for row in ROWS:
        assert row.kind in KINDS, row
        assert set(row.papers) <= set(PAPERS), row
        computed = row.kind in ("figure", "table") and bool(row.studies)  # from record.toml, never written
        assert (row.state == "") if computed else row.state in ("works", "partly", "not there"), row
        assert bool(row.why) == (row.state in ("partly", "not there")) or not row.state, row
        assert row.where or row.state == "not there" or row.kind in ("figure", "table"), row


def test_every_figure_and_table_of_the_papers_has_one_row() -> None:
    expected = {
        f"{paper}/{kind}{number}"
        for paper, lasts in PAPERS.items()
        for kind, last in zip(("fig", "table"), lasts, strict=True)
        for number in range(1, last + 1)
    }
    drawn = [row for row in ROWS if row.kind in ("figure", "table")]
    numbered = [re.match(r"\w+/(fig|table)\d+", row.name) for row in drawn]
    assert {match[0] for match in numbered if match} == expected
    named = [name for row in drawn for name in row.studies]
    assert sorted(named) == sorted(reproductions()), "each study draws the figures of one row"
    assert not set(left_out()) & set(named)


def test_a_figure_is_recorded_only_with_a_record_of_each_of_its_studies() -> None:
    row = next(row for row in ROWS if row.studies == ("hsu2020/fig8a", "hsu2020/fig8b"))
    record = next((each[0] for each in records().values()), None) or StudyRecord(
        "minutes", "0.1.0", 0.1, "It shows."
    )
    assert state(row, {}) == "partly"
    assert state(row, {"hsu2020/fig8a": [record]}) == "partly"
    assert state(row, {name: [record] for name in row.studies}) == "recorded"
    assert state(replace(row, state="works"), {}) == "works"
    assert "(1 of them are figures" in counts({name: [record] for name in row.studies})
    assert not set(records()) - set(reproductions())


def test_the_pages_are_those_of_the_rows() -> None:
    for path in (PAGE, README):
        page = path.read_text(encoding="utf-8")
        assert page == rendered(page, records()), "run 'python -m tools.papers_page'"
    page = set_ups_page.PAGE.read_text(encoding="utf-8")
    assert page == set_ups_page.rendered(page), "run 'python -m tools.set_ups_page'"
