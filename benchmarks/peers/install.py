"""Makes a virtual environment and installs requirements into it, once: prints the path of its Python.

    python install.py ~/.cache/fedlens/peers/pfl-0.6.0 torch==2.15.0 pfl==0.6.0

What was installed stands in a file that is written last: an environment without it, or with another one, is made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="A virtual environment with these requirements in it.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("requirements", nargs="+")
    asked = parser.parse_args()
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
