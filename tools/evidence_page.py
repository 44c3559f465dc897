"""The pages in docs/evidence, their figures, and the curves of the algorithms' pages, from the results there.

    python -m tools.evidence_page                 # writes pages and figures anew
    python -m tools.evidence_page --take FOLDER   # first takes the results of studies from FOLDER

`fedlens sweep docs/evidence/NAME.toml` makes the results of a study. What is taken of them into docs/evidence/NAME is
study.json, and of results.jsonl the columns that a table or figure can show. What stands between two markers of a page
is written from them; the rest is written by hand. The build of the docs adds the page of each study, with all tables:

    <!-- table: NAME.TABLE -->      a table of the study
    <!-- figure: NAME.FIGURE -->    a figure of the study, with its caption
    <!-- cost: NAME -->             the command, the number of runs, the CPU time, and a link to the study's page
    <!-- end -->
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedlens.results.cells import cells
from fedlens.results.figures.chart import Chart
from fedlens.results.figures.picture import draw_chart
from fedlens.results.figures.study_figures import study_figure, study_figures
from fedlens.results.rows import (
    INFO,
    LINES,
    Results,
    Row,
    validation_metric,
    write_info,
    write_lines,
)
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import study_tables
from fedlens.results.words import seeds_text

ROOT = Path(__file__).parents[1]
HOME = ROOT / "docs" / "evidence"
PAGES = [HOME.with_suffix(".md"), *sorted(HOME.glob("*.md"))]
MARKER = re.compile(r"(<!-- (table|figure|cost): (\S+) -->\n)(?:.*\n)*?(<!-- end -->\n)")
KEPT = ("round", "examples", "batches", "bytes")  # of each curve, beside the metric and the losses


@dataclass(frozen=True)
class Curve:
    """The curve on the page of an algorithm: of some methods of a study, beside its baseline."""

    algorithm: str
    study: str
    methods: Sequence[str]
    over: str = "round"


CURVES = (
    Curve("fedavg", "algorithms", ["fedavg"]),
    Curve("fedavgm", "algorithms", ["fedavgm"]),
    Curve("fedprox", "algorithms", ["fedprox"]),
    Curve("feddyn", "algorithms", ["feddyn"]),
    Curve("scaffold", "algorithms", ["scaffold"]),
    Curve("fedadam", "algorithms", ["fedadam"]),
    Curve("fedir", "reweighting", ["fedir"]),
    Curve("fedvc", "virtual-clients", ["fedvc"], "batches"),
    Curve("liadmm", "liadmm", ["liadmm", "training", "training-kept"]),
    Curve("fednova", "unequal-work", ["fednova"]),
    Curve("fedadagrad", "others", ["fedadagrad"]),
    Curve("fedyogi", "others", ["fedyogi"]),
    Curve("moon", "others", ["fedavg-projection", "moon"]),
    Curve("mime", "others", ["mime"]),
    Curve("mimelite", "others", ["mimelite"]),
    Curve("feddane", "others", ["feddane"]),
    Curve("admm", "others", ["admm"]),
    Curve("iceadmm", "others", ["iceadmm"]),
    Curve("finetune", "personal", ["finetune"]),
    Curve("local-only", "personal", ["local-only"]),
    Curve("fedbn", "personal", ["fedavg-batch", "fedbn"]),
    Curve("dsgd", "beyond-averaging", ["dsgd"]),
    Curve("push-sum", "beyond-averaging", ["push-sum"]),
    Curve("splitfed", "beyond-averaging", ["splitfed"]),
    Curve("split-relay", "beyond-averaging", ["split-relay"]),
    Curve("fedma", "matching-and-parties", ["fedma", "fedma-common"]),
    Curve("vertical", "matching-and-parties", ["alone", "vertical"]),
)


def published_studies() -> list[str]:
    """The studies whose results are in docs/evidence."""
    return sorted(path.parent.name for path in HOME.glob(f"*/{INFO}"))


@cache
def results(name: str) -> Results:
    """The results of a study in docs/evidence."""
    return Results.read(HOME / name)


def take(folder: Path) -> list[str]:
    """Copies the results of the complete studies in `folder` that docs/evidence has a study file of; their names."""
    taken = []
    for source in sorted(folder.iterdir()):
        if not (HOME / f"{source.name}.toml").is_file() or not (source / INFO).is_file():
            continue
        study = Results.read(source)
        if _is_complete(study):
            target = HOME / source.name
            target.mkdir(exist_ok=True)
            write_info(target, study.info)
            planned = dict.fromkeys(entry.digest for entry in study.info.entries)
            lines = [study.lines[digest] for digest in planned if digest in study.lines]
            write_lines(target / LINES, [_shortened(line, study.metric) for line in lines])
            taken.append(source.name)
    return taken


def _is_complete(study: Results) -> bool:
    final = [entry.digest for entry in study.info.entries if entry.role == "final"]
    return bool(final) and all(
        digest in study.lines and study.lines[digest].status != "stopped" for digest in final
    )


def _shortened(line: Row, metric: str) -> Row:
    """A run without the columns of its curve, and the facts, that the page does not show."""
    names = {metric, line.main, "test_loss"}
    kept = {*KEPT, *names, *map(validation_metric, names)}
    curve = {column: values for column, values in line.curve.items() if column in kept}
    return replace(line, curve=curve, facts={key: v for key, v in line.facts.items() if v is not None})


def rendered(page: str) -> str:
    """The page with everything between its markers written anew. Raises `KeyError` at a marker of nothing."""
    return MARKER.sub(lambda match: f"{match[1]}\n{_content(match[2], match[3])}\n{match[4]}", page)


def _content(kind: str, name: str) -> str:
    study, _, part = name.partition(".")
    if study not in published_studies():
        raise KeyError(name)
    if kind == "cost":
        return cost(study) + "\n"
    if kind == "table":
        return _table({table.name: table for table in study_tables(results(study))}[part])
    title, caption = _figure(name).title, _figure(name).caption.removeprefix(f"{_figure(name).title}: ")
    return f"![{title}](figures/{study}-{part}.svg)\n\n{caption[0].upper()}{caption[1:]}\n"


def _figure(name: str) -> Chart:
    study, _, part = name.partition(".")
    named = {figure.name: figure for figure in study_figures(results(study))}[part]
    assert named.figure is not None, named.missing
    return named.figure


def _table(table: StudyTable) -> str:
    """The table, under its title unless it is the usual one; what its numbers are is on the study's page."""
    caption, _, rows = replace(table, notes=()).to_markdown().partition("\n\n")
    title = caption.partition(".** ")[0]
    head, marks, *lines = rows.split("\n")
    table = "\n".join([head, marks.replace(" ", ""), *lines])
    return table if title == "**Test accuracy of each method" else f"{title}.**\n\n{table}"


def cost(study: str) -> str:
    """What made the results of a study: its command, its runs, the processor time and the version of fedlens."""
    lines = results(study).lines.values()
    seconds = sum(line.facts.get("cpu_seconds") or 0 for line in lines)
    versions = ", ".join(sorted({line.version for line in lines if line.version}))
    time = f"{seconds / 3600:.1f} CPU hours" if seconds >= 5400 else f"{seconds / 60:.0f} CPU minutes"
    made = f"`{results(study).info.command}`: {len(lines):,} runs, {time}; fedlens {versions}."
    return f"{made} [All its tables]({study}/study.html)."


def figures() -> Iterator[str]:
    """The names of the figures that the pages show: `NAME.FIGURE`."""
    for page in PAGES:
        for match in MARKER.finditer(page.read_text(encoding="utf-8")):
            if match[2] == "figure":
                yield match[3]


def draw_all(folder: Path) -> None:
    """Draws the figures of the page and the curves of the algorithms below `folder`, and writes index.json there."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "curves").mkdir(parents=True, exist_ok=True)
    for name in figures():
        draw_chart(_figure(name), folder / "figures" / f"{name.replace('.', '-')}.svg")
    complete = published_studies()
    index: dict[str, Any] = {}
    for curve in CURVES:
        if curve.study in complete:
            study = results(curve.study)
            methods = list(dict.fromkeys([study.info.baseline, *curve.methods]))
            spec = {"kind": "curves", "x": curve.over, "methods": methods, "y": _ends(study, methods)}
            draw_chart(study_figure(study, spec), folder / "curves" / f"{curve.algorithm}.svg")
            index[curve.algorithm] = _entry(curve, study, methods)
    text = json.dumps({"curves": index}, indent=2) + "\n"
    (folder / "index.json").write_text(text, encoding="utf-8")


def _ends(study: Results, methods: Sequence[str]) -> list[float]:
    """The ends of the axis of the metric: the last rounds are what differs, not the first few."""
    shown = [cell for cell in cells(study) if cell.method in methods]
    finals = [value for cell in shown for value in cell.finals(study.metric, study.info.last).values()]
    return [max(0.0, math.floor(20 * min(finals) - 5) / 20), min(1.0, math.ceil(20 * max(finals) + 0.5) / 20)]


def _entry(curve: Curve, study: Results, methods: Sequence[str]) -> dict[str, Any]:
    labels = [study.info.methods[method] for method in methods]
    who = " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)
    seeds = study.info.seeds
    spread = f"mean of {seeds_text(seeds)}, 95 % t interval" if len(seeds) > 1 else f"seed {seeds[0]}"
    runs = {entry.digest for entry in study.info.entries if entry.method in methods}
    seconds = sum(
        line.facts.get("cpu_seconds") or 0 for digest, line in study.lines.items() if digest in runs
    )
    return {
        "caption": f"10,000 Fashion-MNIST images: {who}; {spread}",
        "command": study.info.command,
        "seeds": list(seeds),
        "cpu_seconds": round(seconds),
    }


def write() -> None:
    """Writes the pages and their figures."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    for folder in ("figures", "curves"):
        for file in (HOME / folder).glob("*.svg"):
            file.unlink()
    draw_all(HOME)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--take"]:
        take(Path(sys.argv[2]))
    write()
