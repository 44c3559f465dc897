"""Files of one JSON object per line, appended and read during a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.base.parse_text import LARGEST, parse_json
from fedlens.files.atomic_files import (
    open_readable,
    open_unlinked,
    read_regular,
    refused,
    write_atomically,
)


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Append `rows` in one write, all or none, and return what was written.

    Raises `RunFailed` if the disk is full or refuses, `RunDirectoryError` if `path` is a link or not a regular file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append(path, [{"round": 0}, {"round": 1}])
    b'{"round": 0}\\n{"round": 1}\\n'
    >>> read(path)
    [{'round': 0}, {'round': 1}]
    """
    content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    try:
        descriptor = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "ab", buffering=0) as file:
            if os.fstat(descriptor).st_nlink > 1:  # the line would appear in the file of the other name, too
                hint = "replace it with a copy: cp FILE COPY, then mv COPY FILE"
                raise RunDirectoryError(f"{path.name} is a hard link", where=str(path), hint=hint)
            before = os.fstat(descriptor).st_size
            try:
                _write_all(file.fileno(), content)
            except BaseException:
                os.ftruncate(file.fileno(), before)
                raise
    except OSError as error:
        raise refused(error, f"a line of {path.name}", path) from error
    return content


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def sync(path: Path) -> None:
    """Wait until the disk has the appended lines; a missing file has none."""
    try:
        descriptor = open_unlinked(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(error, path.name, path) from error
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise refused(error, path.name, path) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in order, without a truncated last line; none if there is no file.

    Raises `RunDirectoryError` with the line number if an earlier line cannot be read, or if any line is what no kill
    leaves: not UTF-8, nested too deeply, too long.
    """
    return list(stream(path))


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """The objects one by one, as `read` gives them, without the whole file in memory. Raises what `read` raises."""
    return (row for _, row in stream_lines(path))


def stream_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines, each with its line break, and their objects. Raises what `read` raises."""
    cut = 0  # the line that a kill may have cut, if it is the last one
    try:
        with open_readable(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST + 1), b""), start=1):
                text = line.removesuffix(b"\n")
                row = _object(text, f"{path}, line {number}")
                if cut and text:
                    raise RunDirectoryError("a line cannot be read", where=f"{path}, line {cut}")
                if row is None:
                    cut = cut or number
                else:
                    yield text + b"\n", row
                if not line.endswith(
                    b"\n"
                ):  # the file ended here: what a writer appends meanwhile is read next time
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def truncate(path: Path, after_round: int) -> int:
    """Drop the lines of later rounds than `after_round` and a truncated last line; returns how many.

    The other lines are unchanged; the file is replaced atomically.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> _ = append(path, [{"round": 0}, {"round": 1}, {"round": 2}])
    >>> truncate(path, 1), read(path)
    (1, [{'round': 0}, {'round': 1}])
    """
    if not path.exists():
        return 0
    kept = [line for line, row in stream_lines(path) if not is_after(row.get("round"), after_round)]
    content = b"".join(kept)
    before = read_regular(path)
    if content != before:
        write_atomically(path, content)
    return len(before.splitlines()) - len(kept)


def is_after(number: Any, round: int) -> bool:
    """Whether the round of a line is a number beyond `round`."""
    return isinstance(number, int) and number > round


def _object(text: bytes, where: str) -> dict[str, Any] | None:
    try:
        if len(text) > LARGEST:
            raise ValueError(f"it is longer than {LARGEST / 2**30:g} GiB")
        row = parse_json(text)
    except json.JSONDecodeError:
        return None
    except ValueError as error:
        raise RunDirectoryError(f"a line cannot be read: {error}", where=where) from None
    return row if isinstance(row, dict) else None
