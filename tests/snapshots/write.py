"""Writes the snapshots anew: `python -m tests.snapshots.write`, or those alone whose names begin with a given text.

    python -m tests.snapshots.write tables/summary figures/

A change of a snapshot is a change of what users see: look at each with `git diff`, and say in the commit why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.snapshots import page_snapshots, study_snapshots
from tests.snapshots.kit import EXPECTED, Snapshots

SNAPSHOTS: Snapshots = {**study_snapshots.SNAPSHOTS, **page_snapshots.SNAPSHOTS}


def left_over() -> list[Path]:
    """The files that belong to no snapshot."""
    files = [path for path in EXPECTED.rglob("*") if path.is_file()]
    return [path for path in files if path.relative_to(EXPECTED).as_posix() not in SNAPSHOTS]


def write(begin: Sequence[str] = ()) -> list[str]:
    """Writes the snapshots that begin so, or all, and removes what is left over; the names of those that changed."""
    changed = []
    for name in sorted(SNAPSHOTS):
        if begin and not name.startswith(tuple(begin)):
            continue
        text, path = SNAPSHOTS[name](), EXPECTED / name
        if not path.is_file() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    for path in left_over():
        path.unlink()
        changed.append(f"{path.relative_to(EXPECTED).as_posix()} (removed)")
    return changed


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in write(sys.argv[1:])))
