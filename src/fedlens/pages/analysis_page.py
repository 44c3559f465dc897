"""analysis.html: the analyses of a run as one page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import setting
from fedlens.base.shell_command import quoted_command, shell_command
from fedlens.files import jsonl
from fedlens.files.text_files import read_json
from fedlens.pages.render import write_page
from fedlens.pages.study_page import ShownFigure
from fedlens.results.figures.analysis_figures import analysis_figures, shown
from fedlens.results.run import Run

PAGE, INDEX = "analysis.html", "analysis.json"
_ROWS = 200  # of a table


@dataclass(frozen=True)
class Section:
    """One analysis on the page."""

    title: str
    reading: Sequence[str]
    figures: Sequence[ShownFigure]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: int
    file: str
    settings: str


def write_analysis_page(folder: Path, run: Run) -> Path:
    """Writes analysis.html from the rows in the folder, and returns its path.

    Raises `RunDirectoryError` if the folder has no analysis.
    """
    index = read_json(folder / INDEX)
    if index is None:
        hint = f"run {quoted_command('analyze', run.path)}"
        raise RunDirectoryError("the folder has no analyses", where=str(folder), hint=hint)
    context = {
        "title": f"{run.name} · analyses · fedlens",
        "aside": str(run.path),
        "heading": f"Analyses of {run.name}",
        "what": ", ".join(index),
        "sections": [_section(name, entry, folder) for name, entry in index.items()],
        "client_names": run.partition.ids if run.partition else (),
        "commands": list(dict.fromkeys(_command(run, name, entry) for name, entry in index.items())),
        "version": ", ".join(sorted({str(entry.get("fedlens")) for entry in index.values()})),
    }
    return write_page(folder / PAGE, "analysis.html.j2", context)


def _command(run: Run, name: str, entry: Mapping[str, Any]) -> str:
    """The command that makes an analysis again; earlier versions did not write it down."""
    return str(entry.get("command") or shell_command("analyze", run.path, name))


def _section(name: str, entry: Mapping[str, Any], folder: Path) -> Section:
    rows = jsonl.read(folder / str(entry["rows"]))
    described = shown(name)
    figures = []
    for number, figure in enumerate(analysis_figures(name, rows)):
        drawn = entry["figures"][number] if number < len(entry["figures"]) else []
        files = (
            [drawn] if isinstance(drawn, str) else list(map(str, drawn))
        )  # earlier versions wrote one file
        figures.append(ShownFigure(figure, files))
    flat = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows]
    head = list(dict.fromkeys(key for row in flat for key in row))
    settings = [f"{key} = {setting(value)}" for key, value in entry["settings"].items()]
    return Section(
        described.title if described else name.rpartition(":")[2],
        list(described.reading) if described else [],
        figures,
        head,
        [[_text(row.get(key)) for key in head] for row in flat[:_ROWS]],
        max(0, len(flat) - _ROWS),
        str(entry["rows"]),
        "; ".join([f"on the {entry['on']} data", *settings]),
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
