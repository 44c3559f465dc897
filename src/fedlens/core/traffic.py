"""Records what asks and replies carry between the server and the clients, over a whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fedlens.core.protocol import Ask, Reply
from fedlens.core.schema import LETTER, AskedField, NumberField, TensorField, TreeField
from fedlens.core.types import ClientId, Payload, is_client

Row = dict[str, Any]
_PEER = "bytes_peer"  # only where there are letters between clients
_COUNTS = ("asks", "replies", "bytes_down", "bytes_up")


class Traffic:
    """The fields of all messages by operation, with the number of values of each, messages and bytes.

    Requests for data at the server, such as `@test`, reach no client: only their names are kept. A field that a
    worker sums over a block of replies (`Reduce`) counts too, because it left its client.

    Attributes:
        rows: by operation: `down` and `up`, the number of values of each field when it was first seen; `measured`, the
            names of the reply's metrics; `asks` and `replies`; `bytes_down` and `bytes_up`; `rounds`, the first and the
            last round. Letters are fields `letter.NAME`, and `bytes_peer` has those between clients, if there are any.
        server: by operation, the server's data that it ran on.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.server: dict[str, list[str]] = {}

    def to_payload(self) -> dict[str, Any]:
        """The messages as a checkpoint holds them."""
        return {"clients": self.rows, "server": self.server}

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Traffic:
        """The inverse of `to_payload`; an empty mapping has no messages. Raises `ValueError` for anything else."""
        made = cls()
        made.rows = dict(payload.get("clients", {}))
        made.server = dict(payload.get("server", {}))
        kinds = {name: type(value) for name, value in _empty(0).items()}
        for row in made.rows.values():
            fits = {name: type(value) for name, value in row.items()} in (kinds, {**kinds, _PEER: int})
            if not (fits and list(map(type, row["rounds"])) == [int, int]):
                raise ValueError("these are not the messages of a run")
        return made

    def asked(self, ask: Ask, round: int, nbytes: int) -> None:
        """Counts an ask; `nbytes` is the total that its clients receive."""
        requests = [request for request in ask.requests if is_client(request.client)]
        if sources := {request.client for request in ask.requests if not is_client(request.client)}:
            names = {str(source).partition(":")[0] for source in sources}
            self.server[ask.op] = sorted(names.union(self.server.get(ask.op, ())))
        if not requests:
            return
        row = self._row(ask.op, round)
        row["asks"] += len(requests)
        row["bytes_down"] += nbytes
        _note(row["down"], ask.shared)
        for request in requests:
            if request.payload:
                _note(row["down"], request.payload)

    def replied(self, ask: Ask, round: int, reply: Reply) -> None:
        """Counts a reply that arrived, also one that the algorithm refuses later."""
        if not is_client(reply.client):
            return
        row = self._row(ask.op, round)
        row["replies"] += 1
        row["bytes_up"] += 0 if ask.measuring else reply.nbytes
        up = row["up"]
        for name, field in (ask.expect.fields or {}).items():
            if name not in up and (size := _announced(field)) >= 0:
                up[name] = size
        _note(up, reply.payload)
        measured = row["measured"]
        if any(name not in measured for name in reply.metrics):
            row["measured"] = sorted({*measured, *reply.metrics})

    def posted(
        self, op: str, round: int, sender: ClientId, content: Payload, sent: Mapping[str, int]
    ) -> None:
        """Counts a letter that was accepted; `sent` has its bytes by direction."""
        row = self._row(op, round)
        _note(row["up" if is_client(sender) else "down"], {LETTER + name: content[name] for name in content})
        for name, size in sent.items():
            if size:
                row[name] = row.get(name, 0) + size

    def add(self, other: Traffic) -> Traffic:
        """Adds the messages of later rounds, and returns all; `other` is not changed."""
        for op, sources in other.server.items():
            self.server[op] = sorted({*sources, *self.server.get(op, ())})
        for op, more in other.rows.items():
            row = self.rows[op] = {**self.rows.get(op, _empty(more["rounds"][0]))}
            for name in (*_COUNTS, *({_PEER} & more.keys())):
                row[name] = row.get(name, 0) + more[name]
            row["down"], row["up"] = {**more["down"], **row["down"]}, {**more["up"], **row["up"]}
            row["measured"] = sorted({*row["measured"], *more["measured"]})
            row["rounds"] = [
                min(row["rounds"][0], more["rounds"][0]),
                max(row["rounds"][1], more["rounds"][1]),
            ]
        return self

    def _row(self, op: str, round: int) -> Row:
        row = self.rows.get(op)
        if row is None:
            row = self.rows[op] = _empty(round)
        row["rounds"][1] = max(row["rounds"][1], round)
        return row


def _empty(round: int) -> Row:
    return {"down": {}, "up": {}, "measured": [], **dict.fromkeys(_COUNTS, 0), "rounds": [round, round]}


def _note(seen: dict[str, int], payload: Mapping[str, Any]) -> None:
    """Adds the fields that were not seen before, with their number of values."""
    for name in payload:
        if name not in seen:
            seen[name] = sum(_sizes(payload[name]))


def _sizes(value: Any) -> Iterable[int]:
    if isinstance(value, Tensor):
        return [value.numel()]
    if isinstance(value, Mapping):
        return (size for item in value.values() for size in _sizes(item))
    if isinstance(value, list | tuple):
        return (size for item in value for size in _sizes(item))
    return [1]


def _announced(field: AskedField) -> int:
    """The number of values of a field; -1 if only a reply tells."""
    if isinstance(field, NumberField):
        return 1
    if isinstance(field, TensorField):
        return -1 if -1 in field.shape else math.prod(field.shape)
    leaves = field.leaves.values() if isinstance(field, TreeField) else ()
    return sum(math.prod(shape) for shape, _ in leaves)
