"""The files of the studies that reproduce figures and tables of the documents, by name."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fedlens.core.errors import ConfigError, nearest
from fedlens.core.shell_command import quoted_command, shell_command

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "studies"
COPY = "study.toml"
"""The copy of a study file in the folder of its results."""
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
            f"'{name}' has no study: {left_out()[name]}",
            hint=f"{quoted_command('reproduce', list=True)} lists all",
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


def study_command(
    path: Path | None,
    scale: str,
    folder: Path | None = None,
    usual: Path | None = None,
    *,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    data_dir: Path | str | None = None,
) -> str:
    """The command that makes the results of a study again, with everything that was given.

    Args:
        path: the study file; None for a study in Python, of which `folder` has a copy.
        scale: "" for a study without scales.
        folder: of the results; None for the one without `--out`.
        usual: the folder of `fedlens sweep` without `--out`.
        changes, seeds: what replaced settings and seeds of the file.

    >>> study_command(reproduction("hsu2019/fig5"), "laptop", Path("here"), Path("studies/fig5/laptop"))
    'fedlens reproduce hsu2019/fig5 --scale laptop --out here'
    >>> usual = Path("studies/my study")
    >>> study_command(Path("my study.toml"), "", usual, usual, changes=["rounds=2"], seeds=[3, 4])
    "fedlens sweep 'my study.toml' --set rounds=2 --seeds 3,4"
    """
    if path is not None and path.resolve().is_relative_to(FOLDER) and not changes and seeds is None:
        name, scale = _name(path.resolve()), scale or "paper"
        out = folder if folder != folder_of(name, scale) else None
        return shell_command("reproduce", name, scale=scale, out=out, data_dir=data_dir)
    if path is None:
        path = Path("STUDY_FILE") if folder is None else folder / COPY
    return shell_command(
        "sweep",
        path,
        changes=changes,
        scale=scale if scale not in ("", "paper") else None,
        seeds=seeds,
        out=folder if folder != usual else None,
        data_dir=data_dir,
    )
