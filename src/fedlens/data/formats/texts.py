"""Reads small text files."""

from __future__ import annotations

from pathlib import Path

from fedlens.core.errors import DataError


def read_bytes(path: Path) -> bytes:
    """The contents of a file. Raises `DataError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        what, hint = f"the file cannot be read: {error.strerror}", "check its path and its permissions"
        raise DataError(what, where=str(path), hint=hint) from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark. Raises `DataError` if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8: byte {error.start + 1} cannot be read"
        raise DataError(what, where=str(path), hint="save it in UTF-8") from None
