"""Results on disk: one file a study, one line a cell, written once it is there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
HOME = Path(__file__).parents[2] / "docs" / "evidence"


def read(folder: Path) -> dict[str, Line]:
    """Every line below `folder` by its digest. A last line that was cut off counts as not there."""
    found: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            found[line["digest"]] = line
    return found


def append(folder: Path, study: str, line: Line) -> None:
    """Adds one line to a study's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{study}.jsonl"
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(line, separators=(",", ":")) + "\n")


def forget(folder: Path, digests: Iterable[str]) -> int:
    """Takes the lines of some cells out, so that they are run anew; gives their number."""
    gone, number = set(digests), 0
    for path in sorted(folder.glob("*.jsonl")):
        texts = path.read_text(encoding="utf-8").splitlines()
        kept = [text for text in texts if not _is_one_of(text, gone)]
        number += len(texts) - len(kept)
        if len(kept) < len(texts):
            path.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
    return number


def _is_one_of(text: str, digests: set[str]) -> bool:
    try:
        return json.loads(text)["digest"] in digests
    except json.JSONDecodeError:
        return True
