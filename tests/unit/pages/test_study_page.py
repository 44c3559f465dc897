"""study.html: what stands on it, and what it needs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.pages.study_page import write_study_page
from fedlens.results.figures.study_figures import write_study_figures
from fedlens.results.rows import LINES, Results, write_info, write_lines
from tests.unit.results.study_curves_fake import by_alpha, tuned


def page_of(study: Results, folder: Path) -> str:
    write_info(folder, study.info)
    write_lines(folder / LINES, study.lines.values())
    return write_study_page(folder).read_text(encoding="utf-8")


def words(page: str) -> str:
    """The text of a page, without markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", page)))


def test_a_finished_study_has_its_figures_its_cost_and_the_command(tmp_path: Path) -> None:
    study = by_alpha(command="fedlens sweep study.toml", smaller=[["rounds", "10,000", "200 rounds"]])
    page = page_of(study, tmp_path)
    text = words(page)
    assert page.count("data-plot>") == 5  # a panel for each alpha, and the accuracy against alpha
    assert "40 of 40" in text
    assert "1 h 0 min" in text or "1 h" in text  # 40 runs of 90 s
    assert "20,000,000" in text  # 40 runs of 200 rounds of 2,500 images
    assert "setting paper here rounds 10,000 200 rounds" in text
    assert "fedlens sweep study.toml" in text
    assert "not done" not in text
    assert "failed" not in text


def test_the_page_loads_nothing_and_escapes_what_a_study_says(tmp_path: Path) -> None:
    study = by_alpha(title="<b>A & B</b>", notes=["<script>alert(1)</script>"])
    study = replace(study, info=replace(study.info, methods={"fedavg": "<i>Avg</i>", "fedavgm": "FedAvgM"}))
    page = page_of(study, tmp_path)
    assert "<b>A" not in page
    assert "<script>alert" not in page
    assert "<i>Avg" not in page
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []


def test_the_page_of_a_reproduction_links_to_its_paper(tmp_path: Path) -> None:
    paper = {"authors": "A 2020", "title": "On <learning>", "link": "https://arxiv.org/abs/1"}
    page = page_of(by_alpha(paper=paper), tmp_path)
    assert "Paper: A 2020, On &lt;learning&gt;" in words(page)
    assert '<a href="https://arxiv.org/abs/1">' in page
    assert "Paper: " not in words(page_of(by_alpha(), tmp_path))
    assert "script:" not in page_of(by_alpha(paper={**paper, "link": "javascript:1"}), tmp_path)


def test_the_page_of_a_reproduction_says_that_nothing_differs(tmp_path: Path) -> None:
    paper, nothing = (
        {"authors": "A 2020", "title": "B", "link": "https://arxiv.org/abs/1"},
        "No setting differs",
    )
    assert nothing in words(page_of(by_alpha(paper=paper, scale="paper"), tmp_path))
    changed = by_alpha(paper=paper, scale="paper", smaller=[["rounds", "10,000", "200 rounds"]])
    for study in (by_alpha(), by_alpha(scale="paper"), by_alpha(paper=paper, scale=""), changed):
        assert nothing not in words(page_of(study, tmp_path))


def test_runs_with_warnings_are_named(tmp_path: Path) -> None:
    study = by_alpha()
    assert "with warnings" not in words(page_of(study, tmp_path))
    line = study.lines["fedavgm-0-1"]
    lines = {**study.lines, "fedavgm-0-1": replace(line, facts={**line.facts, "warnings": 2})}
    text = words(page_of(Results(study.info, lines), tmp_path))
    assert f"1 run of 40 with warnings: the results may not be usable {line.run}." in text


def test_a_study_that_is_running_says_what_is_missing_and_why_runs_failed(tmp_path: Path) -> None:
    study = by_alpha()
    lines = dict(list(study.lines.items())[:23])
    lines["fedavgm-0-1"] = replace(
        lines["fedavgm-0-1"], status="failed", reason="out of memory <here>", rounds=40
    )
    text = words(page_of(Results(study.info, lines), tmp_path))
    assert "17 runs of 40 not done yet" in text
    assert "1 run of 40 failed" in text
    assert "fedavgm-0-1 FedAvgM alpha 0 1 40 out of memory &lt;here&gt;" in text
    assert "No results yet: alpha 1, FedAvgM" in text


def test_a_study_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    text = words(page_of(Results(by_alpha().info, {}), tmp_path))
    assert "40 runs of 40 not done yet" in text
    assert "no run has values" in text


def test_tuning_is_described_with_its_budget(tmp_path: Path) -> None:
    tuning = {"on": "validation", "share": 0.1, "budget": 12, "own_seeds": True, "seeds": [100]}
    study = tuned(tuning=tuning)
    text = words(page_of(study, tmp_path))
    assert (
        "of these settings, which were chosen on 10 % of the training data, held out, on one seed (100) that"
        in text
    )
    assert "12 runs of tuning for every method and case" in text
    assert "The value of a run is test_accuracy of its last evaluation" in text


def test_the_page_says_on_which_seeds_unequal_methods_were_tuned(tmp_path: Path) -> None:
    by_method = {"fedavg": [0, 1, 2, 3, 4, 5], "fedavgm": [0, 1]}
    tuning = {"share": 0.1, "budget": 12, "seeds": [0, 1, 2, 3, 4, 5], "seeds_by_method": by_method}
    text = words(page_of(tuned(tuning=tuning), tmp_path))
    assert "by the mean over 2 to 6 seeds, fewer where a method has more points, 12 runs" in text
    assert "the study's seeds" not in text


def test_a_study_without_training_says_so_and_counts_no_runs(tmp_path: Path) -> None:
    study = by_alpha(tables=[{"kind": "efficiency", "runs": False}])
    study = Results(replace(study.info, entries=[], tables=[], figures=[{"kind": "populations"}]), {})
    text = words(page_of(study, tmp_path))
    assert "Runs none data and models are shown, which needs no training" in text
    assert "0 of 0" not in text
    assert "The value of a run" not in text


def test_the_page_links_the_files_for_papers_that_exist(tmp_path: Path) -> None:
    study = by_alpha(figures=[{"kind": "curves"}])
    assert "figures/curves" not in page_of(study, tmp_path)
    write_study_figures(study, tmp_path / "figures", ["svg"])
    assert '<a href="figures/curves.svg">' in page_of(study, tmp_path)


def test_the_legend_of_several_panels_has_each_name_once(tmp_path: Path) -> None:
    page = page_of(by_alpha(centralized=True), tmp_path)
    keys = re.findall(r'data-name="([^"]+)"', page)
    assert keys == ["FedAvg", "FedAvgM", "Centralized", "chance"] * 2


def test_a_folder_without_a_study_and_a_wrong_figure_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no study in"):
        write_study_page(tmp_path)
    with pytest.raises(ConfigError, match=r"figures\[0\]"):
        page_of(by_alpha(figures=[{"kind": "curves", "panel": "x"}]), tmp_path)
