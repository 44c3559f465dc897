"""What the five fixtures share: a tiny federation, both engines, and a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientDataSource, ClientStates, Op, Program
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes

ENGINES: dict[str, Callable[[], Any]] = {"inline": inline, "processes": lambda: processes(workers=2)}


@dataclass(frozen=True)
class Points(ClientDataSource):
    """Linear regression at every client: inputs [n, d] and targets [n], its own slope and scale."""

    clients: int = 4
    examples: int = 16
    features: int = 3
    shifted: bool = True  # each client's inputs stand elsewhere, targets as if they did not

    def data_of(self, client: int | str) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(99 if isinstance(client, str) else int(client))
        x = torch.randn(self.examples, self.features, generator=g, dtype=torch.float64)
        shift = float(client) if self.shifted and not isinstance(client, str) else 0.0
        return x + shift, x @ torch.arange(1.0, self.features + 1, dtype=torch.float64)


@contextmanager
def gate(engine: str, ops: Mapping[str, Op], data: Any = None, seed: int = 0) -> Iterator[Driver]:
    """A gate over an open engine."""
    made, states = ENGINES[engine](), ClientStates()
    made.open(Program(ops, data or Points(), seed), states)
    try:
        yield Driver(made, states)
    finally:
        made.close()
