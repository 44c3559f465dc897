"""The list of what a page contains is read from the page: images, names of clients, paths, and marked parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.pages.compare import write_comparison
from fedlens.pages.data_notes import notes_card
from fedlens.pages.page_contents import page_contents
from fedlens.pages.partition_page import write_page
from fedlens.pages.run_page import write_report
from fedlens.pages.study_page import write_study_page
from fedlens.results.data_json import CasePopulation, population_values
from fedlens.results.rows import LINES, write_data, write_info, write_lines
from tests.unit.pages.reading import read_page
from tests.unit.pages.test_classification_section import WORST, evaluation, images_of
from tests.unit.results.fake_run import class_counts, make_partition, make_run
from tests.unit.results.study_curves_fake import by_alpha

TITLE = "What this page contains"
HOSPITALS = ("St. Anna", "Bonn & Köln", 'the "old" one')


def listed(html: str) -> str:
    return read_page(html).words.partition(TITLE)[2]


def page(root: Path, **config: Any) -> str:
    run = make_run(root, counts=class_counts(3), config=config)
    make_partition(class_counts(3), ids=HOSPITALS).save(run / "partition.npz")
    replace(evaluation(10), images=images_of(WORST)).write(run / "evaluation.npz")
    return write_report(run).read_text(encoding="utf-8")


def test_the_list_of_a_run_names_images_clients_paths_and_numbers(tmp_path: Path) -> None:
    words = listed(page(tmp_path, data={"dataset": {"name": "digits", "path": "/srv/scans"}}))
    assert f"{WORST} pictures of the data." in words
    assert f"The names of 3 clients of 3, such as {', '.join(HOSPITALS)}." in words
    assert "How many examples of each class each client holds." in words
    assert "The names of the classes, and the results of each on the test data." in words
    assert "Every setting of the run" in words
    assert "1 file path, such as /srv/scans." in words


def test_a_page_without_images_lists_none_and_says_how_to_get_them(tmp_path: Path) -> None:
    auto = {"data": {"dataset": {"name": "image-folder"}}, "record": {"images": "auto"}}
    words = listed(page(tmp_path / "own", **auto))
    assert "of the data" not in words.replace("Positions in the test data of wrong answers", "")
    assert "config.toml --set record.images=true" in words
    never = listed(page(tmp_path / "never", record={"images": False}))
    assert "record.images=true" not in never


def test_the_notes_on_the_data_are_on_the_page_and_the_clients_in_them_are_counted(tmp_path: Path) -> None:
    notes = [
        "scans: the client 'St Anna' (2 images) looks like 'St. Anna' (40 images); use one spelling.",
        "skipped Bonn & Köln/a.png: <b>empty</b>",
        *(f"Note {k} on Ulm." for k in range(5)),
    ]
    run = make_run(tmp_path, counts=class_counts(4), summary={"notes": notes})
    ids = ("St. Anna", "St Anna", "Bonn & Köln", "Ulm")
    replace(make_partition(class_counts(4), ids=ids), census=None).save(run / "partition.npz")
    html = write_report(run).read_text(encoding="utf-8")
    words = "".join(read_page(html).words.split())  # the elements of the names are no words
    told = f"Notes The data and the run {' '.join(notes[:5])} 2 more notes {' '.join(notes[5:])}"
    assert "".join(told.split()) in words
    assert "The notes on the data, with the names of classes, clients and files in them." in listed(html)
    card = "".join(notes_card(notes, ids).first)
    assert page_contents(card, ids) == [
        "The names of 3 clients of 4, such as St. Anna, St Anna, Bonn & Köln."
    ]
    assert "The data and the run" not in page(tmp_path / "none")


def test_numbers_are_no_names_of_clients() -> None:
    assert page_contents("<td>3</td>", ["3"]) == []
    assert page_contents(f"<script>{json.dumps({'x': ['Ulm']})}</script>", ["Ulm", "Bonn"]) != []


def test_the_page_of_a_study_names_the_clients_whose_data_it_shows(tmp_path: Path) -> None:
    study = by_alpha(figures=[{"kind": "populations", "style": "bars"}])
    partition = make_partition(class_counts(3), ids=HOSPITALS)
    population = CasePopulation.of(partition, dict(study.info.cases[0]))
    write_data(tmp_path, {"populations": population_values([population])})
    write_info(tmp_path, study.info)
    write_lines(tmp_path / LINES, study.lines.values())
    words = listed(write_study_page(tmp_path).read_text(encoding="utf-8"))
    assert "How many examples of each class each client holds." in words
    assert "The names of 3 clients of 3" in words


@pytest.mark.parametrize("make", ["compare", "partition"])
def test_other_pages_have_the_list(tmp_path: Path, make: str) -> None:
    run, out = make_run(tmp_path), tmp_path / "page.html"
    if make == "compare":
        write_comparison([run], out)
    else:
        write_page(make_partition(class_counts(3), ids=HOSPITALS), out)
    words = listed(out.read_text(encoding="utf-8"))
    assert ("The names of 3 clients of 3" in words) == (make == "partition")
