"""The user's cache folder: files that fedlens makes again if they are deleted."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder `name` of fedlens in the user's cache, by the XDG convention; it need not exist.

    >>> user_cache("fractals").parts[-2:]
    ('fedlens', 'fractals')
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedlens" / name
