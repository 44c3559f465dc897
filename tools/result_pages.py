"""The pages that `mkdocs build` adds to the docs, from runs in docs/gallery, studies, and the records in docs/atlas.

docs/gallery has what the pages need of runs, without models and checkpoints; docs/gallery.md has their commands.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

from fedlens.pages.analysis_page import write_analysis_page
from fedlens.pages.cost.page import write_cost_page
from fedlens.pages.run_page import write_report
from fedlens.pages.study_page import write_study_page
from fedlens.results.run import read_run

sys.path.insert(0, str(Path(__file__).parents[1]))  # the command `mkdocs` does not look there

from tools.atlas_page import paper_pages


def on_files(files: Any, config: Any) -> Any:
    """Adds every page where its run or study lies, such as `gallery/run/report.html`; `figures/hsu2019.md` too."""
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # pages show their folders
        for page in pages(Path(config.docs_dir), Path()):
            how: dict[str, Any] = {"content": page.read_bytes(), "inclusion": InclusionLevel.INCLUDED}
            files.append(File.generated(config, page.as_posix(), **how))
    return files


def pages(docs: Path, made: Path) -> Iterator[Path]:
    """Copies the runs and studies of the docs into a folder, and writes all pages there."""
    shutil.copytree(docs / "gallery", made / "gallery")
    for info in sorted(docs.glob("evidence/*/study.json")):
        yield write_study_page(Path(shutil.copytree(info.parent, made / "evidence" / info.parent.name)))
    for summary in sorted(made.glob("gallery/**/summary.json")):
        yield write_report(summary.parent)
    for index in sorted(made.glob("gallery/*/analysis/analysis.json")):
        yield write_analysis_page(index.parent, read_run(index.parents[1]))
    for answer in sorted(made.glob("gallery/*/cost.json")):
        yield write_cost_page(answer.parent, json.loads(answer.read_text(encoding="utf-8")))
    (made / "figures").mkdir()
    for address, text in paper_pages():
        (made / address).write_text(text, encoding="utf-8")
        yield made / address
