"""The calls of several clients to one operation, and their outcomes, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from fedlens.core.protocol import Call, Client, Id, Outcome, Payload, Program
from fedlens.core.random import Rng
from fedlens.core.stacked import Column, row_of
from fedlens.core.types import ClientId


@dataclass(frozen=True)
class Calls(Sequence[Call]):
    """The calls of A clients to one operation. Each `Call` is made when it is read.

    An operation that needs no objects of single clients reads the columns.

    Args:
        program: gives the data, the seed and the arithmetic.
        device: where the operation runs; `shared`, `payloads` and `states` are there.
        scratch: the cache of the worker.
        shared: the part of the payload that is the same in all calls.
        ids: the requests, A of them.
        clients: the clients' ids.
        payloads: the part of the payload that is each client's own.
        states: the clients' states.

    >>> from fedlens.core.protocol import ClientDataSource
    >>> class Numbers(ClientDataSource):
    ...     def data_of(self, client): return [client]
    >>> calls = Calls(
    ...     Program({}, Numbers(), seed=0), torch.device("cpu"), {}, {"lr": 0.1},
    ...     ids=[Id(1, 0, 0), Id(1, 0, 1)], clients=[7, 3], payloads=[{}, {"work": 2}], states=[{}, {}],
    ... )
    >>> calls[1].payload, calls[1].client.data
    ({'lr': 0.1, 'work': 2}, [3])
    """

    program: Program
    device: torch.device
    scratch: dict[Any, Any]
    shared: Payload
    ids: Sequence[Id]
    clients: Sequence[ClientId]
    payloads: Sequence[Payload]
    states: Sequence[Payload]

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> Call: ...
    @overload
    def __getitem__(self, at: slice) -> list[Call]: ...
    def __getitem__(self, at: int | slice) -> Call | list[Call]:
        """One call, or a list of them. Raises what reading the client's data raises."""
        if isinstance(at, slice):
            return [self[k] for k in range(len(self))[at]]
        client = Client(
            id=self.clients[at],
            data=self.program.data_of(self.clients[at]),
            state=self.states[at],
            secrets=self.program.secrets_of(self.clients[at]),
            scratch=self.scratch,
            device=self.device,
            arithmetic=self.program.arithmetic,
        )
        return Call({**self.shared, **self.payloads[at]}, client, self.rng(at))

    def only(self, places: Sequence[int], ids: Sequence[Id]) -> Calls:
        """The calls at these places, with the randomness of other requests."""
        return replace(
            self,
            ids=ids,
            clients=[self.clients[at] for at in places],
            payloads=[self.payloads[at] for at in places],
            states=[self.states[at] for at in places],
        )

    def rng(self, at: int) -> Rng:
        """The randomness of one call."""
        return Rng.of_operation(self.program.seed, *self.ids[at], self.clients[at])


class StackedOutcomes(Sequence[Outcome]):
    """The outcomes of A clients, in the order of their calls. Each `Outcome` is made when it is read.

    An executor reads the columns: it checks, counts and sums all clients at once.

    Args:
        payload: the fields of the payloads; see `fedlens.core.stacked.Column`.
        metrics: the numbers of the clients, by name, A each.
        rows: the row of each call in the columns.

    >>> outcomes = StackedOutcomes({"weight": [3.0, 5.0], "buffers": {}}, {"batches": [1.0, 2.0]}, [1, 0])
    >>> outcomes[0].payload, outcomes[0].metrics
    ({'weight': 5.0, 'buffers': {}}, {'batches': 2.0})
    """

    def __init__(
        self, payload: Mapping[str, Column], metrics: Mapping[str, Sequence[float]], rows: Sequence[int]
    ) -> None:
        self.payload, self.metrics, self.rows = payload, metrics, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> list[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | list[Outcome]:
        if isinstance(at, slice):
            return [self[k] for k in range(len(self))[at]]
        row = self.rows[at]
        return Outcome(
            row_of(self.payload, row), None, {name: values[row] for name, values in self.metrics.items()}
        )
