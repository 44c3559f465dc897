"""Files with one JSON object a line, written while a run goes on and read while it does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.core.errors import RunDirectoryError
from fedlens.experiment.atomic_files import refused, write_atomically


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add `rows` in one write, all or none; raises `RunFailed` where the disk is full or refuses.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append(path, [{"round": 0}, {"round": 1}])
    >>> read(path)
    [{'round': 0}, {'round': 1}]
    """
    content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                _write_all(file.fileno(), content)
            except BaseException:
                os.ftruncate(file.fileno(), before)
                raise
    except OSError as error:
        raise refused(error, f"a line of {path.name}", path) from error


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def sync(path: Path) -> None:
    """Wait until the disk has what was appended; a file that is not there has nothing to wait for."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise refused(error, path.name, path) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects, first line first: none where there is no file, and without a last line that was cut.

    Raises `RunDirectoryError` that names the line where one before the last cannot be read.
    """
    return [row for _, row in _parse(path)]


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """The objects one by one, as `read` gives them, without the whole file in memory. Raises what `read` raises."""
    try:
        with open(path, "rb") as file:
            cut = 0
            for number, text in enumerate(file, start=1):
                row = _object(text)
                if row is not None and not cut:
                    yield row
                elif text.strip():
                    if cut:  # only the last line may have been cut by a kill
                        raise RunDirectoryError("a line cannot be read", where=f"{path}, line {cut}")
                    cut = number
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def truncate(path: Path, after_round: int) -> int:
    """Drop the lines whose `round` is past `after_round`, and a last line that was cut; how many they were.

    The lines that stay are not touched, and the file is replaced as a whole.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append(path, [{"round": 0}, {"round": 1}, {"round": 2}])
    >>> truncate(path, 1), read(path)
    (1, [{'round': 0}, {'round': 1}])
    """
    if not path.exists():
        return 0
    kept = [line for line, row in _parse(path) if row.get("round", 0) <= after_round]
    content = b"".join(line + b"\n" for line in kept)
    before = path.read_bytes()
    if content != before:
        write_atomically(path, content)
    return len(before.splitlines()) - len(kept)


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    try:
        texts = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"{path.name} cannot be read: {error.strerror}"
        raise RunDirectoryError(message, where=str(path)) from error
    parsed: list[tuple[bytes, dict[str, Any]]] = []
    for number, text in enumerate(texts, start=1):
        row = _object(text)
        if row is not None:
            parsed.append((text, row))
        elif any(texts[number:]):  # the last line may have been cut by a kill, one before it may not
            raise RunDirectoryError("a line cannot be read", where=f"{path}, line {number}")
    return parsed


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
