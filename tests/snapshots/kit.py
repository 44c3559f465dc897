"""What all snapshots share: their files, rounded numbers, and data as text that is read and compared line by line."""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

EXPECTED = Path(__file__).with_name("expected")
ARCHIVES = Path(__file__).with_name("folders")  # of the runs that `folders.py` made
DIGITS = 5  # significant ones: the last bits of a sum differ between processors
_WIDE = 110  # characters of a line

Snapshots: TypeAlias = dict[str, Callable[[], str]]
"""Functions that make the text of a snapshot, by the name of its file below `expected`."""


def rounded(value: Any) -> Any:
    """A value as JSON has it, with `DIGITS` significant digits of each number.

    >>> rounded({"a": (np.float64(0.123456789), math.nan), 3: True})
    {'a': [0.12346, 'nan'], '3': True}
    """
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return rounded(value.tolist())
    if isinstance(value, list | tuple | range | set | frozenset):
        return [rounded(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value if value is None or isinstance(value, str | int) else repr(value)


def as_text(value: Any) -> str:
    """Rounded data as JSON: lists of numbers and short tables on one line, everything else an entry a line."""
    return _lines(rounded(value), "") + "\n"


def _lines(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if not value or not isinstance(value, dict | list) or plain or len(indent) + len(line) <= _WIDE:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        entries = [
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {_lines(item, inner)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{_lines(item, inner)}" for item in value) + f"\n{indent}]"


def unpack(name: str, root: Path) -> Path:
    """The folder of an archive, below `root`."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as tar:
        tar.extractall(root, filter="data")
    return root / name
