"""Makes a virtual environment and installs requirements into it, once: prints the path of its Python.

    python install.py ~/.cache/fedlens/peers/pfl-0.6.0 torch==2.15.0 pfl==0.6.0

With `--pythons=3.14t,3.12`, the environment is made by the first of these versions of Python that is found. What was
installed is recorded in a file that is written last: an environment without it, or with another one, is made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_CONDA = ("miniconda3", "miniforge3", "anaconda3")


def find_interpreter(versions: Sequence[str]) -> Path | None:
    """The first interpreter that runs and can create environments, of the first version that has one; else None.

    It is looked for on the PATH and in the directories of pyenv, uv and conda.

    Args:
        versions: such as `("3.14t", "3.12")`, in order of preference; `t` is a free-threaded build.
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
        return subprocess.call(command, stderr=subprocess.DEVNULL, timeout=60) == 0
    return False


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="A virtual environment with these requirements in it.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument(
        "--pythons", help="versions in order of preference, with commas between; default: this one"
    )
    asked = parser.parse_args()
    if asked.pythons:
        found = find_interpreter(asked.pythons.split(","))
        if found is None:
            sys.exit(
                f"ERROR: none of these versions of Python was found: {asked.pythons.replace(',', ', ')} (looked for on "
                "the PATH and in the directories of pyenv, uv and conda)"
            )
        return subprocess.call([str(found), __file__, str(asked.directory), *asked.requirements])
    home = asked.directory.expanduser().absolute()
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp, wanted = home / "installed.json", json.dumps([sys.version, *asked.requirements])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(home, clear=True, with_pip=True, symlinks=os.name != "nt")
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "--progress-bar", "off", *asked.requirements],
            stdout=subprocess.DEVNULL,
        )
        if done.returncode:
            return done.returncode
        stamp.write_text(wanted, encoding="utf-8")
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
