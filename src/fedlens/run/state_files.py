"""The states of clients in files of a run: one file a state, named by the SHA-256 of what is in it.

A file is never changed. It stays as long as a client's state or a checkpoint refers to it. Files that were only
written to make room in memory may be lost in a power cut, as nothing on the disk refers to them; before a checkpoint
does, `sync` waits until the disk has them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

from fedlens.base.errors import DecodingError, RunDirectoryError, RunFailed
from fedlens.base.shell_command import quoted_command
from fedlens.core import tensorfile
from fedlens.core.payload import pack, unpack
from fedlens.core.types import Payload
from fedlens.files.atomic_files import fsync_directory, open_unlinked, refused, sweep, temporary_beside

_KEY = re.compile(r"[0-9a-f]{1,64}")
_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_WRITING = "state"
_PIECE = 1 << 20


class StateFiles:
    """The files below `directory`, which is made when the first state is put there. A `fedlens.core.states.Store`.

    >>> import tempfile, torch
    >>> files = StateFiles(Path(tempfile.mkdtemp()) / "states")
    >>> files.sweep(saved=set(), live=set())
    >>> key = files.put({"c": {"w": torch.ones(2)}, "visits": 3})
    >>> files.get(key), len(key), [path.name == f"{key}.safetensors" for path in files.directory.iterdir()]
    ({'c': {'w': tensor([1., 1.])}, 'visits': 3}, 64, [True])
    >>> files.drop(key)
    >>> list(files.directory.iterdir())
    []
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: set[str] = set()  # written or read by this process, so it is what its name says
        self._unsynced: set[str] = set()
        self._lost: dict[str, str] = {}  # files that could not be read, and why
        self._saved: Set[str] | None = None  # what checkpoints refer to, once `sweep` was told

    def put(self, payload: Payload) -> str:
        """Write a state, without waiting for the disk, and return the hash that it is known by from now on.

        Raises `RunFailed` where the disk is full or refuses, or where the state has in it what no file can hold.
        """
        tensors, metadata = pack(payload)
        temporary = temporary_beside(self.directory / _WRITING)
        try:
            self.directory.mkdir(exist_ok=True)
            key = tensorfile.write(temporary, tensors, metadata, sync=False).sha256
            if key in self._known:
                temporary.unlink()
            else:
                os.rename(temporary, path_of(self.directory, key))
                self._known.add(key)
                self._unsynced.add(key)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()  # what is half written may be what fills the disk
            raise self._refused(error) from error
        return key

    def get(self, key: str) -> Payload:
        """Read a state. Raises `RunFailed` where its file is gone or is not what was written."""
        path = path_of(self.directory, key)
        try:
            contents = tensorfile.read(path)
            fault = "its checksum is another" if contents.written.sha256 != key else None
            state = unpack(contents.tensors, contents.metadata) if fault is None else {}
        except (RunDirectoryError, DecodingError) as error:
            fault = error.what
        except OSError as error:
            fault = error.strerror or str(error)
        if fault is not None:
            self._lost[key] = fault
            raise self._unreadable(key)
        self._known.add(key)
        return state

    def drop(self, key: str) -> None:
        """Remove a file that no client's state refers to any more, unless a checkpoint does, or nobody knows yet."""
        if self._saved is not None and key not in self._saved:
            self._remove(key)

    def sync(self, keys: Iterable[str]) -> None:
        """Wait until the disk has these states, so that a checkpoint may refer to them.

        Raises `RunFailed` where the disk is full or refuses, and where one is known to be unreadable: a checkpoint
        that refers to it would take the place of one that is whole.
        """
        keys = set(keys)
        for key in self._lost.keys() & keys:
            raise self._unreadable(key)
        late = sorted(self._unsynced.intersection(keys))
        try:
            for key in late:
                with open(path_of(self.directory, key), "rb") as file:
                    os.fsync(file.fileno())
            if late:
                fsync_directory(self.directory)
                fsync_directory(self.directory.parent)
        except OSError as error:
            raise self._refused(error) from error
        self._unsynced.difference_update(late)

    def saving(self, keys: Set[str]) -> None:
        """Keep these files from now on: a checkpoint that refers to them is about to be written."""
        if self._saved is not None:
            self._saved = self._saved | keys

    def sweep(self, saved: Set[str], live: Set[str]) -> None:
        """Remove every file but those of the checkpoints that there are, and of the states that there are."""
        self._saved = saved
        sweep(self.directory)
        with suppress(FileNotFoundError):
            for path in list(self.directory.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match and match[1] not in saved and match[1] not in live:
                    self._remove(match[1])

    def _remove(self, key: str) -> None:
        """What the disk does not let go of stays: a run does not end for that."""
        self._known.discard(key)
        self._unsynced.discard(key)
        with suppress(OSError):
            path_of(self.directory, key).unlink()

    def _unreadable(self, key: str) -> RunFailed:
        what = f"the file of a client's state cannot be read: {self._lost[key]}"
        where = path_of(self.directory, key)
        hint = "resume from an earlier checkpoint, if it does not need this file: "
        hint += quoted_command("resume", self.directory.parent)
        return RunFailed(what, where=str(where), hint=hint)

    def _refused(self, error: OSError) -> RunFailed:
        hint = f"then resume with {quoted_command('resume', self.directory.parent)}"
        return refused(error, "the state of a client", self.directory, hint)


def is_key(key: object) -> bool:
    """Whether this can be the hash of a state: nothing else may become part of a path.

    >>> is_key("ab12"), is_key("../ab12"), is_key(7)
    (True, False, False)
    """
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def path_of(directory: Path, key: str) -> Path:
    """Where the state of this hash is or would be. Raises `ValueError` if `key` is not a hash.

    >>> path_of(Path("states"), "ab12").name
    'ab12.safetensors'
    """
    if not is_key(key):
        raise ValueError(f"{key!r} is not the hash of a state")
    return directory / f"{key}.safetensors"


def fault_of(directory: Path, key: str) -> str | None:
    """What is wrong with the file of a state, or None where it is there and is what was written.

    >>> fault_of(Path("nowhere"), "0" * 64)
    'No such file or directory'
    """
    digest = hashlib.sha256()
    try:
        with open(open_unlinked(path_of(directory, key), os.O_RDONLY), "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except RunDirectoryError as error:
        return error.what
    except OSError as error:
        return error.strerror or str(error)
    return None if digest.hexdigest() == key else "its checksum is another"
