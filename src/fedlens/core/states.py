"""The states of the clients: in memory up to a budget; beyond it, the least recently used ones are in a store.

A state is replaced, never changed in place. Each is a `Version`, in memory, in the store, or in both. A `Mark` keeps
the versions that were replaced since an earlier moment, so its cost depends on the number of changes, not of clients.

A `Journal` has what must survive a kill of the server before its next checkpoint.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.device_copies import downloaded
from fedlens.core.schema import nbytes, tensors_in
from fedlens.core.types import ClientId, Payload

MASKED_SUM, _HELD = "masked-sum", "held"  # notes in a journal
STATE_MEMORY = 1024  # MiB: the default budget of an engine


class Store(Protocol):
    """Storage for states beyond the memory budget. `fedlens.run.state_files` implements that of a run."""

    def put(self, payload: Payload, /) -> str:
        """Stores a state and returns the key of its content; equal states may share a key."""
        ...

    def get(self, key: str, /) -> Payload:
        """The state with this key, the same bits."""
        ...

    def drop(self, key: str, /) -> None:
        """Called when no state has this key any more."""
        ...


@dataclass(eq=False, slots=True)
class Version:
    """One state of one client, in memory or in the store; read it with `ClientStates.read`."""

    payload: Payload | None = None  # None: only in the store
    key: str | None = None  # None: only in memory
    nbytes: int = 0
    users: int = 1  # the number of references


@dataclass(frozen=True)
class Saved:
    """All states of a checkpoint: the states themselves, or their keys in the store."""

    states: Mapping[ClientId, Payload] = field(default_factory=dict)
    keys: Mapping[ClientId, str] = field(default_factory=dict)

    def saved(self) -> Saved:
        """Itself: what was read from a checkpoint can be saved again."""
        return self

    @property
    def handles(self) -> dict[ClientId, str]:
        """The handle of each state that is kept at a site."""
        return {client: state[AT_SITE] for client, state in self.states.items() if AT_SITE in state}


AT_SITE = "at-site"
"""The name of the handle in the state of a client that keeps its state at its site."""


def state_at_server(state: Payload, client: str) -> Payload:
    """The state of a client, for use at the server.

    Raises `ConfigError` for a handle: the state itself never leaves its site.

    >>> state_at_server({"steps": 3}, "ward-a")
    {'steps': 3}
    >>> state_at_server({"at-site": "9f", "bytes": 40}, "ward-a")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: the state of 'ward-a' stays at its site, and the server has only its handle; read
      it there.
    """
    if AT_SITE in state:
        raise ConfigError(
            f"the state of '{client}' stays at its site, and the server has only its handle",
            hint="read it there",
        )
    return state


class Mark:
    """The states at the time of `ClientStates.mark`; valid until `ClientStates.keep` releases it."""

    def __init__(self, states: ClientStates) -> None:
        self._states = states
        self.before: dict[ClientId, Version | None] = {}  # replaced since; None: there was no state

    def saved(self) -> Saved:
        """For a checkpoint: the states themselves if all are in memory, otherwise all by key.

        States that are not in the store yet are stored now. Raises what the store raises.
        """
        return self._states.saved(self)


class ClientStates:
    """The states of all clients. The driver owns them, so a lost worker loses none.

    Args:
        store: for states beyond the budget; without a store, all states stay in memory.
        memory: bytes of tensors and byte strings (`fedlens.core.schema.nbytes`) that may stay in memory.

    Attributes:
        gpu_memory: how many of these bytes may stay on a GPU, if clients leave them there (`inline`). The least
            recently used states are moved to the CPU.

    >>> class Shelf(dict):
    ...     def put(self, state): self[state["note"].decode()] = state; return state["note"].decode()
    ...     def get(self, key): return self[key]
    ...     def drop(self, key): del self[key]
    >>> shelf = Shelf()
    >>> states = ClientStates(shelf, memory=8)
    >>> for client, note in enumerate([b"first", b"last"]):
    ...     states.commit(client, {"note": note})
    >>> list(shelf), states.get(0), list(shelf)
    (['first'], {'note': b'first'}, ['first', 'last'])
    """

    def __init__(self, store: Store | None = None, memory: int = 0) -> None:
        self._store, self._memory = store, memory
        self._current: dict[ClientId, Version] = {}
        self._marks: list[Mark] = []
        self._resident: OrderedDict[Version, None] = OrderedDict()  # the least recently used first
        self._used = 0
        self._on_gpu: OrderedDict[Version, None] = OrderedDict()
        self.gpu_memory = self._gpu_used = 0
        self._keys = Counter[str]()  # how many versions have this key

    @property
    def used(self) -> int:
        """The bytes of the states in memory."""
        return self._used

    @property
    def keys(self) -> set[str]:
        """The keys of all states in the store."""
        return set(self._keys)

    # -- the state of a client ------------------------------------------------------------------------------------

    def get(self, client: ClientId) -> Payload:
        """The committed state of a client; empty before its first commit."""
        version = self._current.get(client)
        return {} if version is None else self.read(version)

    def commit(self, client: ClientId, state: Payload) -> None:
        """Sets the client's state."""
        self._replace(client, self._new(state))

    def staging(self) -> Staging:
        """Collects states that are committed together later."""
        return Staging(self)

    def hold(self, client: ClientId) -> Version:
        """The client's current state, for reading it until `release`, even if another one is committed."""
        version = self._current.get(client)
        if version is None:
            return Version({})
        version.users += 1
        return version

    def read(self, version: Version) -> Payload:
        """Reads a state from memory or from the store."""
        if version.payload is not None:
            for recent in (self._resident, self._on_gpu):
                if version in recent:
                    recent.move_to_end(version)
            return version.payload
        assert self._store is not None
        assert version.key is not None
        payload = version.payload = self._store.get(version.key)
        version.nbytes = nbytes(payload)
        self._admit(version)
        return payload

    def release(self, version: Version) -> None:
        """Ends a `hold`."""
        version.users -= 1
        if version.users:
            return
        if version in self._resident:
            self._leave(version)
        if version.key is not None:
            self._keys[version.key] -= 1
            if not self._keys[version.key]:
                del self._keys[version.key]
                assert self._store is not None
                self._store.drop(version.key)

    # -- all of them ----------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Marks the current states, so that they can be read later."""
        mark = Mark(self)
        self._marks.append(mark)
        return mark

    def rewind(self, mark: Mark) -> None:
        """Takes back all that was committed since a mark, which stays.

        >>> states = ClientStates()
        >>> states.commit(0, {"steps": 1})
        >>> mark = states.mark()
        >>> for client in (0, 1):
        ...     states.commit(client, {"steps": 2})
        >>> states.rewind(mark)
        >>> states.snapshot()
        {0: {'steps': 1}}
        """
        for client, version in list(mark.before.items()):
            if version is not None:
                version.users += 1
            self._replace(client, version)

    def keep(self, *marks: Mark) -> None:
        """Releases all other marks, and the states that only they refer to."""
        for mark in [mark for mark in self._marks if mark not in marks]:
            self._marks.remove(mark)
            for version in mark.before.values():
                if version is not None:
                    self.release(version)

    def saved(self, mark: Mark) -> Saved:
        """See `Mark.saved`."""
        versions = dict(self._at(mark))
        if any(version.key is not None for version in versions.values()):
            return Saved(keys={client: self._stored(version) for client, version in versions.items()})
        return Saved({client: version.payload or {} for client, version in versions.items()})

    def restore(self, saved: Saved | Mapping[ClientId, Payload]) -> None:
        """Restores the states of a checkpoint or a `snapshot`, in place of all current ones."""
        found = saved if isinstance(saved, Saved) else Saved(saved)
        if found.keys and self._store is None:
            raise ValueError("states kept in a store cannot be restored without that store")
        for client in list(self._current):
            self._replace(client, None)
        for client, key in found.keys.items():
            self._keys[key] += 1
            self._replace(client, Version(key=key))
        for client, state in found.states.items():
            self.commit(client, state)

    def snapshot(self) -> dict[ClientId, Payload]:
        """All states by client, read into memory, for inspection. A run uses `mark`."""
        return {client: self.read(version) for client, version in self._current.items()}

    def _at(self, mark: Mark) -> Iterator[tuple[ClientId, Version]]:
        if mark not in self._marks:
            raise ValueError("the mark was released; its states are gone")
        gone = [client for client in mark.before if client not in self._current]
        for client in [*self._current, *gone]:  # in the order of their first commit
            version = mark.before[client] if client in mark.before else self._current[client]
            if version is not None:
                yield client, version

    # -- versions -------------------------------------------------------------------------------------------------

    def _new(self, state: Payload) -> Version:
        version = Version(rows(state), nbytes=nbytes(state))
        self._admit(version)
        return version

    def _replace(self, client: ClientId, new: Version | None) -> None:
        """Sets the client's state. Every mark stays valid, even if this is interrupted."""
        old = self._current.get(client)
        for mark in self._marks:
            if client not in mark.before:
                if old is not None:
                    old.users += 1
                mark.before[client] = old
        if new is None:
            self._current.pop(client, None)
        else:
            self._current[client] = new
        if old is not None:
            self.release(old)

    def _admit(self, version: Version) -> None:
        """Counts a state that is now in memory, and evicts others until both budgets are met."""
        if self._store is None or version.nbytes == 0:
            return
        if any(tensor.is_cuda for tensor in tensors_in(version.payload)):
            self._on_gpu[version] = None
            self._gpu_used += version.nbytes
            while self._gpu_used > self.gpu_memory:
                oldest = next(iter(self._on_gpu))
                oldest.payload = downloaded(oldest.payload)
                self._leave_gpu(oldest)
        self._resident[version] = None
        self._used += version.nbytes
        while self._used > self._memory:
            oldest = next(iter(self._resident))
            self._stored(oldest)
            self._leave(oldest)
            oldest.payload = None

    def _leave(self, version: Version) -> None:
        del self._resident[version]
        self._used -= version.nbytes
        if version in self._on_gpu:
            self._leave_gpu(version)

    def _leave_gpu(self, version: Version) -> None:
        del self._on_gpu[version]
        self._gpu_used -= version.nbytes

    def _stored(self, version: Version) -> str:
        if version.key is None:
            assert self._store is not None
            assert version.payload is not None
            version.key = self._store.put(version.payload)
            self._keys[version.key] += 1
        return version.key


class Staging:
    """Proposed states that are committed together. They count in the budget, so a cohort's need not fit in memory."""

    def __init__(self, states: ClientStates) -> None:
        self._states = states
        self._staged: dict[ClientId, Version] = {}

    def put(self, client: ClientId, state: Payload) -> None:
        """Proposes a client's next state; a later proposal for the same client replaces it."""
        earlier = self._staged.get(client)
        self._staged[client] = self._states._new(state)
        if earlier is not None:
            self._states.release(earlier)

    def commit(self) -> None:
        """Commits all states, in the order in which the clients were first proposed."""
        while self._staged:
            client = next(iter(self._staged))
            self._states._replace(client, self._staged.pop(client))


class Journal:
    """Notes of the server by round, and the logs of simulated clients, kept in memory; a run keeps its own in files.

    A note counts until its round is in a checkpoint. A log stays: it is never rolled back with the client's state. What
    is kept is on the disk when the method returns.

    >>> journal = Journal("a")
    >>> journal.note(3, "masked", {"sum": 7})
    >>> journal.noted(3, "masked"), journal.noted(4, "masked"), journal.log_of(0)
    ({'sum': 7}, None, {})
    >>> journal.saved(3)
    >>> journal.noted(3, "masked")
    """

    def __init__(self, run: str = "memory") -> None:
        self._run = run
        self._notes: dict[tuple[int, str], Payload] = {}
        self._logs: dict[ClientId, Payload] = {}

    @property
    def run(self) -> str:
        """The identity of the run."""
        return self._run

    def given_up(self, round: int) -> bool:
        """Whether the round masked a sum before a kill; if it did, the states that its clients proposed are dropped.

        For a round that draws its clients anew: those of the masked sum may have opened it, and answer no second one.
        """
        if self.noted(round, MASKED_SUM) is None:
            return False
        self.note(round, _HELD, {"clients": []})
        return True

    def note(self, round: int, name: str, payload: Payload) -> None:
        """Keeps a note of a round; it replaces that of the same name."""
        self._notes[round, name] = payload

    def noted(self, round: int, name: str) -> Payload | None:
        """The note of this name; None if there is none."""
        return self._notes.get((round, name))

    def keep_log(self, client: ClientId, log: Payload) -> None:
        """Replaces the log of a client."""
        self._logs[client] = log

    def log_of(self, client: ClientId) -> Payload:
        """The log of a client; empty before its first."""
        return self._logs.get(client, {})

    def saved(self, round: int) -> None:
        """A checkpoint of this round is on the disk: notes of rounds up to it are removed."""
        self._notes = {key: note for key, note in self._notes.items() if key[0] > round}


class Held:
    """The states of a round that clients propose to a holding ask, in the journal until the round commits them.

    >>> held, states = Held(Journal(), round=1), ClientStates()
    >>> held.begin()
    >>> held.put(7, {"visits": 1})
    >>> held.complete()
    >>> held.commit(states)
    >>> states.get(7)
    {'visits': 1}
    """

    def __init__(self, journal: Journal, round: int) -> None:
        self._journal, self._round, self._new = journal, round, list[ClientId]()

    def begin(self) -> None:
        """A holding ask goes out: the states of an earlier one are dropped."""
        self._new = []
        self._list()

    def put(self, client: ClientId, state: Payload) -> None:
        """Keeps the state of a client, which replaces an earlier one of it."""
        self._journal.note(self._round, f"{_HELD}-{client}", state)
        self._new = [one for one in self._new if one != client] + [client]

    def complete(self) -> None:
        """All answers have been read: a round that is continued after a kill commits these states."""
        self._list()

    def commit(self, states: ClientStates) -> None:
        """Commits the states, also those of the same round before a kill."""
        for client in (self._journal.noted(self._round, _HELD) or {"clients": []})["clients"]:
            state = self._journal.noted(self._round, f"{_HELD}-{client}")
            assert state is not None  # written before the list
            states.commit(client, state)

    def _list(self) -> None:
        if self._new or self._journal.noted(self._round, _HELD) is not None:
            self._journal.note(self._round, _HELD, {"clients": list(self._new)})


def rows(value: Any) -> Any:
    """The same payload with every tensor contiguous (row-major), as files and workers return it.

    An operation on a transposed tensor may sum in another order, and a run must not depend on where a state was kept.
    Contiguous tensors are not copied.

    >>> import torch
    >>> rows({"w": [torch.arange(6).reshape(2, 3).T]})["w"][0].stride()
    (2, 1)
    """
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, Mapping):
        inside = {name: rows(item) for name, item in value.items()}
        return inside if any(inside[name] is not item for name, item in value.items()) else value
    if isinstance(value, list | tuple):
        items = [rows(item) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return (items if isinstance(value, list) else tuple(items)) if changed else value
    return value
