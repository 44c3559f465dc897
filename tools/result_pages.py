"""The result pages that `mkdocs build` adds to the docs, as fedlens writes them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fedlens.pages.study_page import write_study_page


def on_files(files: Any, config: Any) -> Any:
    """Adds the page of each study in docs/evidence, `evidence/NAME/study.html`."""
    made = Path(tempfile.mkdtemp(prefix="fedlens-docs-"))
    for info in sorted(Path(config.docs_dir, "evidence").glob("*/study.json")):
        folder = made / "evidence" / info.parent.name
        shutil.copytree(info.parent, folder)
        _add(files, config, write_study_page(folder), made)
    return files


def _add(files: Any, config: Any, page: Path, made: Path) -> None:
    address = page.relative_to(made).as_posix()
    files.append(File.generated(config, address, content=page.read_bytes()))
