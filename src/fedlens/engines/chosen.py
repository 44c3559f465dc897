"""The base of engines that choose another engine before the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any

from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, ClientStates, Op, Payload, Program
from fedlens.core.states import STATE_MEMORY
from fedlens.core.tree import Tree
from fedlens.core.work import StepCount
from fedlens.engines.devices import ON_CPU, Computing
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import vectorized

KNOWN: dict[str, Callable[..., EngineBase]] = {
    "inline": inline, "vectorized": vectorized, "processes": processes,
}  # fmt: skip


class Chosen(EngineBase):
    """Is another engine: `inline`, until `choose` takes one. The run's config.toml gets the settings of that one.

    Args:
        settings: more settings, for the engines that have them.
    """

    def __init__(
        self,
        state_memory: int = STATE_MEMORY,
        computing: Computing = ON_CPU,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.common = {"device": computing.device, "precision": computing.precision, **(settings or {})}
        self.state_memory, self.computing = state_memory, computing
        self._take("inline", {}, "")

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` where this machine has no such device, or the device no such precision."""
        self.computing.check()

    def _take(self, name: str, table: Mapping[str, Any], why: str) -> str:
        """Takes this engine; returns one line with the choice and the reason."""
        defaults = {key: p.default for key, p in inspect.signature(KNOWN[name]).parameters.items()}
        given = {**self.common, **table, "state_memory": self.state_memory}
        given = {key: value for key, value in given.items() if key in defaults}
        self.chosen = KNOWN[name](**given)
        self.ahead = self.chosen.ahead
        # A setting that is None is left unset: TOML has no such value.
        self.table = {"name": name, **{k: v for k, v in {**defaults, **given}.items() if v is not None}}
        return f"engine: {name} ({why})"

    @property
    def local_steps(self) -> StepCount | None:
        """The local steps taken in this process, if clients train in it at the moment."""
        return self.running.local_steps

    def on_device(self, state: Payload) -> Payload:
        """The state where the engine that was chosen computes."""
        return self.chosen.on_device(state)

    def applied(self, program: Program) -> Program:
        """The program as the chosen engine computes it."""
        return self.chosen.applied(program)

    def place(self, tree: Tree) -> Tree:
        """The tree in the memory of the engine that was chosen."""
        return self.running.place(tree)

    @property
    def running(self) -> EngineBase:
        """The chosen engine."""
        return self.chosen

    def open(self, program: Program, states: ClientStates) -> None:
        """Opens the chosen engine."""
        self.chosen.open(program, states)

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers with the chosen engine."""
        return self.chosen.answer(ask, round, exchange)

    def close(self) -> None:
        """Closes the chosen engine."""
        self.chosen.close()
