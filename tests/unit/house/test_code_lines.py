"""Rooms stay within their budgets of lines, and folders small enough to be read as a list."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.unit.house.code_lines import BUDGETS, SOURCE, budgets, by_room, code_lines, table

MOST = 25
# Each file of these is one named thing: a dataset, a model, an algorithm, a command.
NAMED_THINGS = {"cli", "algorithms", "data/datasets", "models"}


def test_each_room_keeps_to_its_budget() -> None:
    sys.stdout.write(f"{table()}\n")
    allowed, lines = budgets(), by_room()
    assert lines.keys() == allowed.keys(), f"{BUDGETS.name} lists other rooms"
    over = {room: count - allowed[room] for room, count in lines.items() if count > allowed[room]}
    assert not over, f"rooms over their budget: {over}; shorten code, or raise {BUDGETS.name} on purpose"


def test_no_budget_is_left_unused() -> None:
    """Lines that were saved stay saved: a budget is lowered to what its room has, give or take 2 % and 20 lines."""
    lines = by_room()
    slack = {room: most - lines[room] for room, most in budgets().items() if most > 1.02 * lines[room] + 20}
    assert not slack, f"budgets to lower in {BUDGETS.name}, by lines: {slack}"


def test_a_folder_has_at_most_25_files() -> None:
    assert crowded(SOURCE) == NAMED_THINGS


def crowded(source: Path) -> set[str]:
    """The folders with more files."""
    files = Counter(path.parent.relative_to(source).as_posix() for path in source.rglob("*.py"))
    return {folder for folder, count in files.items() if count > MOST}


def test_the_count_sees_code_alone(tmp_path: Path) -> None:
    text = '"""Doc."""\n\n# note\nx = """two\nlines"""\n\n\ndef f():\n    """Doc,\n    long."""\n    return (\n1\n)\n'
    assert code_lines(text) == 6
    room = tmp_path / "room"
    room.mkdir()
    for number in range(MOST + 1):
        (room / f"m{number}.py").write_text(text)
    (tmp_path / "alone.py").write_text("x = 1\n")
    assert by_room(tmp_path) == {".": 1, "room": 6 * (MOST + 1)}
    assert crowded(tmp_path) == {"room"}
