"""Base class of engines: optional members, each with a default."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedlens.base.signatures import check_methods, offers_all
from fedlens.core.protocol import (
    Answer,
    Ask,
    ClientDataSource,
    ClientId,
    ClientStates,
    Engine,
    Op,
    Payload,
    Program,
    Tree,
    Trial,
)
from fedlens.core.states import STATE_MEMORY
from fedlens.core.step_counts import StepCount


@dataclass(frozen=True)
class EngineWork:
    """What an engine may know of a run before it starts.

    Attributes:
        ops: the operations of the algorithm.
        data: the data of clients and server.
        clients: the clients with data.
        cohort: how many train in a round; None if there is no cohort and they train one after the other.
        rounds: of the whole run.
        images: about how many images it trains on, counting each use of an image.
        trial: gives plain training of this number of steps, to time.
    """

    ops: Mapping[str, Op]
    data: ClientDataSource
    clients: Sequence[ClientId]
    cohort: int | None
    rounds: int
    images: float
    trial: Callable[[int], Trial]


class EngineBase(Engine):
    """Base class of engines: optional methods, each with a default.

    An engine of your own may inherit from it too. A class with only the three methods of `Engine` is wrapped in
    `BareEngine` where it is made, so that all users of an engine may call everything below.

    Attributes:
        ahead: whether asks may be sent before their answers are read (`processes`, `ray`, and `default` once its
            workers run). The runner can then evaluate during the next round, if set.
        state_memory: maximum MiB of client states that the runner keeps in memory.
        table: the settings that replace the request in the run's config.toml, once `choose` has returned (`auto`);
            None keeps the request.
        states_at_sites: whether clients keep their states themselves (`network`), so that the server has handles alone.
    """

    ahead: bool = False
    state_memory: int = STATE_MEMORY
    table: Mapping[str, Any] | None = None
    states_at_sites: bool = False

    @property
    def local_steps(self) -> StepCount | None:
        """The local steps taken in this process (`inline`); None if clients train in workers."""
        return None

    def warm(self) -> None:
        """Starts workers in the background, before the data are read (`processes`, `ray`)."""

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` if this machine or these operations do not support the settings."""

    def choose(self, work: EngineWork) -> str | None:
        """Chooses open settings before the run (`auto`). Returns one line for the user, or None."""
        return None

    def resume(self, done: int, rounds: int) -> None:
        """Receives, before `open`, the number of rounds that an earlier process finished (`default`)."""

    def listen(self, tell: Callable[[str | None, Mapping[str, Any]], None]) -> None:
        """Receives, before `open`, a function that reports a choice made during the run (`default`).

        The function takes one line for the user, or None, and the choice as stored in environment.json.
        """

    def online(self) -> Sequence[int] | None:
        """The clients that can be asked now, before a round (`network`); None for all.

        May wait for clients, and raises `RunFailed` if too few come. The run can be resumed.
        """
        return None

    def keep(self, handles: Mapping[ClientId, Collection[str]]) -> None:
        """Receives the handles of each client's states in checkpoints; it may delete others (`network`)."""

    def too_few(self, replied: Collection[ClientId], failed: int) -> str | None:
        """Why a round in which these clients took part, and `failed` others did not, is skipped; None if it counts.

        Only where clients are at sites (`network`).
        """
        return None

    def place(self, tree: Tree) -> Tree:
        """The same tree in memory that this engine can send without a copy (`processes`), or the tree itself."""
        return tree

    def on_device(self, state: Payload) -> Payload:
        """The server's state on the GPU of this engine, where answers then stay too (`inline`), or the state itself.

        Called before each round if the algorithm `follows_device`. Otherwise answers are on the CPU.
        """
        return state

    def applied(self, program: Program) -> Program:
        """The program with this engine's device and number format; used by the profiler."""
        return program


@dataclass
class BareEngine(EngineBase):
    """An engine with only the three methods of `Engine`; the others have their defaults."""

    engine: Engine

    @classmethod
    def wrap(cls, engine: Engine) -> EngineBase:
        """The engine itself if it inherits from `EngineBase` or forwards to one that does, else wrapped.

        Raises `ConfigError` if it has only some members of `EngineBase`.
        """
        check_methods(engine, "engine")
        if offers_all(engine, "engine", EngineBase, Engine):
            return cast("EngineBase", engine)
        return cls(engine)

    def open(self, program: Program, states: ClientStates) -> None:
        """Opens the engine."""
        self.engine.open(program, states)

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask."""
        return self.engine.answer(ask, round, exchange)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()
