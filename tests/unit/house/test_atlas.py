"""The records of studies: their files, their entries in record.toml, and the pages that show them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.atlas import plan_of
from benchmarks.atlas_record import (
    COST,
    DATA,
    FILES,
    MOST,
    MOST_IN_ALL,
    MOST_PICTURES,
    record_folder,
    refuse_machine,
)
from benchmarks.atlas_unfinished import KEPT, UNFINISHED
from fedlens.results.rows import Results, Row, StudyInfo, read_lines, write_lines
from fedlens.settings.config import read_config
from fedlens.studies.reproduce import StudyRecord, costs, listed_studies, records
from tools import atlas_page
from tools.atlas_page import HOME, NOWHERE, PAGE, ROOT, index, made, paper_pages, unfinished

AGAIN = "run: python -m tools.atlas_page"
RECORDS = [(name, record) for name, found in records().items() for record in found]
IDS = [f"{name}-{record.scale}" for name, record in RECORDS]


@pytest.mark.parametrize(("name", "record"), RECORDS, ids=IDS)
def test_a_record_is_that_of_the_study_as_it_is_now_or_marked_as_stale(
    name: str, record: StudyRecord
) -> None:
    results, entry = made(name, record)
    assert plain(entry) == plain(record), AGAIN
    if not entry.stale:
        kept = Results.read(ROOT / record.folder)
        assert plain(kept.info) == plain(results.info), AGAIN
        assert kept.data == json.loads(json.dumps(results.data)), AGAIN


def plain(of: StudyInfo | StudyRecord) -> dict[str, Any]:
    """The values as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(of)))
    return values


@pytest.mark.parametrize(("name", "record"), RECORDS, ids=IDS)
def test_a_record_has_all_files_of_moderate_size_and_names_no_machine(name: str, record: StudyRecord) -> None:
    assert record.folder == f"docs/atlas/{name}/{record.scale}"
    files = {path.name: path for path in (ROOT / record.folder).iterdir()}
    pictures = {name for name in files if name.endswith(".svg")}
    assert set(FILES) - {DATA} <= set(files) <= {*FILES, *pictures, *KEPT}
    taken = {name: path.stat().st_size for name, path in files.items()}
    assert sum(taken[name] for name in set(files) - pictures - {*KEPT}) <= MOST
    assert sum(taken[name] for name in pictures) <= MOST_PICTURES
    for each in set(files) - pictures:
        refuse_machine(files[each].read_text(encoding="utf-8"), each)
    cost = json.loads(files[COST].read_bytes())
    assert record.cpu_hours == round(cost["cpu_seconds"] / 3600, 4)
    tomllib.loads(files["study.toml"].read_text(encoding="utf-8"))


def test_every_folder_has_an_entry_and_all_are_small_enough() -> None:
    files = [path for path in HOME.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_IN_ALL
    assert {path.parent for path in files if path.name not in KEPT} == {
        ROOT / record.folder for _, record in RECORDS
    }


def test_kept_runs_are_finished_runs_of_a_study_and_a_scale() -> None:
    places = {record_folder(ROOT, name, scale) for name, scales in costs().items() for scale in scales}
    for path in HOME.rglob(UNFINISHED):
        assert path.parent in places
        assert path.stat().st_size <= MOST
        assert {line.status for line in read_lines(path)} == {"finished"}
        refuse_machine(path.read_text(encoding="utf-8"), path.name)


def test_the_list_and_the_pages_of_the_papers_show_every_record() -> None:
    text, made_pages = PAGE.read_text(encoding="utf-8"), dict(paper_pages())
    assert text == index(), AGAIN
    assert text.count("\n- ") == len(RECORDS)
    for name, record in RECORDS:
        address = f"figures/{name.partition('/')[0]}.md"
        assert f"`{name}`, [{record.scale}]({address}#{name.replace('/', '')}-{record.scale}): " in text
        paper = made_pages[address]
        assert f"## `{name}`, {record.scale}\n" in paper
        assert f"`{record.command(name)}`" in paper
        for picture in (ROOT / record.folder).glob("*.svg"):
            assert f"](../{picture.relative_to(PAGE.parent).as_posix()})" in paper


def test_a_record_that_trains_nothing_has_its_numbers_on_the_page_of_its_paper() -> None:
    paper = dict(paper_pages())["figures/hsu2019.md"]
    section = paper.partition("## `hsu2019/fig1`, laptop\n")[2].partition("\n## ")[0]
    assert "| Mean EMD of the clients | here |\n" in section
    assert "| alpha = 0.1 | 1.74 |\n" in section


def test_the_page_counts_the_kept_runs_of_an_unfinished_study(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "ghaemi2022/algorithms"
    folder = record_folder(tmp_path, name, "paper")
    folder.mkdir(parents=True)
    runs = [(run.digest, run.directory) for run in plan_of(name, "paper").runs[:3]]
    runs += [("of another plan", "of-another-plan")]
    write_lines(folder / UNFINISHED, [Row(*run, "finished", None, 80, "test_accuracy", {}) for run in runs])
    monkeypatch.setattr(atlas_page, "ROOT", tmp_path)
    [study] = [study for study in listed_studies(NOWHERE, NOWHERE) if study.name == name]
    [line] = unfinished(study)
    assert "at the scale `paper` is not finished: 3 of 8 runs are complete" in line
    assert f"`python -m benchmarks.atlas --only {name} --scale paper` continues it" in line


def test_the_paper_scale_of_ghaemi2022_is_the_papers_and_runs_in_pieces() -> None:
    """Sections 2, 3 and 5: both splits, three algorithms and centralized training, 80 rounds, 10 of 100 clients."""
    plan = plan_of("ghaemi2022/algorithms", "paper")
    assert plan.number_of_runs == {"tune": 0, "final": 8}
    assert costs()["ghaemi2022/algorithms"]["paper"].runs == 8
    configs = {(run.method, str(run.case["case"])): read_config(dict(run.settings)) for run in plan.runs}
    assert {case for _, case in configs} == {"IID", "two classes"}
    assert {method for method, _ in configs} == {"centralized", "fedavg", "fedprox", "liadmm"}
    for (method, case), config in configs.items():
        assert (config.data.dataset["name"], config.model["name"]) == ("fashion-mnist", "mcmahan-cnn")
        assert config.evaluation.train
        assert config.checkpoint.seconds <= 60, "a killed run goes on from a recent round"
        if method != "centralized":
            assert (config.rounds, config.data.partition["clients"]) == (80, 100)
            assert config.select == {"name": "uniform", "fraction": 0.1}
            assert (config.local.epochs, config.local.batch_size) == (10, 128), (method, case)
    shown = {figure.get("metric", "test_accuracy") for figure in plan.source.settings.figures}
    assert shown == {"test_accuracy", "test_loss", "train_accuracy", "train_loss"}
    assert len(plan.info({}).document["claims"]) >= 4
