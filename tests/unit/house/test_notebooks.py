"""The notebooks of the docs run from top to bottom, and were run so when they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import NOTEBOOKS, executed

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: Any) -> list[list[str]]:
    return [sorted(output.get("data", [output["output_type"]])) for output in cell["outputs"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_the_page_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for place in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "jupyter"))
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [cell["execution_count"] for cell in code(written)] == list(range(1, len(code(written)) + 1))
    ran = executed(path, tmp_path, rounds=2)
    assert [kinds(cell) for cell in code(ran)] == [kinds(cell) for cell in code(written)]
    fedavg, mine, fedprox = json.loads(code(ran)[-1]["outputs"][0]["data"]["text/plain"])
    assert mine == fedprox != fedavg
