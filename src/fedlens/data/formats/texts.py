"""Small text files: lists of names, and labels."""

from __future__ import annotations

from pathlib import Path

from fedlens.data.diagnostics import Findings


def read_text(path: Path, findings: Findings) -> str | None:
    """The text of a file in UTF-8; None, and a finding, where it has none."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        findings.add(path, f"the file cannot be read: {error.strerror}", "see that it is there")
    except UnicodeDecodeError as error:
        findings.add(
            path, f"the file is not UTF-8: byte {error.start + 1} cannot be read", "save it in UTF-8"
        )
    return None
