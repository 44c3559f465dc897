"""Counts the lines of code of each room of the source: no blank lines, comments and docstrings.

python -m tests.unit.house.code_lines    # prints each room beside its budget
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src/fedlens"
BUDGETS = Path(__file__).with_name("code_lines.toml")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """The lines that hold code.

    >>> code_lines('\"\"\"A module.\"\"\"\\n\\nx = [  # a comment\\n    1,\\n]\\n')
    3
    """
    lines = (line.strip() for line in text.splitlines())
    held = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    return len(held - set(_docstrings(ast.parse(text))))


@cache
def by_room(source: Path = SOURCE) -> dict[str, int]:
    """The lines of each folder of the source, and of the files beside the folders as "."."""
    lines: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        room, *inner = path.relative_to(source).parts
        lines[room if inner else "."] += code_lines(path.read_text("utf-8"))
    return dict(sorted(lines.items()))


def budgets() -> dict[str, int]:
    """The most lines that each room may have."""
    rooms: dict[str, int] = tomllib.loads(BUDGETS.read_text("utf-8"))
    return rooms


def table() -> str:
    """A line for each room: its lines and its budget."""
    allowed, lines = budgets(), by_room()
    rows = [*((room, lines[room], allowed.get(room, 0)) for room in lines)]
    rows.append(("all", sum(lines.values()), sum(allowed.values())))
    return "\n".join(f"{room:12}{count:8,} of {most:8,}" for room, count, most in rows)


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
