"""The journal of a run, in files that only its owner can read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from fedlens.core import tensorfile
from fedlens.core.payload import pack, unpack
from fedlens.core.states import Journal
from fedlens.core.types import ClientId, Payload
from fedlens.files.atomic_files import make_folder, refused, replacing

_NOTE, _RUN = re.compile(r"round-(\d+)-[a-z0-9-]+\.safetensors"), "run.safetensors"


class JournalFile(Journal):
    """A journal in the folder `journal` of a run directory: a file a note, and one a client's log, of mode 0600.

    The folder is made with the first entry.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "journal"
    >>> JournalFile(folder).keep_log(7, {"answered": 3})
    >>> JournalFile(folder).log_of(7), oct((folder / "client-7.safetensors").stat().st_mode & 0o777)
    ({'answered': 3}, '0o600')
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def run(self) -> str:
        """The identity of the run, drawn when it is first asked for."""
        if (kept := self._read(_RUN)) is None:
            kept = {"run": os.urandom(16).hex()}
            self._write(_RUN, kept)
        return str(kept["run"])

    def begin(self, run: str) -> None:
        """Takes the identity that sites know the run by. Raises `RunFailed` if the disk refuses."""
        self._write(_RUN, {"run": run})

    def note(self, round: int, name: str, payload: Payload) -> None:
        """See `Journal`. Raises `RunFailed` if the disk refuses."""
        self._write(_note_name(round, name), payload)

    def noted(self, round: int, name: str) -> Payload | None:
        """See `Journal`. Raises `DecodingError` if the file is damaged."""
        return self._read(_note_name(round, name))

    def keep_log(self, client: ClientId, log: Payload) -> None:
        """See `Journal`. Raises `RunFailed` if the disk refuses."""
        self._write(f"client-{client}.safetensors", log)

    def log_of(self, client: ClientId) -> Payload:
        """See `Journal`. Raises `DecodingError` if the file is damaged."""
        return self._read(f"client-{client}.safetensors") or {}

    def saved(self, round: int) -> None:
        """See `Journal`."""
        for path, of in list(self._notes_on_disk()):
            if of <= round:
                path.unlink(missing_ok=True)

    def _notes_on_disk(self) -> Iterator[tuple[Path, int]]:
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := _NOTE.fullmatch(path.name):
                yield path, int(match[1])

    def _write(self, name: str, payload: Payload) -> None:
        path = make_folder(self._folder) / name
        try:
            self._folder.chmod(0o700)
            with replacing(path) as temporary:
                tensorfile.write(temporary, *pack(payload))
                temporary.chmod(0o600)
        except OSError as error:
            raise refused(error, f"journal/{name}", path) from error

    def _read(self, name: str) -> Payload | None:
        path = self._folder / name
        if not path.exists():
            return None
        contents = tensorfile.read(path)
        return unpack(contents.tensors, contents.metadata)


def _note_name(round: int, name: str) -> str:
    return f"round-{round:06}-{name}.safetensors"
