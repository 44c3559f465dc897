"""Parses JSON and TOML from files of strangers: every fault is a `ValueError`, also text that is nested too deeply."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any, BinaryIO

LARGEST = 2**30
"""The largest text that is read, in bytes: a file of JSON or TOML, or one line of a file of lines."""
DEEPEST = 200
"""The deepest nesting that is accepted: what walks over a deeper value later would end at Python's own limit."""


class TooDeepError(ValueError):
    """Lists and tables are nested more than `DEEPEST` levels deep."""


def read_text(file: BinaryIO) -> bytes:
    """The bytes of an open file from its position on. Raises `ValueError` if they are more than `LARGEST`."""
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST / 2**30:g} GiB")
    return data


def parse_json(
    text: str | bytes | bytearray,
    hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    deepest: int = DEEPEST,
) -> Any:
    r"""The value of a JSON text in UTF-8; `hook` builds each object from its pairs.

    Raises `ValueError` with the reason, `json.JSONDecodeError` with the place.

    >>> parse_json(b'{"round": 1}')
    {'round': 1}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    fedlens.base.parse_text.TooDeepError: it is nested more than 200 levels deep
    >>> parse_json(b"\xff")
    Traceback (most recent call last):
    ValueError: it is not UTF-8: byte 1 cannot be read
    """
    text = _decoded(text)
    try:
        value = json.loads(text, object_pairs_hook=hook)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise _refused(error) from None
    if text.count("[") + text.count("{") > deepest:  # else it cannot be too deep
        _check_depth(value, deepest)
    return value


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The table of a TOML text in UTF-8. Raises `ValueError` with the reason, `tomllib.TOMLDecodeError` with the place.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> parse_toml(".".join("a" * 5000) + " = 1")
    Traceback (most recent call last):
    fedlens.base.parse_text.TooDeepError: it is nested more than 200 levels deep
    """
    text = _decoded(text)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise _refused(error) from None
    _check_depth(table)
    return table


def _decoded(text: str | bytes | bytearray) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte {error.start + 1} cannot be read") from None


def _check_depth(value: Any, deepest: int = DEEPEST) -> None:
    level = [value]
    for _ in range(deepest + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(deepest)


def _too_deep(deepest: int) -> TooDeepError:
    return TooDeepError(f"it is nested more than {deepest} levels deep")


def _refused(error: RecursionError | ValueError) -> ValueError:
    if isinstance(error, RecursionError):
        return _too_deep(DEEPEST)
    if "integer string conversion" in str(error):
        return ValueError("a number has more than 4300 digits")  # Python's message speaks of the interpreter
    return error  # of a hook
