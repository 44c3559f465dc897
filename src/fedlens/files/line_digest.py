"""The digest of the lines of a file, kept while lines are appended, and the first line that does not fit it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.files import jsonl

MARKS = 64  # of one digest: a checkpoint stays small however many lines there are
_SHORT = 16  # hexadecimal digits of a mark


class LineDigest:
    """The SHA-256 of all lines so far, and marks: digests of beginnings of them, which locate an edit.

    There is a mark after every line at first. When there are more than `MARKS`, every second one is dropped, and from
    then on marks are twice as far apart. A line costs the same however many precede it.

    >>> digest = LineDigest()
    >>> digest.add(b'{"round": 0}\\n{"round": 1}\\n')
    >>> digest.lines, digest.saved()["every"], len(digest.saved()["marks"])
    (2, 1, 2)
    """

    def __init__(self, every: int = 1) -> None:
        self.lines = 0
        self._sha256 = hashlib.sha256()
        self._every = every
        self._marks: list[str] = []

    @classmethod
    def of(cls, path: Path) -> LineDigest:
        """The digest of all lines in a file. Raises what `fedlens.files.jsonl.stream` raises."""
        digest = cls()
        for line, _ in jsonl.stream_lines(path):
            digest.add(line)
        return digest

    def add(self, content: bytes) -> None:
        """Adds lines, each with its line break."""
        for line in content.split(b"\n")[:-1]:
            self._sha256.update(line + b"\n")
            self.lines += 1
            if self.lines % self._every == 0:
                self._marks.append(self._sha256.copy().hexdigest()[:_SHORT])
            if len(self._marks) > MARKS:
                self._marks, self._every = self._marks[1::2], 2 * self._every

    def saved(self) -> dict[str, Any]:
        """The digest as JSON, for a checkpoint. Its size does not grow with the number of lines."""
        return {
            "lines": self.lines,
            "sha256": self._sha256.hexdigest(),
            "every": self._every,
            "marks": list(self._marks),
        }


def read_digest(saved: Any) -> dict[str, Any] | None:
    """What `LineDigest.saved` returned, or None if it is something else: of an older version, or not of fedlens.

    >>> read_digest(LineDigest().saved())["lines"], read_digest({"lines": 3})
    (0, None)
    """
    if not isinstance(saved, Mapping):
        return None
    lines, every, marks = (saved.get(key) for key in ("lines", "every", "marks"))
    good = (
        isinstance(lines, int)
        and isinstance(every, int)
        and every > 0
        and isinstance(saved.get("sha256"), str)
        and isinstance(marks, list)
    )
    return dict(saved) if good else None


def difference(path: Path, before: int, saved: Mapping[str, Any]) -> str | None:
    """The first line of a file that differs from those that `saved` was made of, in words; None if all are equal.

    Args:
        path: the file.
        before: lines of this round and later ones are left out.
        saved: from `read_digest`.

    Raises what `fedlens.files.jsonl.stream` raises.

    >>> import tempfile
    >>> path, digest = Path(tempfile.mkdtemp()) / "metrics.jsonl", LineDigest()
    >>> for round in range(3):
    ...     digest.add(jsonl.append(path, [{"round": round, "loss": 0.5}]))
    >>> difference(path, 3, digest.saved()) is None
    True
    >>> _ = path.write_text(path.read_text().replace('1, "loss": 0.5', '1, "loss": 0.4'))
    >>> difference(path, 3, digest.saved())
    'line 2 was changed'
    """
    lines, digest = saved["lines"], LineDigest(saved["every"])
    for line, row in jsonl.stream_lines(path):
        if jsonl.is_after(row.get("round"), before - 1):
            continue
        if digest.lines == lines:
            return _changed(digest.saved(), saved) or f"line {lines + 1} was added"
        digest.add(line)
    return _changed(digest.saved(), saved)


def _changed(now: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """The first of these lines that differs, as exactly as the marks tell."""
    if (now["lines"], now["sha256"]) == (saved["lines"], saved["sha256"]):
        return None
    every, both = saved["every"], list(zip(now["marks"], saved["marks"], strict=False))
    same = next((at for at, (mark, other) in enumerate(both) if mark != other), len(both))
    first, last = same * every + 1, min((same + 1) * every, saved["lines"])
    if now["lines"] < first:
        return f"line {first} is missing"
    return f"line {first} was changed" if first >= last else f"one of the lines {first} to {last} was changed"
