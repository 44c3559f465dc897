"""No tracked file has the marks that a merge leaves behind: most files with them pass every other check."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# "=======" alone is a heading of some formats, and never stands without the other two.
MARKS = re.compile(rb"^(?:<{7}|>{7}|\|{7})(?: |\r?$)", re.MULTILINE)


def tracked() -> list[Path]:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("the source is not a git repository")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_tracked_file_has_the_marks_of_a_conflict() -> None:
    files = [path for path in tracked() if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    assert [str(path.relative_to(ROOT)) for path in files if MARKS.search(path.read_bytes())] == []


@pytest.mark.parametrize(
    "line", ["<" * 7 + " HEAD", ">" * 7 + " 1a2b3c (Say more)", "|" * 7 + " base", "<" * 7]
)
def test_the_check_sees_each_mark(line: str) -> None:
    assert MARKS.search(f"one\n{line}\ntwo\n".encode())
    assert not MARKS.search(f"one\n  {line}\n>>> doctest\n".encode())
