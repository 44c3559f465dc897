"""The names of the classes of a YOLO dataset: one a line in a text file, or the `names` of data.yaml."""

from __future__ import annotations

import re
from pathlib import Path

from fedlens.core.errors import DataError

LISTS = ("classes.txt", "labels/classes.txt", "obj.names", "data/obj.names")
YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")

_NAMES = re.compile(r"names\s*:(?:\s+(.*)|)$")
_WORD = r"'(?:[^']|'')*'|\"[^\"\\]*\"|[^\s'\"\[\]{},:#&*!|>%@`-][^'\"\[\]{},:#]*"
_ITEM = re.compile(rf"-\s+({_WORD})\s*$")
_PAIR = re.compile(rf"(\d+)\s*:\s+({_WORD})\s*$")
_QUOTED_OR_COMMENT = re.compile(r"('[^']*'|\"[^\"]*\")|(?:^|\s)#.*$")
_HINT = 'write them as a list, names: ["cat", "dog"], or give the setting classes'


def find_names(folder: Path) -> tuple[list[str], Path] | None:
    """(names in the order of their numbers, the file they stand in); None where no such file is in `folder`.

    Raises `DataError` where the file cannot be read as one.
    """
    for name in (*LISTS, *YAMLS):
        path = folder / name
        if path.is_file():
            try:
                text = path.read_bytes().decode("utf-8-sig")
            except OSError as error:
                raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
            except UnicodeDecodeError:
                raise DataError("the file is not UTF-8", where=str(path), hint="save it in UTF-8") from None
            names = yaml_names(text, str(path)) if name in YAMLS else _lines(text, path)
            return names, path
    return None


def _lines(text: str, path: Path) -> list[str]:
    names = [line.strip() for line in text.rstrip().splitlines()]
    for number, name in enumerate(names, 1):
        if not name:
            hint = "name the class, or remove the line; the lines are numbered from 0"
            raise DataError("the line is empty", where=f"{path}, line {number}", hint=hint)
    return _distinct(names, str(path))


def yaml_names(text: str, where: str) -> list[str]:
    """The names of the classes in a data.yaml, of which nothing else is read.

    They may stand as a list or numbered from 0, in one line or one a line. Raises `DataError` where they stand
    in another way: YAML has many more.

    >>> yaml_names("nc: 2\\nnames: ['cat', dog]  # in order", "data.yaml")
    ['cat', 'dog']
    >>> yaml_names("names:\\n  0: cat\\n  1: dog\\n", "data.yaml")
    ['cat', 'dog']
    """
    lines = [
        _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", line).rstrip() for line in text.splitlines()
    ]
    for number, line in enumerate(lines):
        if match := _NAMES.match(line):
            rest = (match[1] or "").strip()
            items = _flow(lines, number, rest) if rest else _block(lines[number + 1 :])
            names = _in_order(items)
            if not names:
                raise DataError(
                    "the names of the classes cannot be read",
                    where=f"{where}, line {number + 1}",
                    hint=_HINT,
                )
            return _distinct(names, where)
    raise DataError("there are no 'names' in it", where=where, hint=_HINT)


def _flow(lines: list[str], number: int, rest: str) -> list[str]:
    """The items between brackets, each `word` or `number: word`; none where it is something else."""
    close = {"[": "]", "{": "}"}.get(rest[0])
    if close is None:
        return []
    text = rest
    for line in lines[number + 1 :]:
        if text.endswith(close):
            break
        text += f" {line.strip()}"
    if not text.endswith(close):
        return []
    item = _WORD if close == "]" else rf"\d+\s*:\s+(?:{_WORD})"
    inner = text[1:-1].strip().removesuffix(",").strip()
    found = [match[0].strip() for match in re.finditer(item, inner)]
    # What is left between the items has to be their commas, and nothing else.
    left = re.sub(r"\s", "", re.sub(item, "", inner))
    return found if left == "," * (len(found) - 1) else []


def _block(lines: list[str]) -> list[str]:
    """The items one a line, each `- word` or `number: word`; none where a line is something else."""
    found: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if not line[0].isspace() and not line.startswith("-"):
            break
        text = line.strip()
        if item := _ITEM.fullmatch(text):
            found.append(item[1].strip())
        elif _PAIR.fullmatch(text):
            found.append(text)
        else:
            return []
    return found


def _in_order(items: list[str]) -> list[str]:
    """The bare names; none where some are numbered and not all from 0 on."""
    pairs = [_PAIR.fullmatch(item) for item in items]
    if not any(pairs):
        return [_bare(item) for item in items]
    numbered = {int(pair[1]): _bare(pair[2].strip()) for pair in pairs if pair}
    if len(numbered) < len(items) or sorted(numbered) != list(range(len(items))):
        return []
    return [numbered[at] for at in range(len(items))]


def _bare(word: str) -> str:
    quote = word[0]
    if quote in "'\"":
        return word[1:-1].replace("''", "'") if quote == "'" else word[1:-1]
    return word


def _distinct(names: list[str], where: str) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "give each class a name of its own"
        raise DataError(f"the class '{twice}' is named twice", where=where, hint=hint)
    return names
