"""Unpacking a published zip archive, each file whole or not at all."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from fedlens.base.errors import DataError


def unzip(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> int:
    """Unpacks the members of `archive` that are `wanted`, by name, below `folder`; how many they are.

    Every member is checked against its CRC-32 before it gets its name. Raises `DataError` if the archive
    is damaged, a name points outside the folder, or no member is wanted; otherwise the archive is removed at the end.
    """
    count = 0
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                if member.is_dir() or not wanted(member.filename):
                    continue
                parts = PurePosixPath(member.filename).parts
                if ".." in parts or member.filename.startswith("/"):
                    raise DataError(f"'{member.filename}' points outside the folder", where=str(archive))
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                try:
                    with packed.open(member) as source, part.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
                count += 1
    # zipfile raises these two for an unknown compression method and for an encrypted member.
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"the archive cannot be unpacked: {error}", where=str(archive)) from error
    if not count:
        raise DataError("the archive contains none of the expected files", where=str(archive))
    archive.unlink()
    return count
