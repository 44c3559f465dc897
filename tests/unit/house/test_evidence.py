"""The page of evidence says what its results say, and its studies are what can be run."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import table
from benchmarks.atlas_record import refuse_machine
from fedlens import Study
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.results.cells import cells
from fedlens.results.rows import Results
from fedlens.results.tables import study_table, study_tables
from fedlens.studies.study_plan import StudyPlan
from tests.contract.contract_kit import nightly_but
from tools import evidence_page
from tools.evidence_page import (
    CURVES,
    HOME,
    MARKER,
    PAGES,
    ROOT,
    figures,
    published_studies,
    rendered,
    results,
)

STUDIES = sorted(HOME.glob("*.toml"))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Study files name their data from the root of the checkout."""
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("file", nightly_but(STUDIES[::4], STUDIES), ids=lambda file: file.stem)
def test_a_study_gives_every_method_the_same_number_of_tuning_runs(file: Path) -> None:
    plan = StudyPlan.load(file.relative_to(ROOT))
    numbers = [plan.number_of_runs["tune"] / len(plan.cells.methods) / len(plan.cells.cases)]
    assert plan.info({}).tuning.get("budget", 0) == numbers[0]
    assert plan.command == f"fedlens sweep docs/evidence/{file.name}"


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("name", nightly_but(published_studies()[::4], published_studies()))
def test_the_results_are_those_of_the_study_file_and_no_run_is_missing(name: str) -> None:
    plan, study = StudyPlan.load(Path("docs", "evidence", f"{name}.toml")), results(name)
    assert not plan.due(study.lines)
    assert [entry.digest for entry in plan.info(study.lines).entries] == [
        entry.digest for entry in study.info.entries
    ]
    assert {entry.digest for entry in study.info.entries} == set(study.lines)
    reasons = [line.reason or "" for line in study.lines.values()]
    assert not [reason for reason in reasons if "does not exist" in reason]  # the machine's, not the method's


TEXT = "".join(path.read_text(encoding="utf-8") for path in PAGES)


def test_the_pages_say_what_the_results_say() -> None:
    assert rendered(TEXT) == TEXT, "run: python -m tools.evidence_page"


def test_every_study_is_on_the_page_with_its_command_and_cost_or_as_one_without_results() -> None:
    costs = [match[3] for match in MARKER.finditer(TEXT) if match[2] == "cost"]
    assert sorted(costs) == published_studies()
    assert set(published_studies()) <= {file.stem for file in STUDIES}
    assert all(f"docs/evidence/{file.name}" in TEXT for file in STUDIES)


def tables(page: str) -> list[str]:
    """For each table of a page the text below it, up to the next table or heading."""
    return [
        re.split(r"^(?:\||#)", text, maxsplit=1, flags=re.MULTILINE)[0]
        for text in re.split(r"^(?:\|.*\n)+", page, flags=re.MULTILINE)[1:]
    ]


def test_every_table_of_results_has_its_file_or_says_that_it_was_not_kept() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    below = tables(page)
    assert len(below) == len(re.findall(r"^\|[ :-]*-[-|: ]*\|$", page, flags=re.MULTILINE)) > 5
    linked = set()
    for text in below:
        first = text.strip().partition("\n\n")[0].replace("\n", " ")
        links = re.findall(r"\]\((evidence/[^)]+)\)", first)
        without = first.startswith(("The result file was not kept; ", "No result file: "))
        assert without or (first.startswith("Result file") and links), first
        linked |= {ROOT / "docs" / link for link in links}
    assert linked == set((HOME / "results").iterdir())


def test_every_table_of_evidence_is_written_from_the_results_of_its_study() -> None:
    for path in PAGES[1:]:
        by_hand = tables(MARKER.sub("", path.read_text(encoding="utf-8")))
        assert not by_hand, f"{path.name}: write the table between markers, from docs/evidence"
    for match in MARKER.finditer(TEXT):
        assert (HOME / match[3].partition(".")[0] / "results.jsonl").is_file()


def test_the_speed_tables_are_those_of_their_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = HOME / "results" / "bench-blazefl-fluke.json"
    table.main([str(file)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| ", "- "))]
    assert len(printed) > 20
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert all(line in page for line in printed)


def test_the_tables_of_moco_are_those_of_their_file() -> None:
    lines = map(json.loads, (HOME / "results" / "moco-v2.jsonl").read_text(encoding="utf-8").splitlines())
    runs = {line["run"]: line["metrics"] for line in lines if "run" in line}

    def accuracies(run: str, at: int) -> str:
        found = [100 * runs[f"{run}-{seed}"][at]["test_knn_accuracy"] for seed in range(3)]
        return " | ".join(f"{value:.1f}" for value in (*found, sum(found) / 3))

    def ends(run: str) -> str:
        return "{local_loss:.3f} | {test_embedding_deviation:.2f}".format(**runs[f"why-{run}"][-1])

    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [
        f"| random weights | {accuracies('moco', 0)} |",
        f"| random weights, with computed batch statistics | {accuracies('random', -1)} |",
        f"| MoCo v2, one epoch | {accuracies('moco', -1)} |",
        *(f"| 4,096 | {ends(run)} |" for run in ("base", "nopairs", "lr", "groups", "cifar")),
    ]
    assert not [row for row in rows if row.removeprefix("| 4,096") not in page]
    assert f"| 6.240 | {ends('queue')} |" in page


def test_no_result_file_names_the_machine() -> None:
    for file in (HOME / "results").iterdir():
        refuse_machine(file.read_text(encoding="utf-8"), file.name)


def test_every_figure_is_there_and_none_is_left_over() -> None:
    shown = {f"{name.replace('.', '-')}.svg" for name in figures()}
    assert {file.name for file in (HOME / "figures").iterdir()} == shown
    for file in HOME.glob("*/*.svg"):
        assert ET.parse(file).getroot().tag.endswith("svg")


def test_every_curve_of_a_study_with_results_is_there_with_the_command_that_made_it() -> None:
    index = json.loads((HOME / "index.json").read_text(encoding="utf-8"))["curves"]
    drawn = [curve for curve in CURVES if curve.study in published_studies()]
    assert set(index) == {curve.algorithm for curve in drawn}
    assert {curve.algorithm for curve in CURVES} <= set(ALGORITHMS)
    assert {file.stem for file in (HOME / "curves").iterdir()} == set(index)
    for curve in drawn:
        entry = index[curve.algorithm]
        assert entry["command"] == f"fedlens sweep docs/evidence/{curve.study}.toml"
        assert entry["cpu_seconds"] > 0
        assert all(results(curve.study).info.methods[method] in entry["caption"] for method in curve.methods)


def test_no_ranked_method_saw_fewer_than_twenty_epochs_of_images() -> None:
    study = results("algorithms")
    for cell in cells(study):
        for line in cell.ended.values():
            epochs = (line.curve["examples"][-1] or 0) / 10_000
            assert epochs >= (19.7 if cell.case["case"] == "unequal sizes" else 20)  # cohorts are drawn


def test_what_is_taken_of_the_results_gives_the_same_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(
        name="small",
        base={
            "rounds": 4,
            "model": "linear",
            "local": {"lr": 0.1, "steps": 2},
            "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 3}},
        },
        seeds=[0, 1],
        target=0.2,
        grid={"local.lr": [0.1, 0.3]},
        methods={"fedavg": {}, "fedavgm": {"set": {"algorithm.name": "fedavgm"}}},
        tune={"seeds": [5]},
    )
    study.run(tmp_path / "studies" / "small", jobs=0, report=False)
    monkeypatch.setattr(evidence_page, "HOME", tmp_path / "home")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "small.toml").touch()
    assert evidence_page.take(tmp_path / "studies") == ["small"]
    whole, taken = (Results.read(tmp_path / folder / "small") for folder in ("studies", "home"))
    narrow = {"kind": "targets", "measures": ["rounds"]}
    assert len(taken.lines) == len(whole.lines)
    assert [t.to_csv() for t in study_tables(taken) if t.name != "targets"] == [
        t.to_csv() for t in study_tables(whole) if t.name != "targets"
    ]
    assert study_table(taken, narrow).to_csv() == study_table(whole, narrow).to_csv()
    size = {
        folder: (tmp_path / folder / "small" / "results.jsonl").stat().st_size
        for folder in ("studies", "home")
    }
    assert size["home"] < 0.6 * size["studies"]


def test_what_stands_between_markers_is_written_anew_and_the_rest_stays() -> None:
    name = published_studies()[0]
    page = f"a\n<!-- cost: {name} -->\nold\n<!-- end -->\nb\n"
    made = rendered(page)
    assert made == f"a\n<!-- cost: {name} -->\n\n{evidence_page.cost(name)}\n\n<!-- end -->\nb\n"
    assert rendered(made) == made
    with pytest.raises(KeyError):
        rendered("<!-- cost: nothing -->\n<!-- end -->\n")
