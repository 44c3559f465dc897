"""Text from files is parsed in one place, which sets the limits; and files are read without waiting for a pipe."""

from __future__ import annotations

import ast

from tests.unit.house.test_structure import parsed

PARSERS = {"json.load", "json.loads", "tomllib.load", "tomllib.loads"}
HERE = "base/parse_text.py"

# What is parsed is no file that a user or a stranger could have written.
EXEMPT = {
    "benchmark/batch_memory.py": "the output of a process of its own",
    "benchmark/memory_step.py": "an argument of its own",
    "studies/store.py": "settings that were made TOML on the same line",
    "base/shell_command.py": "a value that was a setting before",
    "data/catalogue.py": "a file of the package",
    "data/formats/coco_json.py": "reads the user's data, and says at which line and column they are wrong",
    "engines/devices.py": "the output of a process of its own",
    "run/changes.py": "settings that were made JSON on the same line",
    "pretraining.py": "settings that were made JSON on the same line",
    "pages/page_contents.py": "a page that was made before in the same call",
    "studies/reproduce.py": "a file of the package",
    "settings/toml_lines.py": "a key of a file that was parsed before",
}


def parsing(tree: ast.Module) -> set[str]:
    """The parsers that a module calls or passes on."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & PARSERS | {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } & PARSERS


def test_text_is_parsed_in_one_place() -> None:
    modules = {path for path, tree in parsed(r"json|tomllib").items() if parsing(tree)}
    assert modules - {HERE} == EXEMPT.keys()


def test_the_house_rule_sees_every_way_to_parse() -> None:
    for text in ("json.loads(x)", "json.load(x)", "from json import loads", "map(tomllib.loads, x)"):
        assert parsing(ast.parse(text)), text
    assert not parsing(ast.parse("json.dumps(x); tomllib.TOMLDecodeError"))
