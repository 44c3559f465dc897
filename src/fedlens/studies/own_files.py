"""The user's Python files that a run's settings name: they are part of the identity of the run."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedlens.core.errors import RunFailed

_TARGET = re.compile(r"(?P<source>.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
_OURS = Path(__file__).resolve().parents[1]


def own_files(values: Any) -> dict[str, str]:
    """Returns the SHA-256 of the user's files that settings name, and of modules beside them that they import.

    A name is `FILE.py:NAME` or `package.module:NAME`. Files of fedlens and of installed packages are left out. A file
    is read once a process, as its module is (`fedlens.core.registry.load_file`).

    >>> own_files({"algorithm": {"name": "fedavg"}, "data": {"dataset": {"name": "digits"}}})
    {}
    """
    files: dict[str, str] = {}
    for text in _texts(values):
        match = _TARGET.fullmatch(text)
        if match is not None:
            files |= _named_by(match["source"], str(Path.cwd()))
    return files


def refuse_edited(files: Mapping[str, str]) -> None:
    """Raises `RunFailed` if this process read another content of a file than the plan."""
    for name, sha256 in files.items():
        read = _sha256(Path(name).expanduser().resolve())
        if read not in (None, sha256):
            raise RunFailed(
                f"{name} was edited after the study started",
                hint="undo the edit, or run the study again, in a new Python process",
            )


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping | list | tuple):
        for item in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(item)


@cache
def _named_by(source: str, folder: str) -> dict[str, str]:
    """The files behind the first part of a name, in the current folder `folder`."""
    path = Path(source).expanduser() if source.endswith(".py") else _module_path(source)
    if path is None or not path.is_file():
        return {}
    start = path.parent if source.endswith(".py") else _top(path, source)
    files: dict[str, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        sha256 = _sha256(path.resolve())
        if str(path) not in files and sha256 is not None and not _is_installed(path.resolve()):
            files[str(path)] = sha256
            waiting += _imported(path, start)
    return dict(sorted(files.items()))


def _module_path(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # no such module, or one without a specification
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.has_location else None


def _top(path: Path, module: str) -> Path:
    """The folder that a module is imported from."""
    return path.parents[module.count(".") + (path.name == "__init__.py")]


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in (*_INSTALLED, _OURS))


def _imported(path: Path, start: Path) -> list[Path]:
    """The files below `start` that the import statements of a file name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    files: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(start, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else start
            module = node.module.split(".") if node.module else []
            names = [(folder, [*module, alias.name]) for alias in node.names]
        else:
            continue
        for folder, parts in names:
            if folder != start or parts[0] not in sys.stdlib_module_names:
                files += _files_of(folder, parts)
    return files


def _files_of(folder: Path, parts: list[str]) -> Iterator[Path]:
    """The files that importing a dotted name below `folder` reads."""
    for part in parts:
        if (file := folder / f"{part}.py").is_file():
            yield file
            return
        folder = folder / part
        if (file := folder / "__init__.py").is_file():
            yield file


@cache
def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
