"""The content of run directories, without what differs between two runs of the same experiment: times and places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DIFFERENT = {"seconds", "elapsed", "cpu_seconds", "directory", "run_id", "started", "command"}


def content(directory: Path) -> dict[str, Any]:
    """What each file holds, by its name below the run directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(directory).as_posix(): _content(path) for path in files}


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name == "manifest.json":
        found = json.loads(path.read_text(encoding="utf-8"))["content"]
        digest = found["about"]["lines"]["metrics.jsonl"]  # of lines that have times
        del digest["sha256"], digest["marks"]
        return timeless(found)
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text(encoding="utf-8")))
    return path.read_bytes()


def timeless(value: Any) -> Any:
    """A value of a JSON file without times and places."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in _DIFFERENT}
    return [timeless(item) for item in value] if isinstance(value, list) else value
