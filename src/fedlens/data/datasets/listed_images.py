"""Images that a published list or its metadata name: all of them have to be on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlens.core.errors import DataError
from fedlens.data.datasets.folders import absent


def check_present(root: Path, files: Sequence[str], name: str, how: str) -> None:
    """Raises `DataError` where images of the dataset `name` are not below `root`; `how` says how to get them."""
    gone = absent(root, files)
    if gone:
        raise DataError(
            f"{len(gone):,} of the {len(files):,} images of '{name}' are not there, "
            f"the first is {files[gone[0]]}",
            where=str(root),
            hint=how,
        )
