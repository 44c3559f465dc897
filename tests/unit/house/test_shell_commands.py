"""Every command that the source shows with something of the user's in it is made by `fedlens.base.shell_command`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup

from fedlens.cli.main import app
from tests.unit.cli.printed import parsed
from tests.unit.house import test_structure as structure

COMMANDS = typer.main.get_group(app).commands
VERBS = sorted(COMMANDS)
GROUPS = {verb: group for verb, group in COMMANDS.items() if isinstance(group, TyperGroup)}
NAMES = {*VERBS, *(f"{verb} {name}" for verb, group in GROUPS.items() for name in group.commands)}
COMMAND = re.compile(rf"fedlens (?:{'|'.join(VERBS)})\b[^'`\"()\[;,]*")
# Words that are no command. `file: the words`.
NO_COMMANDS = {
    "data/partition/partition.py: fedlens partition 1",  # the format of a file
}
QUOTES = {  # modules with other uses of `shlex`: a command as it was given, a path, or a single option
    "cli/cost.py",
    "cli/partition.py",
    "base/errors.py",
    "base/shell_command.py",
    "run/environment.py",
    "pages/run_page.py",
}


def texts(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The texts of a module but for docstrings, and whether a value of an f-string follows."""
    known = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for part, after in zip(node.values, [*node.values[1:], None], strict=True):
                if isinstance(part, ast.Constant):
                    yield str(part.value), after is not None
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            known.add(id(node.body[0].value))  # type: ignore[attr-defined]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in known:
            yield node.value, False


def faults(tree: ast.Module) -> list[str]:
    """Commands in the texts of a module that were put together by hand, or that do not run."""
    found = []
    for text, open_ended in texts(tree):
        for match in COMMAND.finditer(text):
            words = match[0].rstrip(". ")
            if open_ended and match.end() == len(text):
                found.append(f"{words} {{...}}")
            elif words.removeprefix("fedlens ") not in NAMES:
                try:
                    parsed(words)
                except Exception:
                    found.append(words)
    for node in ast.walk(tree):
        first = node.elts[:2] if isinstance(node, ast.List | ast.Tuple) else []
        if [part.value for part in first if isinstance(part, ast.Constant)][:2] in [
            ["fedlens", v] for v in VERBS
        ]:
            found.append(ast.unparse(node))
    return found


def test_no_command_is_put_together_by_hand() -> None:
    some = structure.parsed(rf"fedlens(?: |[\"'], ?[\"'])(?:{'|'.join(VERBS)})\b")
    found = {f"{path}: {fault}" for path, tree in some.items() for fault in faults(tree)}
    assert found == NO_COMMANDS


def test_no_template_has_a_command() -> None:
    found = [
        p.name
        for p in structure.SOURCE.rglob("*.j2")
        if re.search(rf"fedlens (?:{'|'.join(VERBS)})\b", p.read_text())
    ]
    assert found == []


def test_few_modules_quote_for_a_shell() -> None:
    assert set(structure.parsed(r"(?m)^ *(import|from) shlex")) == QUOTES


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("f\"run 'fedlens resume {path}'\"", "fedlens resume {...}"),
        ("f'fedlens sweep {shlex.quote(file)} --scale {scale}'", "fedlens sweep {...}"),
        ("['fedlens', 'data', 'check', folder]", "['fedlens', 'data', 'check', folder]"),
        ("'see: fedlens list recipe'", "fedlens list recipe"),
        ("\"'fedlens list recipes' lists them; 'fedlens export' writes a file; fedlens is here\"", None),
    ],
)
def test_the_check_sees(source: str, fault: str | None) -> None:
    assert faults(ast.parse(f"x = {source}")) == ([] if fault is None else [fault])
