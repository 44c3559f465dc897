"""Reads small text files. Pipes, sockets and devices are refused, because reading them may never end."""

from __future__ import annotations

from pathlib import Path

from fedlens.base.errors import DataError
from fedlens.data.formats.file_safety import refuse_link_out, special_file


def read_bytes(path: Path, folder: Path | None = None) -> bytes:
    """The contents of a file.

    Raises `DataError` if it cannot be read, is a pipe, a socket or a device, or is a link from within `folder` to a
    file outside.
    """
    try:
        refuse_unsafe(path, folder)
        return path.read_bytes()
    except OSError as error:
        what, hint = f"the file cannot be read: {error.strerror}", "check its path and its permissions"
        raise DataError(what, where=str(path), hint=hint) from error


def refuse_unsafe(path: Path, folder: Path | None = None) -> None:
    """Raises `DataError` for a pipe, a socket, a device, and a link from within `folder` to a file outside.

    Raises `OSError` if the file cannot be found.
    """
    if folder is not None:
        refuse_link_out(path, folder)
    kind = special_file(path.stat().st_mode)
    if kind is not None:
        raise DataError(f"it is {kind}, not a file with data", where=str(path), hint="remove it")


def read_text(path: Path, folder: Path | None = None) -> str:
    """The text of a UTF-8 file, without a byte-order mark. Raises `DataError` as `read_bytes` does."""
    try:
        return read_bytes(path, folder).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8: byte {error.start + 1} cannot be read"
        raise DataError(what, where=str(path), hint="save it in UTF-8") from None
