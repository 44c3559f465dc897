"""The states of the clients: in memory up to a budget, and beyond it in a store, the least recently used first.

A state is replaced, never changed. So each is a `Version` that may lie in memory, in the store, or in both, and what
was there at an earlier moment is known from the versions that were replaced since (`Mark`): looking back costs what
has changed, not what there is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedlens.core.schema import nbytes, tensors_in
from fedlens.core.transfers import downloaded
from fedlens.core.types import ClientId, Payload

STATE_MEMORY = 1024  # MiB: the budget of an engine that does not say another


class Store(Protocol):
    """Where states lie that memory has no room for. `fedlens.run.state_files` has the one of a run."""

    def put(self, payload: Payload, /) -> str:
        """Keeps a state, and gives the key that stands for its content: equal states may have one key."""
        ...

    def get(self, key: str, /) -> Payload:
        """The state of this key, the same bits."""
        ...

    def drop(self, key: str, /) -> None:
        """Says that no client's state has this key any more."""
        ...


@dataclass(eq=False, slots=True)
class Version:
    """One state of one client, wherever it lies at the moment. To be read with `ClientStates.read`."""

    payload: Payload | None = None  # None: it lies in the store alone
    key: str | None = None  # None: it lies in memory alone
    nbytes: int = 0
    users: int = 1  # the places that refer to it


@dataclass(frozen=True)
class Saved:
    """All states as a checkpoint holds them: as they are, or by the key under which the store has them."""

    states: Mapping[ClientId, Payload] = field(default_factory=dict)
    keys: Mapping[ClientId, str] = field(default_factory=dict)

    def saved(self) -> Saved:
        """Itself: what was read from a checkpoint can be saved again."""
        return self


class Mark:
    """The states as they stood when it was made by `ClientStates.mark`, until `ClientStates.keep` lets go of it."""

    def __init__(self, states: ClientStates) -> None:
        self._states = states
        self.before: dict[ClientId, Version | None] = {}  # what was replaced since; None: there was no state

    def saved(self) -> Saved:
        """For a checkpoint: the states themselves while all of them lie in memory, else all by key.

        Those that are not in the store yet are put there now. Raises what the store raises.
        """
        return self._states.saved(self)


class ClientStates:
    """The state of every client that has one, owned by the driver, so that a lost worker loses nothing.

    Args:
        store: takes what memory has no room for; without one all states stay in memory.
        memory: bytes of tensors and byte strings (`fedlens.core.schema.nbytes`) that may stay in memory.

    Attributes:
        gpu_memory: how many of these bytes may stay on a GPU, if clients leave them there (`inline`). The states that
            were used least recently are brought to ordinary memory.

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
        """The bytes of the states that lie in memory."""
        return self._used

    @property
    def keys(self) -> set[str]:
        """The keys of all that lies in the store."""
        return set(self._keys)

    # -- what a client finds --------------------------------------------------------------------------------------

    def get(self, client: ClientId) -> Payload:
        """The committed state of a client; empty before its first commit."""
        version = self._current.get(client)
        return {} if version is None else self.read(version)

    def commit(self, client: ClientId, state: Payload) -> None:
        """Makes `state` what the client finds next time."""
        self._replace(client, self._new(state))

    def staging(self) -> Staging:
        """For states that are to be committed together, later."""
        return Staging(self)

    def hold(self, client: ClientId) -> Version:
        """The state of a client as it is now, for reading it later, whatever is committed by then; `release` it."""
        version = self._current.get(client)
        if version is None:
            return Version({})
        version.users += 1
        return version

    def read(self, version: Version) -> Payload:
        """A state, from wherever it lies."""
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
        """The states as they are now, to be looked at later."""
        mark = Mark(self)
        self._marks.append(mark)
        return mark

    def keep(self, *marks: Mark) -> None:
        """Lets go of all other marks, and of the states that only they had."""
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
        """Takes back what a checkpoint holds, or a `snapshot`, and forgets all that was committed before."""
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
        """All states by client, read into memory: for looking at them. A run takes a `mark`."""
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
        """Makes `new` the client's state. Broken off anywhere, each mark still knows what stood then."""
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
        """Counts a state that came into memory, and puts others away until both budgets are kept."""
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
    """States on their way to being committed. They count in the budget, so a whole cohort's need not fit in memory."""

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
        """Makes each what its client finds next time, in the order in which the clients were first proposed for."""
        while self._staged:
            client = next(iter(self._staged))
            self._states._replace(client, self._staged.pop(client))


def rows(value: Any) -> Any:
    """The same payload with every tensor in row-major order, as it comes back from a file and lies at a worker.

    An operation on a transposed tensor may sum in another order: a run must not depend on where a state has been.
    What is in that order already is not copied.

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
