"""Files of one JSON object per line, appended and read during a run, and the digest of their lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.base.parse_text import LARGEST, parse_json
from fedlens.files import jsonl
from fedlens.files.atomic_files import (
    open_readable,
    open_unlinked,
    read_regular,
    refused,
    write_atomically,
)


def append(path: Path, rows: Sequence[Mapping[str, Any]], private: bool = False) -> bytes:
    """Append `rows` in one write, all or none, and return what was written. Only its owner can read a `private` file.

    Raises `RunFailed` if the disk is full or refuses, `RunDirectoryError` if `path` is a link or not a regular file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append(path, [{"round": 0}, {"round": 1}])
    b'{"round": 0}\\n{"round": 1}\\n'
    >>> read(path)
    [{'round': 0}, {'round': 1}]
    """
    content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    try:
        descriptor = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "ab", buffering=0) as file:
            if os.fstat(descriptor).st_nlink > 1:  # the line would appear in the file of the other name, too
                hint = "replace it with a copy: cp FILE COPY, then mv COPY FILE"
                raise RunDirectoryError(f"{path.name} is a hard link", where=str(path), hint=hint)
            if private:
                os.fchmod(descriptor, 0o600)
            before = os.fstat(descriptor).st_size
            try:
                _write_all(file.fileno(), content)
            except BaseException:
                os.ftruncate(file.fileno(), before)
                raise
    except OSError as error:
        raise refused(error, f"a line of {path.name}", path) from error
    return content


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def sync(path: Path) -> None:
    """Wait until the disk has the appended lines; a missing file has none."""
    try:
        descriptor = open_unlinked(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(error, path.name, path) from error
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise refused(error, path.name, path) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in order, without a truncated last line; none if there is no file.

    Raises `RunDirectoryError` with the line number if an earlier line cannot be read, or if any line is what no kill
    leaves: complete but no object, not UTF-8, nested too deeply, too long.
    """
    return list(stream(path))


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """The objects one by one, as `read` gives them, without the whole file in memory. Raises what `read` raises."""
    return (row for _, row in stream_lines(path))


def stream_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines, each with its line break, and their objects. Raises what `read` raises."""
    try:
        with open_readable(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST + 1), b""), start=1):
                text = line.removesuffix(b"\n")
                where = f"{path}, line {number}"
                row = _object(text, where)
                if row is not None:
                    yield text + b"\n", row
                elif text and text != line:  # complete, so no kill has cut it
                    hint = "restore the file from a copy, or remove the line"
                    raise RunDirectoryError("a line is not a JSON object", where=where, hint=hint)
                # The file ended here: what a writer appends meanwhile is read next time.
                if not line.endswith(b"\n"):
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def truncate(path: Path, after_round: int) -> int:
    """Drop the lines of later rounds than `after_round` and a truncated last line; returns how many.

    The other lines are unchanged; the file is replaced atomically.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> _ = append(path, [{"round": 0}, {"round": 1}, {"round": 2}])
    >>> truncate(path, 1), read(path)
    (1, [{'round': 0}, {'round': 1}])
    """
    if not path.exists():
        return 0
    kept = [line for line, row in stream_lines(path) if not is_after(row.get("round"), after_round)]
    content = b"".join(kept)
    before = read_regular(path)
    if content != before:
        write_atomically(path, content)
    return len(before.splitlines()) - len(kept)


def is_after(number: Any, round: int) -> bool:
    """Whether the round of a line is a number beyond `round`."""
    return isinstance(number, int) and number > round


def _object(text: bytes, where: str) -> dict[str, Any] | None:
    try:
        if len(text) > LARGEST:
            raise ValueError(f"it is longer than {LARGEST / 2**30:g} GiB")
        row = parse_json(text)
    except json.JSONDecodeError:
        return None
    except ValueError as error:
        raise RunDirectoryError(f"a line cannot be read: {error}", where=where) from None
    return row if isinstance(row, dict) else None


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
