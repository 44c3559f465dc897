"""The states of a site's clients, which stay at the site: the server has a handle of each, and commits it as a state.

A state lies under its SHA-256. Its handle is an HMAC under a key of the site, so that it says nothing of the state, and
nobody else can make one. The list of handles is replaced atomically, after the state is on the disk.

The server names a state in each ask. The site accepts

- the one that the first ask of the client's last round named, and those that it returned since: the server may commit
  them, or take back what it committed in a round that it skips;
- one that a checkpoint names, or has named.

Any other is refused, and so is one that is not on the disk as it was written: a client never begins anew instead. A
state that is not accepted any more is removed after two more checkpoints, because a checkpoint may name it late, and
one that a checkpoint has named 14 days later at the earliest. All states of a run go 14 days after its end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import DataError, FedlensError
from fedlens.base.parse_text import parse_json
from fedlens.core import tensorfile
from fedlens.core.payload import unpack
from fedlens.core.states import AT_SITE
from fedlens.core.types import Payload
from fedlens.core.wire.message import Message, write_payload
from fedlens.files.atomic_files import read_regular, sweep, write_atomically
from fedlens.identity.private_files import private_folder, read_private, write_private

_LIST, _KEY = "states.json", "handles.key"
CHECKPOINTS, SECONDS = 2, 14 * 86_400
"""How late a state is removed that no checkpoint names: after so many checkpoints, and seconds."""


class StateLost(FedlensError):
    """A state that the site does not have, or that the server may not name. Its text stays at the site."""


@dataclass
class _State:
    """A state of a client, and why it is kept.

    Attributes:
        live: whether the server may still commit it, or has.
        named: when a checkpoint named it last, in seconds since 1970; None if none did.
        idle: how many checkpoints of the client there were when it was last needed.
    """

    handle: str
    digest: str
    live: bool = True
    named: float | None = None
    idle: int = 0


@dataclass
class _Client:
    """The states of one client in one run, in the order in which it returned them.

    Attributes:
        attempt, round: of its last ask, and `based` whether the first ask of that round named a state.
        keep: the handles that checkpoints name; `checkpoints` is how often they have changed.
        ended: when the run ended, in seconds since 1970; None if it goes on.
    """

    attempt: int = 0
    round: int = -1
    based: bool = False
    keep: list[str] = field(default_factory=list)
    checkpoints: int = 0
    ended: float | None = None
    states: list[_State] = field(default_factory=list)


class KeptStates:
    """The states of a site's clients in all runs.

    Args:
        folder: of mode 0700; it is made.
        clock: the seconds since 1970.

    Raises `DataError` if the list of handles is damaged, and `IdentityError` for a folder that others can read.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self._folder, self._clock = private_folder(folder), clock
        sweep(folder)
        if not (folder / _KEY).exists():
            write_private(folder / _KEY, os.urandom(32))
        self._key = read_private(folder / _KEY)
        self._clients: dict[tuple[str, str], _Client] = {}
        self._read()
        self._remove_unlisted(path.stem for path in folder.glob("*.safetensors"))

    def _read(self) -> None:
        path = self._folder / _LIST
        if not path.exists():
            return
        try:
            for run, client, values in parse_json(read_regular(path).decode()):
                states = [_State(**each) for each in values.pop("states")]
                known = _Client(**values, states=states)
                if known.ended is None or self._clock() - known.ended < SECONDS:
                    self._clients[run, client] = known
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            hint = "restore it from a backup; without it the site's clients have lost their states"
            raise DataError("the list of states is damaged", where=str(path), hint=hint) from error

    def _save(self) -> None:
        listed = [[run, client, asdict(known)] for (run, client), known in self._clients.items()]
        write_private(self._folder / _LIST, json.dumps(listed).encode())

    # -- what an ask names ----------------------------------------------------------------------------------------

    def get(self, ask: Message) -> Payload:
        """The state that an ask names; empty for a client that has none yet.

        Raises `StateLost` if it may not be named, is not on the disk, or is damaged. Nothing changes then.
        """
        fields, handle, keep = ask.fields, ask.details.get("state"), ask.details.get("keep", [])
        named = isinstance(handle, str) or handle is None
        if not named or not isinstance(keep, list) or not all(isinstance(one, str) for one in keep):
            raise StateLost("the ask names no state that could be one", where="ask")
        known = self._clients.get((fields.run, fields.client), _Client())
        found = self._accepted(known, fields.attempt, handle, keep)
        state = {} if found is None else self._load(found)
        if found is not None or keep or known.states:
            self._clients[fields.run, fields.client] = known
            self._advance(known, (fields.attempt, fields.round), found, keep)
        return state

    def _accepted(
        self, known: _Client, attempt: int, handle: str | None, keep: Collection[str]
    ) -> _State | None:
        if handle is None:
            if known.based and attempt == known.attempt:
                raise StateLost("the ask names no state, and the client has one", where="ask")
            return None
        for state in known.states:
            if hmac.compare_digest(state.handle, handle):
                if state.live or state.named is not None or handle in keep:
                    return state
                raise StateLost("the ask names a state before the last one", where="ask")
        raise StateLost("the ask names a state that the site does not have", where="ask")

    def _load(self, state: _State) -> Payload:
        path = self._path(state.digest)
        try:
            content = read_regular(path)
        except OSError as error:
            raise StateLost(f"a state cannot be read: {error.strerror}", where=str(path)) from error
        if hashlib.sha256(content).hexdigest() != state.digest:
            raise StateLost("a state is damaged: its SHA-256 is another", where=str(path))
        tensors, metadata = tensorfile.parse(content, where=str(path))
        return unpack(tensors, metadata)

    def _advance(
        self, known: _Client, place: tuple[int, int], found: _State | None, keep: Collection[str]
    ) -> None:
        """Notes what an ask says: which states the server cannot commit any more, and which checkpoints there are."""
        again = place[0] > known.attempt
        if again or place[1] > known.round:  # the first ask of a round: what is before its state is over
            at = (
                len(known.states)
                if found is None and again
                else 0
                if found is None
                else known.states.index(found)
            )
            over = [one for one in known.states if one is not found] if again else known.states[:at]
            for state in over:
                state.live = False
            known.attempt, known.round = place
            known.based, known.ended = found is not None, None
        if keep and set(keep) != set(known.keep):
            known.keep, known.checkpoints = sorted(keep), known.checkpoints + 1
        for state in known.states:
            if state.handle in known.keep:
                state.named = self._clock()
            if state.live or state.handle in known.keep:
                state.idle = known.checkpoints
        before = {state.digest for state in known.states}
        known.states = [state for state in known.states if not self._over(known, state)]
        self._save()
        self._remove_unlisted(before)

    def _over(self, known: _Client, state: _State) -> bool:
        """Whether a state is removed."""
        if state.live or known.checkpoints - state.idle < CHECKPOINTS:
            return False
        return state.named is None or self._clock() - state.named >= SECONDS

    # -- what a client returns ------------------------------------------------------------------------------------

    def put(self, ask: Message, state: Payload) -> Mapping[str, Any]:
        """Keeps the state that a client returned to an ask, and returns what its answer says of it.

        Raises `RunFailed` if the disk refuses, or the state cannot be written.
        """
        content, fields = write_payload(state), ask.fields
        digest = hashlib.sha256(content).digest()
        if not (path := self._path(digest.hex())).exists():
            write_atomically(path, content, mode=0o600)
        text = json.dumps([fields.run, fields.client, ask.digest.hex()]).encode()
        handle = hmac.new(self._key, text + digest, hashlib.sha256).hexdigest()
        known = self._clients.setdefault((fields.run, fields.client), _Client(fields.attempt, fields.round))
        if all(one.handle != handle for one in known.states):
            known.states.append(_State(handle, digest.hex(), idle=known.checkpoints))
            self._save()
        return {AT_SITE: handle, "bytes": len(content)}

    def ended(self, run: str) -> None:
        """Removes what no checkpoint of a run that has ended can name, and the others 14 days later."""
        before = set[str]()
        for (of, _), known in self._clients.items():
            if of == run:
                known.ended = self._clock()
                before |= {state.digest for state in known.states}
                known.states = [state for state in known.states if state.live or state.named is not None]
        self._save()
        self._remove_unlisted(before)

    def purge(self, run: str) -> None:
        """Removes all states of a run: its clients cannot go on."""
        before = {
            state.digest for (of, _), known in self._clients.items() if of == run for state in known.states
        }
        self._clients = {key: known for key, known in self._clients.items() if key[0] != run}
        self._save()
        self._remove_unlisted(before)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"

    def _remove_unlisted(self, digests: Any) -> None:
        listed = {state.digest for known in self._clients.values() for state in known.states}
        for digest in set(digests) - listed:
            self._path(digest).unlink(missing_ok=True)
