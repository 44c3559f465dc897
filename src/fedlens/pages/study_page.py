"""study.html: a study as one page that opens offline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.base.errors import DataError
from fedlens.base.format import MISSING, count, duration, many, setting
from fedlens.pages.render import write_page
from fedlens.results.cells import METHOD, why_lost
from fedlens.results.data_json import read_populations
from fedlens.results.figures.chart import Chart
from fedlens.results.figures.named_cells import NamedCells
from fedlens.results.figures.study_figures import NamedFigure, study_figures
from fedlens.results.rows import DATA_FIGURES, Results, Row, needs_runs
from fedlens.results.tables import study_tables
from fedlens.results.words import tuning_words

PAGE, FOLDER = "study.html", "figures"


@dataclass(frozen=True)
class ShownFigure:
    """A figure on the page, with the names of its files for papers."""

    chart: Chart
    files: Sequence[str] = ()
    of_data: bool = False  # shows the data of each client

    @property
    def sentences(self) -> list[str]:
        """The caption, what is missing, and the notes; without a figure, why."""
        return [*filter(None, [self.chart.caption, *self.chart.gaps, *self.chart.notes])]


def write_study_page(folder: Path) -> Path:
    """Writes study.html into the folder of a study from its study.json and results.jsonl; returns its path.

    A study that is not finished has a page of the runs that are done; the page says which ones are missing.

    Raises `DataError` if the folder has no study, and `ConfigError` if a table or figure that it asks for is wrong.
    """
    results = Results.read(folder)
    info = results.info
    lines = [results.lines.get(entry.digest) for entry in info.entries]
    versions = sorted({line.version for line in lines if line is not None and line.version})
    context = {
        "title": f"{info.title or info.name} · fedlens",
        "aside": str(folder),
        "heading": info.title or info.name,
        "what": _what(results),
        "planned": len(info.entries),
        "waiting": sum(line is None for line in lines),
        "lost": _lost_rows(results),
        "warned": [line.run for line in lines if line is not None and line.facts.get("warnings")],
        "kpis": _kpis(results),
        "smaller": info.smaller,
        "scale": info.scale,
        "caveats": info.caveats,
        "tables": study_tables(results),
        "figures": [_shown(named, folder) for named in study_figures(results)],
        "paper": info.paper if info.paper.get("link", "").startswith("https://") else {},
        "method": _method(results),
        "command": info.command,
        "version": ", ".join(versions),
        "client_names": _client_names(results),
    }
    return write_page(folder / PAGE, "study.html.j2", context)


def _shown(named: NamedFigure, folder: Path) -> ShownFigure:
    if named.figure is None:
        return ShownFigure(Chart(named.name, "", [], [named.missing]))
    files = sorted(path.name for path in (folder / FOLDER).glob(f"{named.name}.*"))
    return ShownFigure(named.figure, files, named.kind in DATA_FIGURES)


def _client_names(results: Results) -> list[str]:
    """The clients of all populations that the figures may show."""
    try:
        populations = read_populations(results.data.get("populations", ()))
    except DataError:  # the figures of data say so
        return []
    return list(dict.fromkeys(name for each in populations for name in each.ids))


def _what(results: Results) -> str:
    info = results.info
    parts = [many(len(info.methods), "method")]
    if len(info.cases) > 1:
        parts.append(many(len(info.cases), "case"))
    parts.append(many(len(info.seeds), "seed"))
    scale = f"at the scale {info.scale}" if info.scale else ""
    return " ".join(filter(None, [f"{info.name}:", ", ".join(parts), scale]))


def _done(results: Results) -> list[Row]:
    """The lines of the study, each once: two cells can share a run."""
    digests = dict.fromkeys(entry.digest for entry in results.info.entries)
    return [results.lines[digest] for digest in digests if digest in results.lines]


def _kpis(results: Results) -> list[tuple[str, str, str]]:
    done = _done(results)
    if not needs_runs(results.info.figures, results.info.tables):
        return [("Runs", "none", "data and models are shown, which needs no training")]
    planned = len({entry.digest for entry in results.info.entries})
    tuned = len({entry.digest for entry in results.info.entries if entry.role == "tune"})
    seconds = [value for line in done if (value := line.facts.get("cpu_seconds")) is not None]
    images = sum(int(values[-1] or 0) for line in done if (values := line.curve.get("examples")))
    seeds = ", ".join(map(str, results.info.seeds[:8])) + (", ..." if len(results.info.seeds) > 8 else "")
    return [
        ("Runs", f"{len(done):,} of {planned:,}", f"{tuned:,} of them tuning" if tuned else "done"),
        ("Seeds", count(len(results.info.seeds)), seeds),
        ("CPU time", duration(sum(seconds)) if seconds else MISSING, "of the runs that are done"),
        ("Training images", count(images) if images else MISSING, "over all rounds and clients"),
        *_pretraining_kpi(results),
    ]


def _pretraining_kpi(results: Results) -> list[tuple[str, str, str]]:
    """The CPU time of the pre-trainings, which the other numbers leave out."""
    if not results.info.pretrained:
        return []
    found = [
        results.lines[entry.digest] for entry in results.info.pretrained if entry.digest in results.lines
    ]
    seconds = [value for line in found if (value := line.facts.get("cpu_seconds")) is not None]
    what = f"of {many(len(found), 'pre-training')}, once for all runs"
    return [("Pre-training", duration(sum(seconds)) if seconds else MISSING, what)]


def _lost_rows(results: Results) -> list[list[Any]]:
    """The runs that failed or diverged, with their place in the study and the reason."""
    runs, rows = NamedCells.of(results), []
    for row in results.rows:
        if why := why_lost(row):
            case = runs.title(row.case, row.case) or MISSING
            if row.point:
                case += "; " + ", ".join(f"{key} {setting(value)}" for key, value in row.point.items())
            rows.append([row.run, runs.words(METHOD, row.method), case, str(row.seed), row.rounds, why])
    return rows


def _method(results: Results) -> list[str]:
    """Sentences on how the runs are comparable."""
    info = results.info
    if not needs_runs(info.figures, info.tables):
        return [f"Nothing is trained. Clients are those of seed {info.seeds[0]}.", *info.notes]
    sentences = [
        f"A seed gives every method the same clients, initial weights and sampled clients. Seeds: "
        f"{', '.join(map(str, info.seeds))}.",
        f"The value of a run is {NamedCells.of(results).metric}"
        + (
            f", the mean of its last {info.last} evaluations."
            if info.last > 1
            else " of its last evaluation."
        ),
    ]
    if info.baseline in info.methods and len(info.methods) > 1:
        sentences.append(f"The baseline is {info.methods[info.baseline]}.")
    sentences += tuning_words(info)
    if source := info.document.get("source"):
        sentences.append(f"The paper's own numbers are those of {source}.")
    devices = Counter(line.device for line in _done(results))
    if devices["cpu"] and devices["cuda"]:
        sentences.append(
            f"{many(devices['cuda'], 'run')} trained on a GPU and {devices['cpu']:,} on the processor, where the same "
            "settings give other last bits."
        )
    return [*sentences, *info.notes]


__all__ = ["write_study_page"]
