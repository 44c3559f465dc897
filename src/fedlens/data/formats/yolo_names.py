"""The class names of a YOLO dataset: one per line in a text file, or the `names` of data.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedlens.base.errors import DataError
from fedlens.data.formats.texts import read_text

if TYPE_CHECKING:
    import yaml

LISTS = ("classes.txt", "labels/classes.txt", "obj.names", "data/obj.names")
YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")

_HINT = 'write them as a list, names: ["cat", "dog"], or give the setting classes'


def find_names(folder: Path) -> list[str] | None:
    """The class names in the order of their numbers; None if `folder` has no file with them.

    Raises `DataError` if the file cannot be read.
    """
    for name in (*LISTS, *YAMLS):
        path = folder / name
        if path.is_file():
            text = read_text(path, folder)
            return yaml_names(text, str(path)) if name in YAMLS else _lines(text, path)
    return None


def _lines(text: str, path: Path) -> list[str]:
    names = [line.strip() for line in text.rstrip().splitlines()]
    for number, name in enumerate(names, 1):
        if not name:
            hint = "name the class, or remove the line; the lines are numbered from 0"
            raise DataError("the line is empty", where=f"{path}, line {number}", hint=hint)
    return _distinct(names, str(path))


def yaml_names(text: str, where: str) -> list[str]:
    """The class names in the text of a data.yaml: a list, or names numbered from 0.

    Names are taken as they are written: `yes` and `1.0` are strings. No object is constructed from the file.

    Raises `DataError` with the line if the YAML is invalid or `names` is neither form.

    >>> yaml_names("nc: 2\\nnames: ['cat', dog]  # in order", "data.yaml")
    ['cat', 'dog']
    >>> yaml_names("names:\\n  0: cat\\n  1: dog\\n", "data.yaml")
    ['cat', 'dog']
    """
    import yaml  # here, because only this format needs it

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # recursion: many brackets
        problem, line = str(error).partition("\n")[0], ""
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            problem, line = str(error.problem), f", line {error.problem_mark.line + 1}"
        raise DataError(f"the YAML is invalid: {problem}", where=f"{where}{line}", hint=_HINT) from error
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    for key, value in entries:
        if key.value == "names":
            names = [node.value for node in _in_order(value)]
            # A name of several lines, or a list in place of a name, is a slip.
            if not names or not all(isinstance(name, str) and name and name.isprintable() for name in names):
                place = f"{where}, line {key.start_mark.line + 1}"
                raise DataError("the names of the classes cannot be read", where=place, hint=_HINT)
            return _distinct(names, where)
    raise DataError("there is no key 'names'", where=where, hint=_HINT)


def _in_order(names: yaml.Node) -> list[yaml.Node]:
    """The nodes of the names; empty unless they are a list, or numbered from 0 without gaps."""
    import yaml

    if isinstance(names, yaml.SequenceNode):
        return list(names.value)
    if not isinstance(names, yaml.MappingNode):
        return []
    numbered = {key.value: value for key, value in names.value if isinstance(key, yaml.ScalarNode)}
    nodes = [numbered.get(str(number)) for number in range(len(names.value))]
    return [node for node in nodes if node is not None] if None not in nodes else []


def _distinct(names: list[str], where: str) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "give each class its own name"
        raise DataError(f"two classes are named '{twice}'", where=where, hint=hint)
    return names
