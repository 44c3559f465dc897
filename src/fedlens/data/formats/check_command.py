"""The command that checks a user's own data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.shell_command import setting, shell_command

_NOT_CHECKED = ("path", "on_error")  # `on_error` is for runs: a check lists every problem


def check_command(format: str, settings: Mapping[str, Any], write: Path | None = None) -> str:
    """The `fedlens data check` of data in a format, with those settings of its reader that are not the default.

    `write` is the file of an experiment to write.

    >>> check_command("image-folder", {"path": "my images", "path_column": "file", "classes": ["a", "b"]})
    'fedlens data check \\'my images\\' --format image-folder --set path_column=file --set \\'classes=["a", "b"]\\''
    """
    changes = [setting(key, value) for key, value in settings.items() if key not in _NOT_CHECKED]
    words = ("data", "check", str(settings["path"]), "--format", format)
    return shell_command(*words, changes=changes, write=write)
