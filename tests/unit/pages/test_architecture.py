"""The cells of a search, drawn on the page of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedlens.models.darts import PUBLISHED
from fedlens.pages.run_page import write_report
from tests.unit.pages.reading import assert_self_contained, read_page
from tests.unit.results.fake_run import make_run

TITLE = "Which architecture the search found"


def page(root: Path, genotype: Any) -> str:
    run = make_run(root)
    if genotype is not None:
        text = genotype if isinstance(genotype, str) else json.dumps(genotype)
        (run / "genotype.json").write_text(text, encoding="utf-8")
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    return html


def test_both_cells_are_graphs_with_operations_on_their_edges(tmp_path: Path) -> None:
    html = page(tmp_path, PUBLISHED)
    words = read_page(html).words
    assert TITLE in words
    assert "The architecture that the search found." in words  # what the page contains
    normal, reduction = re.findall(r'<figure class="graph cell">.*?</figure>', html, re.DOTALL)
    for cell, kind in ((normal, "normal"), (reduction, "reduce")):
        said = re.findall(r"<title>(node \d) takes (\w+) of the ([\w ]+)<", cell)
        names = ["cell before last", "last cell", *(f"node {k}" for k in range(4))]
        edges = [(f"node {k}", op, names[at]) for k, own in enumerate(PUBLISHED[kind]) for op, at in own]
        assert said == edges
        assert re.findall(r'<text class="on"[^>]*>(\w+)<', cell) == [op for _, op, _ in edges]
        assert cell.count("<circle ") == len(names)
    # From below the last cell to above node 2, three rows further down; its label is on the middle of the arc.
    assert 'd="M4 49C180.0 49 180.0 181 5 181"' in normal
    assert 'x="135" y="115.0" text-anchor="middle">sep_conv_3x3<' in normal


def test_no_two_labels_meet_on_the_largest_cell(tmp_path: Path) -> None:
    every = [[("max_pool_3x3", state) for state in range(2 + node)] for node in range(8)]
    html = page(tmp_path, {"normal": every, "reduce": every})
    cell = html.split('<figure class="graph cell">')[1]
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<text class="on" x="([\d.]+)" y="([\d.]+)"', cell)
    ]
    assert len(places) == sum(range(2, 10))
    for at, (x, y) in enumerate(places):
        assert all(abs(x - other) >= 85 or abs(y - below) >= 20 for other, below in places[:at])


EDGES = [[["skip_connect", 0], ["skip_connect", 1]]]
DAMAGED = {
    "no file": None,
    "no JSON": "{",
    "a list": [1],
    "one cell": {"normal": EDGES},
    "no node": {"normal": 3, "reduce": EDGES},
    "a state to come": {"normal": [[["skip_connect", 2]]], "reduce": EDGES},
    "a state that is a word": {"normal": [[["skip_connect", "one"]]], "reduce": EDGES},
}


@pytest.mark.parametrize("genotype", DAMAGED.values(), ids=DAMAGED)
def test_a_page_without_an_architecture_does_without(genotype: Any, tmp_path: Path) -> None:
    assert TITLE not in page(tmp_path, genotype)


def test_a_name_from_a_file_is_no_markup(tmp_path: Path) -> None:
    cell = [[["<script>", 0]]]
    assert "&lt;script&gt;" in page(tmp_path, {"normal": cell, "reduce": cell})
