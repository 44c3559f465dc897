"""Finds installed Python interpreters of other versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_CONDA = ("miniconda3", "miniforge3", "anaconda3")


def find_interpreter(versions: Sequence[str]) -> Path | None:
    """The first interpreter that runs and can create environments, of the first version that has one; else None.

    It is looked for on the PATH and in the directories of pyenv, uv and conda.

    Args:
        versions: such as `("3.14t", "3.12")`, in order of preference; `t` is a free-threaded build.

    >>> find_interpreter(["2.0"]) is None
    True
    """
    return next((python for version in versions for python in _candidates(version) if _creates(python)), None)


def _candidates(version: str) -> Iterator[Path]:
    name, user = f"python{version}", Path.home()
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield Path(sys.executable)
    if on_path := shutil.which(name):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or user / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or user / ".local" / "share" / "uv" / "python")
    for home in (pyenv, uv, *(user / conda / "envs" for conda in _CONDA)):
        yield from sorted(home.glob(f"*/bin/{name}"))


def _creates(python: Path) -> bool:
    """Whether it runs, which a launcher of pyenv may refuse, and has the modules that create an environment."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [str(python), "-c", "import ensurepip, venv"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    return False
