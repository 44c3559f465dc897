"""Where the data are."""

from __future__ import annotations

import os
from pathlib import Path


def data_directory(given: Path | None) -> Path:
    """`--data-dir`, else FEDLENS_DATA, else ~/.cache/fedlens.

    >>> data_directory(Path("here")).as_posix()
    'here'
    """
    if given is not None:
        return given.expanduser()
    return Path(os.environ.get("FEDLENS_DATA") or "~/.cache/fedlens").expanduser()
