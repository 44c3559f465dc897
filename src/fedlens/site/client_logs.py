"""The logs that a site's clients keep of secure sums: encrypted, one file a client and run, never rolled back.

A log (`fedlens.core.protocol.Ask.logged`) is a mapping with `runs`, of which a file has the one of its run, and
`models`, the models in opened sums. Those are kept over all runs, in a folder of their own: a model that was summed
once is refused in any other run. Names of runs and clients are hashed in paths.

Beside them is the ledger of differential privacy, `privacy.jsonl`: a line for each operation with noise for each
example that a client began, over all runs (`[allow] max_epsilon`).
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlens.base.errors import DecodingError, RunDirectoryError, one_line
from fedlens.core.types import Payload
from fedlens.core.wire.message import Caps, read_payload, write_payload
from fedlens.files import jsonl
from fedlens.files.atomic_files import read_regular, sweep
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.private_files import private_folder, write_private
from fedlens.site.kept_states import StateLost

LOGS = "client-logs"
"""The name of the folder, in that of a site."""
LEDGER = "privacy.jsonl"
"""The name of the ledger of privacy, in the folder of a site."""
_MODELS = "models"


def logs_of_run(folder: Path, run: str) -> Path:
    """The folder with the logs of a run, in the folder of a site; models in opened sums are not in it."""
    return folder / LOGS / _hashed(run)


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class ClientLogs:
    """The logs of a site's clients in all runs.

    Args:
        folder: of mode 0700; it is made, with a folder for each run.
        cipher: of the site.

    >>> import tempfile
    >>> from fedlens.identity.keys import KeyPair
    >>> logs = ClientLogs(Path(tempfile.mkdtemp()) / "logs", FileCipher(KeyPair.make()))
    >>> logs.put("run-1", "ward-a", {"runs": {"run-1": {"step": "keys"}}, "models": [b"m"]})
    >>> logs.get("run-1", "ward-a"), logs.get("run-2", "ward-a")
    ({'runs': {'run-1': {'step': 'keys'}}, 'models': [b'm']}, {'runs': {}, 'models': [b'm']})
    """

    def __init__(self, folder: Path, cipher: FileCipher) -> None:
        self._folder, self._cipher = private_folder(folder), cipher
        self._ledger = folder.parent / LEDGER
        jsonl.truncate(self._ledger, sys.maxsize)  # a line that a power cut has cut began no operation
        for each in folder.iterdir():
            sweep(each)

    def get(self, run: str, client: str) -> Payload:
        """The log of a client, for an operation of a run. Raises `StateLost` if its file is damaged."""
        kept = self._read(self._folder / _hashed(run), run, client)
        return {"runs": kept.get("runs", {}), "models": self._models(client)}

    def put(self, run: str, client: str, log: Payload) -> None:
        """Replaces the log of a client in a run, on the disk.

        Raises `StateLost` if it is of another run, and `RunFailed` if the disk refuses.
        """
        if set(runs := log.get("runs", {})) - {run}:
            raise StateLost("the operation names another run than its ask", where="ask")
        # First: a kill between the two leaves a client that opens less, and not one that opens a model twice.
        if (models := log.get("models", [])) != self._models(client):
            self._write(self._folder / _MODELS, _MODELS, client, {"models": models})
        self._write(self._folder / _hashed(run), run, client, {"runs": runs})

    def acknowledge(self, run: str, clients: Iterable[str], round: float = math.inf) -> None:
        """Removes the answers in the logs of a run that opened sums before `round`: the server has saved those rounds.

        What was answered stays refused. Raises `RunFailed` if the disk refuses; a file that is damaged stays.
        """
        for client in clients:
            with suppress(StateLost):
                entry = dict(self.get(run, client)["runs"].get(run, {}))
                if entry.get("attempt", {}).get("round", 0) < round and entry.pop("answer", None) is not None:
                    self._write(self._folder / _hashed(run), run, client, {"runs": {run: entry}})

    def releases(self, client: str) -> list[dict[str, Any]]:
        """What a client has released with noise, over all runs. Raises `StateLost` if the ledger is damaged."""
        try:
            return [event for event in jsonl.read(self._ledger) if event["client"] == client]
        except (RunDirectoryError, KeyError) as error:
            what = f"the ledger of privacy cannot be read: {one_line(str(error))}"
            raise StateLost(what, where=str(self._ledger)) from error

    def released(self, run: str, round: int, client: str, release: Mapping[str, Any]) -> None:
        """Adds a release, on the disk. Raises `RunFailed` if the disk refuses."""
        jsonl.append(self._ledger, [{"client": client, "run": run, "round": round, **release}], private=True)
        jsonl.sync(self._ledger)

    def _models(self, client: str) -> list[bytes]:
        models: list[bytes] = self._read(self._folder / _MODELS, _MODELS, client).get("models", [])
        return models

    def _path(self, folder: Path, client: str) -> Path:
        return folder / _hashed(client)

    def _read(self, folder: Path, of: str, client: str) -> Payload:
        if not (path := self._path(folder, client)).exists():
            return {}
        try:
            plain = self._cipher.open(read_regular(path), "log", of, client)
            return read_payload(plain, Caps(len(plain)), where=str(path))
        except (DecodingError, OSError) as error:
            what = f"the log of '{client}' cannot be read: {one_line(str(error))}"
            raise StateLost(what, where=str(path)) from error

    def _write(self, folder: Path, of: str, client: str, log: Payload) -> None:
        sealed = self._cipher.seal(write_payload(log), "log", of, client)
        write_private(self._path(private_folder(folder), client), sealed)
