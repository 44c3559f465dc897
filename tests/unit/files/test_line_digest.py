"""The digest of appended lines: it finds an edit, and stays small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlens.files import jsonl
from fedlens.files.jsonl import MARKS, LineDigest, difference, read_digest

LINES = 1000


def written(path: Path, lines: int) -> LineDigest:
    digest = LineDigest()
    for first in range(0, lines, 7):  # several lines in one write, as of a round's clients
        rows = [{"round": at, "loss": 1 / (at + 1)} for at in range(first, min(first + 7, lines))]
        digest.add(jsonl.append(path, rows))
    return digest


@pytest.mark.parametrize("lines", [0, 1, MARKS, MARKS + 1, 2 * MARKS + 1, LINES])
def test_the_same_lines_have_the_same_digest_however_they_were_added(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "metrics.jsonl"
    saved = written(path, lines).saved()
    assert saved["lines"] == lines
    assert LineDigest.of(path).saved() == saved
    assert difference(path, lines, json.loads(json.dumps(saved))) is None
    with path.open("a") as file:
        file.write('{"round": 1000}\n{"round": 10')  # later rounds, and a line that a kill cut off
    assert difference(path, lines, saved) is None


def test_the_digest_of_many_lines_is_small_and_locates_an_edit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    saved = written(path, LINES).saved()
    assert len(saved["marks"]) <= MARKS
    assert saved["every"] == 16
    assert len(json.dumps(saved)) < 1500
    before = path.read_text().splitlines(keepends=True)
    for at in (0, 500, 991, LINES - 1):
        path.write_text("".join([*before[:at], before[at].replace("}", ', "mine": 1}'), *before[at + 1 :]]))
        first = at // 16 * 16 + 1
        last = min(first + 15, LINES)
        assert difference(path, LINES, saved) == f"one of the lines {first} to {last} was changed"
    path.write_text("".join([*before, '{"note": "mine"}\n']))
    assert difference(path, LINES, saved) == "line 1001 was added"
    path.write_text("".join(before[:300]))
    assert difference(path, LINES, saved) == "one of the lines 289 to 304 was changed"
    path.unlink()
    assert difference(path, LINES, saved) == "line 1 is missing"


@pytest.mark.parametrize("key", ["lines", "sha256", "every", "marks"])
def test_what_is_not_a_digest_is_none(key: str) -> None:
    saved = LineDigest().saved()
    assert read_digest(saved) == saved
    assert read_digest({**saved, key: None}) is None
    assert read_digest([saved]) is None
