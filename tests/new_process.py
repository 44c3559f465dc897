"""Forgets a user's own modules, as a new process would not know them."""

from __future__ import annotations

import sys

from fedlens.base.registry import USER_MODULE_PREFIX
from fedlens.settings import own_files


def new_process(*modules: str) -> None:
    """Forgets what this process has read of the user's files, and these modules that they import."""
    own_files._named_by.cache_clear()
    own_files._sha256.cache_clear()
    for name in [name for name in sys.modules if name.startswith(USER_MODULE_PREFIX) or name in modules]:
        del sys.modules[name]
