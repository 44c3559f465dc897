"""Commands of fedlens that a message or a page shows: quoted for a shell, with everything that was given."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

Option = bool | int | str | Path | Sequence[int] | None


def shell_command(*words: str | Path, changes: Iterable[str] = (), **options: Option) -> str:
    """The command `fedlens WORDS` with options, as a shell takes it.

    Every command that fedlens shows is made here.

    Args:
        words: the command and its arguments.
        changes: settings as `key=value`, each an option `--set`; see `setting`.
        options: by name, `data_dir` for `--data-dir`. None and False are left out, True is a flag, and a list of
            numbers is joined by commas.

    >>> print(shell_command("sweep", Path("my study.toml"), changes=["rounds=2"], seeds=[0, 1], out=None))
    fedlens sweep 'my study.toml' --set rounds=2 --seeds 0,1
    >>> print(shell_command("resume", Path("-run"), accept_changes=True))
    fedlens resume ./-run --accept-changes
    """
    shown = ["fedlens", *(_argument(word) for word in words)]
    for change in changes:
        shown += ["--set", change]
    for name, value in options.items():
        if value is None or value is False:
            continue
        shown.append(f"--{name.replace('_', '-')}")
        if value is not True:
            shown.append(str(value) if isinstance(value, int | str | Path) else ",".join(map(str, value)))
    return shlex.join(shown)


def quoted_command(*words: str | Path, changes: Iterable[str] = (), **options: Option) -> str:
    """The command of `shell_command` between quotation marks, for the middle of a sentence.

    >>> print(quoted_command("resume", "runs/a"), quoted_command("resume", "my runs/a"))
    'fedlens resume runs/a' `fedlens resume 'my runs/a'`
    """
    command = shell_command(*words, changes=changes, **options)
    return f"`{command}`" if "'" in command else f"'{command}'"


def _argument(word: str | Path) -> str:
    """An argument; a path that begins like an option gets the current folder in front."""
    return f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)


def setting(key: str, value: Any) -> str:
    """A setting as `--set` takes it: a word stays plain if it would be read as itself, other values are TOML.

    >>> setting("local.lr", 0.1), setting("model", "linear"), setting("name", "7"), setting("classes", ["a", "b"])
    ('local.lr=0.1', 'model=linear', 'name="7"', 'classes=["a", "b"]')
    >>> setting("data.partition", {"name": "iid", "clients": 4})
    'data.partition={name = "iid", clients = 4}'
    """
    text = str(value) if isinstance(value, Path) else value
    return f"{key}={text if isinstance(text, str) and _is_plain(text) else inline_toml(text)}"


def _is_plain(text: str) -> bool:
    """Whether `--set key=TEXT` gives back the text itself, because it is no value of TOML."""
    if not text or text != text.strip() or len(text.splitlines()) > 1 or text.startswith(("{", "[")):
        return False
    try:
        tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return True
    except (ValueError, RecursionError):  # a number with too many digits
        return False
    return False


def inline_toml(value: Any) -> str:
    """A value on one line of TOML.

    >>> inline_toml({"name": "image-folder", "size": [8, 9], "labels": False, "a b": 0.5})
    '{name = "image-folder", size = [8, 9], labels = false, "a b" = 0.5}'
    """
    if isinstance(value, Mapping):
        pairs = (
            f"{key if _BARE_KEY.fullmatch(key) else inline_toml(key)} = {inline_toml(item)}"
            for key, item in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline_toml, value))}]"
    if isinstance(value, str | Path):
        # A string of JSON is one of TOML, as long as it keeps its letters.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
