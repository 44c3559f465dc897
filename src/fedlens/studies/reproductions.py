"""The files of the studies that reproduce figures and tables of the documents, by name."""

from __future__ import annotations

import shlex
import tomllib
from functools import cache
from pathlib import Path

from fedlens.core.errors import ConfigError, nearest

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "studies"
_DOCUMENT = ".document.toml"
_LEFT_OUT = "left_out.toml"
_OTHERS = {"record.toml", "speeds.toml", _LEFT_OUT}  # of the folder that are no studies


@cache
def left_out() -> dict[str, str]:
    """The figures and tables of documents that have no study, with the reason.

    >>> "chen2022/table7" in left_out()
    True
    """
    return tomllib.loads((FOLDER / _LEFT_OUT).read_text(encoding="utf-8"))


def reproductions() -> dict[str, Path]:
    """The file of every study by its name.

    >>> "hsu2019/fig5" in reproductions()
    True
    """
    paths = [path for path in sorted(FOLDER.rglob("*.toml")) if not path.name.endswith(_DOCUMENT)]
    return {_name(path): path for path in paths if path.name not in _OTHERS}


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def reproduction(name: str) -> Path:
    """The file of a study. Raises `ConfigError` with the nearest name if no study has this one, or with
    the reason if it is left out.

    >>> reproduction("hsu2019/fig9")
    Traceback (most recent call last):
    fedlens.core.errors.ConfigError: unknown study 'hsu2019/fig9'; did you mean 'hsu2019/fig6'.
    """
    paths = reproductions()
    if name in paths:
        return paths[name]
    if name in left_out():
        raise ConfigError(
            f"'{name}' has no study: {left_out()[name]}", hint="'fedlens reproduce --list' lists all"
        )
    parts = [other for other in paths if name and other.startswith(name)]
    hint = f"choose one of {', '.join(parts)}" if parts else nearest(name, paths)
    raise ConfigError(f"unknown study '{name}'", hint=hint)


def folder_of(name: str, scale: str) -> Path:
    """Returns the default folder of the results of a study.

    >>> folder_of("hsu2019/fig5", "laptop").as_posix()
    'studies/hsu2019/fig5/laptop'
    """
    return Path("studies", *name.split("/"), scale)


def study_command(path: Path | None, scale: str) -> str:
    """The command that makes the results of a study.

    Args:
        path: the study file; None for a study in Python.
        scale: "" for a study without scales.

    >>> study_command(reproduction("hsu2019/fig5"), "laptop"), study_command(Path("my study.toml"), "")
    ('fedlens reproduce hsu2019/fig5 --scale laptop', "fedlens sweep 'my study.toml'")
    """
    if path is not None and path.resolve().is_relative_to(FOLDER):
        return f"fedlens reproduce {_name(path.resolve())} --scale {scale}"
    shown = "STUDY" if path is None else shlex.quote(str(path))
    return f"fedlens sweep {shown}" + (f" --scale {scale}" if scale not in ("", "paper") else "")
