"""Runs the notebooks of the docs in a Jupyter kernel.

`python -m tools.notebooks` writes their outputs anew; test_notebooks.py runs a short version.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path, rounds: int | None = None) -> Any:
    """The notebook with the outputs of this run, in `folder`; with `rounds` in place of its own number.

    Raises `CellExecutionError` if a cell does.
    """
    notebook = nbformat.read(path, as_version=4)
    if rounds is not None:
        for cell in notebook.cells:
            cell.source = re.sub(r'"rounds": \d+', f'"rounds": {rounds}', cell.source)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", timeout=300, resources=place).execute()
    return notebook


def write() -> None:
    """Writes the outputs anew, without the times of the cells."""
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        for cell in notebook.cells:
            cell.metadata = {}
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    write()
