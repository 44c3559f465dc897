"""Reads the JSON and TOML files in the directories of runs and studies, which a stranger may have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fedlens.base.errors import DataError, RunDirectoryError
from fedlens.base.parse_text import parse_json, parse_toml, read_text
from fedlens.files.atomic_files import open_readable

Parsed = TypeVar("Parsed")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is missing.

    Raises `RunDirectoryError` if it is a link, not a regular file, too large, nested too deeply, or not a JSON object.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> read_json(path) is None
    True
    >>> _ = path.write_text("[]")
    >>> read_json(path)
    Traceback (most recent call last):
    fedlens.base.errors.RunDirectoryError: summary.json is corrupt: it does not contain a JSON object (...).
    """
    try:
        content = _read(path, parse_json)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise RunDirectoryError(f"{path.name} is corrupt: it does not contain a JSON object", where=str(path))
    return content


def read_toml_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises `RunDirectoryError` as `read_json` does, and if the file is missing."""
    try:
        return _read(path, parse_toml)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def parsed_fact(about: Any, key: str, path: Path) -> Any:
    """The value of `key` in the metadata of a file of tensors, where values are JSON.

    Raises `DataError` if the metadata lack the key, or its value is no JSON.

    >>> parsed_fact({"classes": '["cat"]'}, "classes", Path("model.safetensors"))
    ['cat']
    """
    try:
        return parse_json(about[key])
    except KeyError:
        raise DataError(f"the metadata of {path.name} lack '{key}'", where=str(path)) from None
    except ValueError as error:
        what = f"the metadata of {path.name} are corrupt: '{key}': {error}"
        raise DataError(what, where=str(path)) from error


def _read(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    try:
        with open_readable(path) as file:
            return parse(read_text(file))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise RunDirectoryError(f"{path.name} is corrupt: {error}", where=str(path)) from error
