"""The base of engines that pass the work to another engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, ClientDataSource, ClientId, ClientStates, Op, Payload, Program
from fedlens.core.step_counts import StepCount
from fedlens.core.tree import Tree


class Forwarding(EngineBase):
    """Passes every call to its `engine`; only `table` and `state_memory` are its own."""

    engine: EngineBase

    @property
    def ahead(self) -> bool:  # type: ignore[override]
        """Whether the engine takes asks ahead."""
        return self.engine.ahead

    @property
    def local_steps(self) -> StepCount | None:
        """The local steps that the engine counts in this process."""
        return self.engine.local_steps

    def warm(self) -> None:
        """Warms the engine."""
        self.engine.warm()

    def check(self, ops: Mapping[str, Op]) -> None:
        """Checks the operations as the engine does."""
        self.engine.check(ops)

    def choose(
        self,
        ops: Mapping[str, Op],
        data: ClientDataSource,
        clients: Sequence[ClientId],
        cohort: int | None,
        images: float,
    ) -> str | None:
        """Lets the engine choose."""
        return self.engine.choose(ops, data, clients, cohort, images)

    def resume(self, done: int, rounds: int) -> None:
        """Passes on how many rounds are done."""
        self.engine.resume(done, rounds)

    def listen(self, tell: Callable[[str | None, Mapping[str, Any]], None]) -> None:
        """Passes on the listener."""
        self.engine.listen(tell)

    def place(self, tree: Tree) -> Tree:
        """The tree in the engine's memory."""
        return self.engine.place(tree)

    def on_device(self, state: Payload) -> Payload:
        """The state where the engine computes."""
        return self.engine.on_device(state)

    def applied(self, program: Program) -> Program:
        """The program as the engine computes it."""
        return self.engine.applied(program)

    @property
    def running(self) -> EngineBase:
        """The engine that answers."""
        return self.engine.running

    def open(self, program: Program, states: ClientStates) -> None:
        """Opens the engine."""
        self.engine.open(program, states)

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers with the engine."""
        return self.engine.answer(ask, round, exchange)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()
