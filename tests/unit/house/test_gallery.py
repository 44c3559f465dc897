"""The build of the docs makes the six result pages of the gallery, and the pages of papers, from what is kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlens.studies.reproductions import PAPERS

DOCS = Path(__file__).parents[3] / "docs"
SHOWN = {
    "gallery/run/report.html": "Confusion matrix",
    "gallery/cost/cost.html": "IID clients",
    "evidence/pretraining/study.html": "CIFAR-100",
    "gallery/segmentation/report.html": "IoU",
    "gallery/detection/report.html": "recall",
    "gallery/run/analysis/analysis.html": "local training",
}

pytest.importorskip("mkdocs", reason="the docs' tools: pip install 'fedlens[dev]'")


def test_the_build_makes_each_page_of_the_gallery_and_of_a_paper(tmp_path: Path) -> None:
    from tools.result_pages import pages

    made = {page.relative_to(tmp_path).as_posix(): page for page in pages(DOCS, tmp_path)}
    gallery = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert re.findall(r'<iframe src="([^"]+)"', gallery) == list(SHOWN)
    assert re.findall(r"\[Open the page\]\(([^)]+)\)", gallery) == list(SHOWN)
    for address, words in SHOWN.items():
        assert words in made[address].read_text(encoding="utf-8"), address
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    papers = [address for address in made if address.endswith(".md")]
    assert papers == [f"figures/{paper}.md" for paper in PAPERS] == re.findall(r"figures/\w+\.md", menu)
    for address in papers:
        assert made[address].read_text(encoding="utf-8").startswith("# "), address


def test_what_the_gallery_keeps_names_no_folder_and_has_no_model() -> None:
    files = [file for file in (DOCS / "gallery").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".toml", ".json", ".jsonl", ".npz"}
    assert sum(file.stat().st_size for file in files) < 2_000_000
    for file in files:
        assert file.suffix == ".npz" or not re.search(
            r'"/\w+/|\d\.\d+\.\d+-', file.read_text(encoding="utf-8")
        ), file
