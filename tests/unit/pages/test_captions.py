"""Captions, notes and axes of all pages: one sentence at a figure or a table, one block of notes, and no idle words."""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedlens.pages.compare import write_page_of
from fedlens.results.comparison import Comparison
from fedlens.results.figures.chart import Chart, Series, drawn_values
from fedlens.results.figures.study_figures import study_figure
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import study_table
from tests.snapshots import page_snapshots, study_snapshots
from tests.snapshots.study_snapshots import FIGURES, TABLES
from tests.unit.pages.reading import read_page

SNAPSHOTS = {**study_snapshots.SNAPSHOTS, **page_snapshots.SNAPSHOTS}
SHOWN = (
    *("analyses", "compare", "cost-of-fakes", "partition", "study-tuned"),
    *("run-classification", "run-detection", "run-interrupted", "run-of-peers", "run-segmentation"),
)
PAGES = [
    name if (short := Path(name).stem) in SHOWN else pytest.param(name, marks=pytest.mark.nightly)
    for name in SNAPSHOTS
    if name.startswith("pages/")
]
# Lists of what a run or a site did, which are no notes on figures.
LISTS = ("Notes", "What this page contains", "What left the clients", "Privacy")


@cache
def page(name: str) -> str:
    """The HTML of a page of the snapshots."""
    kept: list[str] = []

    def keep(path: Path) -> str:
        kept.append(path.read_text("utf-8"))
        return ""

    with (
        mock.patch.object(page_snapshots, "page_snapshot", keep),
        mock.patch.object(study_snapshots, "page_snapshot", keep),
    ):
        SNAPSHOTS[name]()
    return kept[0]


def cards(text: str) -> list[tuple[str, str]]:
    """The title and the HTML of each card of a page, without its scripts."""
    found = re.findall(r'<section class="card"[^>]*>(.*?)</section>', text, re.DOTALL)
    scripts = [re.sub(r"<script.*?</script>", "", card, flags=re.DOTALL) for card in found]
    titles = [re.search(r"<h2[^>]*>(.*?)</h2>", card) for card in scripts]
    return [(title[1] if title else "", card) for title, card in zip(titles, scripts, strict=True)]


def words(part: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", part)).split())


@pytest.mark.parametrize("name", PAGES)
def test_a_figure_or_a_table_has_one_sentence_and_a_page_one_block_of_notes(name: str) -> None:
    blocks = []
    for title, card in cards(page(name)):
        # A sentence with a colon at its end is about the command below it.
        captions = [words(text) for text in re.findall(r'<p class="lead[^"]*">(.*?)</p>', card, re.DOTALL)]
        captions = [text.removesuffix(" Notes") for text in captions if not text.endswith(":")]
        assert not [text for text in captions if re.search(r"[.!?] [A-Z0-9–*]", text)], title
        shown = [
            text for text in captions if not text.startswith(("Files: ", "Digest: ", "A run on the same"))
        ]
        figures = len(re.findall(r'<(?:div class="panels"|table)', card)) if '<h2 class="sub">' in card else 1
        assert len(shown) <= figures, (title, shown)
        if '<ul class="method">' in card and title not in LISTS:
            blocks.append(title)
    assert blocks == []
    assert page(name).count('id="notes"') <= 1
    assert ('href="#notes"' in page(name)) <= ('id="notes"' in page(name))


@pytest.mark.parametrize("name", PAGES)
def test_an_axis_of_shares_begins_where_its_values_and_their_bands_begin(name: str) -> None:
    shared: dict[tuple[float, float], list[float]] = {}  # panels of a figure have the same axis
    for figure in read_page(page(name)).figures:
        axis: dict[str, Any] = figure["layout"].get("yaxis", {})
        bars = [trace for trace in figure["data"] if trace["type"] != "scatter"]  # bars stand on 0
        if axis.get("tickformat") == ".1~%" and "range" in axis and not bars:
            values = [value for trace in figure["data"] for value in trace["y"] if value is not None]
            shared.setdefault((axis["range"][0], axis["range"][1]), []).extend(values)
    for (low, high), values in shared.items():
        assert low <= min(values)
        assert max(values) <= high
        assert min(values) - low <= max(0.06 * (max(values) - min(values)), 0.02) + 1e-9


@pytest.mark.parametrize(
    "name", [name for name, (_, spec) in FIGURES.items() if spec["kind"] in ("setting", "curves")]
)
def test_a_figure_of_a_study_shows_whole_bands_and_explains_the_marks_that_it_has(name: str) -> None:
    make, spec = FIGURES[name]
    chart = study_figure(make(), spec)
    panels = [panel for panel in chart.panels if panel.title != "Clients by EMD"]
    series = [each for panel in panels for each in panel.series]
    axis = panels[0].y
    if axis.values == "share" and axis.limits and not spec.get("relative") and "y" not in spec:
        values = drawn_values(series)
        bars = any(each.kind == "bar" for each in series)
        near = max(0.06 * (max(values) - min(values)), 0.02) + 1e-9
        assert axis.limits[0] <= min(values)
        assert axis.limits[1] >= max(values) or bars
        assert bars or min(values) - axis.limits[0] <= near
    assert_explained(chart, series)


def assert_explained(chart: Chart, series: list[Series]) -> None:
    """Each note on a mark is about one that is drawn, and each mark that needs a note has one."""
    notes = " ".join(chart.notes).lower()
    there = {
        "bands": any(each.kind == "band" for each in series),
        "error bars": any(end is not None for each in series for end in each.low),
        "open markers": any(each.kind == "open" for each in series),
        "dash-dotted lines": any((each.kind, each.dash) == ("level", "dashdot") for each in series),
        "a triangle": any(each.symbol != "circle" for each in series),
        "dotted:": any(each.name == "chance" for each in series),
    }
    assert {mark: mark in notes for mark in there} == there
    dashed = any(
        (each.kind, each.dash, each.name.lower()) == ("line", "dash", "centralized") for each in series
    )
    assert ("dashed:" in notes) <= dashed


# A note that begins so is about a column whose head, or about a cell whose text, has this pattern.
NEEDS = {
    "Interval:": r"^Interval$",
    "Difference:": r"^Difference$",
    "Effective rate:": r"^Effective rate$",
    "Validation accuracy (%):": r"^Validation accuracy \(%\)$",
    "Batches:": r"batches|Batches",
    "Bytes:": r"\bbytes\b|\d [kMG]?B\b|Bytes",
    "* ": r".\*$",
    "–:": r"^–$",
    "Not reached:": r"not reached by",
    "In brackets:": r"×\)",
    '"Paper":': r"^Paper",
    "Rows in italics": r"^paper",
    "Memory is": r"^memory$",
    "Time and bytes": r"^total time$",
}


def assert_columns(table: StudyTable) -> None:
    texts = [*table.head, *(cell.text for row in table.rows for cell in row)]
    for note in table.notes:
        for begin, pattern in NEEDS.items():
            if note.startswith(begin):
                assert any(re.search(pattern, text) for text in texts), (table.name, note)
    assert not re.search(r"[.!?] [A-Z]", table.caption), table.caption


@pytest.mark.parametrize("name", TABLES)
def test_each_column_that_a_table_explains_is_in_it(name: str) -> None:
    make, spec = TABLES[name]
    assert_columns(study_table(make(), spec))


def test_notes_on_what_is_not_reached_and_on_multiples_stand_with_such_cells_alone() -> None:
    make, spec = next((make, spec) for make, spec in TABLES.values() if spec["kind"] == "targets")
    low = study_table(make(), {**spec, "targets": [0.01], "multipliers": "none"})
    assert not any(note.startswith(("Not reached", "In brackets")) for note in low.notes)
    high = study_table(make(), {**spec, "targets": [0.01, 0.999], "multipliers": "row"})
    assert {"Not reached", "In brackets"} <= {note.partition(":")[0] for note in high.notes}


def test_the_table_of_clients_explains_differences_where_it_has_some(tmp_path: Path) -> None:
    explained = "Differences need runs with the same clients"
    assert explained in words(page("pages/compare.txt"))
    page_snapshots._compared(tmp_path)
    alone = write_page_of(Comparison.of([tmp_path / "digits"]), tmp_path / "alone.html").read_text("utf-8")
    assert "mercy" in words(alone)
    assert explained not in words(alone)
