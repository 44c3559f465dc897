"""The user's Python files that a run's settings name: they are part of the identity of the run."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError, RunFailed

OWN_FILES = "own_files"  # in environment.json and in a checkpoint: the result of `own_files`
_TARGET = re.compile(r"(?P<source>.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
_OURS = Path(__file__).resolve().parents[1]


def own_files(values: Any) -> dict[str, str]:
    """Returns the SHA-256 of the user's files that settings name, and of modules beside them that they import.

    A name is `FILE.py:NAME` or `package.module:NAME`. Files of fedlens and of installed packages are left out. A file
    is read once a process, as its module is (`fedlens.base.registry.load_file`).

    >>> own_files({"algorithm": {"name": "fedavg"}, "data": {"dataset": {"name": "digits"}}})
    {}
    """
    files: dict[str, str] = {}
    for source in _sources(values):
        files |= _named_by(source, str(Path.cwd()))
    return files


def edited_files(before: Any, values: Any) -> dict[str, tuple[str | None, str]]:
    """The files that settings name and that differ from those `before`, each with both SHA-256.

    `before` is the result of `own_files`; of a run of an older version it is None, and nothing is compared. Files are
    read from the disk. One that is not among those before has None. A file of the same name and content may have moved
    to another folder.

    >>> edited_files({}, {"algorithm": {"name": "fedavg"}})
    {}
    """
    if not isinstance(before, Mapping):
        return {}
    # Anybody may write it.
    before = {name: sha256 for name, sha256 in before.items() if isinstance(sha256, str)}
    moved = {(Path(name).name, sha256) for name, sha256 in before.items()}
    edited: dict[str, tuple[str | None, str]] = {}
    for source in _sources(values):
        for name, sha256 in _files_behind(source, _read_sha256).items():
            same_path = name in before
            if before[name] != sha256 if same_path else (Path(name).name, sha256) not in moved:
                same = [old for old in before if Path(old).name == Path(name).name]
                edited[name] = before.get(name, before[same[0]] if len(same) == 1 else None), sha256
    return edited


def refuse_edited_since(
    when: str, before: Any, values: Any, accept: bool, command: str | None = None
) -> list[str]:
    """Compares the user's files that settings name with those of a run, before they are executed.

    Args:
        when: the time of `before`, such as "round 4".
        before, values: those of `edited_files`.
        accept: use the files as they are now.
        command: the one that accepts them, in quotation marks; by default the user's own with `--accept-changes`.

    Returns a note on the files that were edited and are accepted, and one if nothing is known of them.
    Raises `RunDirectoryError` for files that were edited, unless they are accepted, and `RunFailed` if they are and
    this process has executed their earlier content.
    """
    if not isinstance(before, Mapping):
        named = [source for source in _sources(values) if _files_behind(source, _read_sha256)]
        note = f"an older version of fedlens saved no digest of {', '.join(named)}: edits are not noticed"
        return [note] if named else []
    edited = edited_files(before, values)
    what = f"{', '.join(edited)} {'was' if len(edited) == 1 else 'were'} edited since {when}"
    if edited and not accept:
        how = "with --accept-changes" if command is None else f"with {command}"
        hint = f"undo the edit, or use the file as it is now {how} (in Python: accept_changes=True)"
        raise RunDirectoryError(what, hint=hint)
    for name, (_, now) in edited.items():
        if _sha256(Path(name).resolve()) != now:
            hint = "start a new Python process"
            raise RunFailed(f"{name} was edited after this process had read it", hint=hint)
    return [f"accepted: {what}"] if edited else []


def refuse_edited(files: Mapping[str, str]) -> None:
    """Raises `RunFailed` if this process read another content of a file than the plan."""
    for name, sha256 in files.items():
        read = _sha256(Path(name).expanduser().resolve())
        if read not in (None, sha256):
            raise RunFailed(
                f"{name} was edited after the study started",
                hint="undo the edit, or run the study again, in a new Python process",
            )


def _sources(values: Any) -> list[str]:
    """The first parts of all names in settings, but of observers, which change no result: files and modules."""
    if isinstance(values, Mapping):
        values = {key: value for key, value in values.items() if key != "observe"}
    matches = map(_TARGET.fullmatch, _texts(values))
    return [match["source"] for match in matches if match is not None]


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping | list | tuple):
        for item in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(item)


@cache
def _named_by(source: str, folder: str) -> dict[str, str]:
    """The files behind the first part of a name, in the current folder `folder`, as this process read them first."""
    return _files_behind(source, _sha256)


def _files_behind(source: str, digest: Callable[[Path], str | None]) -> dict[str, str]:
    """The file of a source, those of the packages that it is in, and those that they import, with their digests."""
    waiting = [Path(source).expanduser()] if source.endswith(".py") else _module_files(source)
    if not waiting or not waiting[-1].is_file():
        return {}
    start = waiting[-1].parent if source.endswith(".py") else _top(waiting[-1], source)
    files: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        sha256 = digest(path.resolve())
        if str(path) not in files and sha256 is not None and not _is_installed(path.resolve()):
            files[str(path)] = sha256
            waiting += _imported(path, start)
    return dict(sorted(files.items()))


def _module_files(name: str) -> list[Path]:
    """The files that importing a module executes: those of its packages, and its own. None of them is executed.

    `importlib.util.find_spec` would import the packages.
    """
    files: list[Path] = []
    searched: Sequence[str] | None = None
    parts = name.split(".")
    for k in range(len(parts)):
        spec = _spec_of(".".join(parts[: k + 1]), searched)
        if spec is None or (spec.submodule_search_locations is None and k + 1 < len(parts)):
            # `fedlens.base.registry.load_target` searches the current folder, too.
            return list(_files_of(Path.cwd(), parts))
        if spec.origin is not None and spec.has_location:
            files.append(Path(spec.origin))
        searched = spec.submodule_search_locations
    return files


def _spec_of(name: str, searched: Sequence[str] | None) -> ModuleSpec | None:
    """What Python would import under this name, from `searched` or else from `sys.path`."""
    # The last: a namespace package in another.
    with suppress(ImportError, ValueError, AttributeError, KeyError):
        for finder in sys.meta_path:
            if (spec := finder.find_spec(name, searched)) is not None:
                return spec
    return None


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
    return _read_sha256(path)


def _read_sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
