"""Verifies an engine: computes some clients of every ask again, like `inline`, and compares the replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.core.device_copies import downloaded
from fedlens.core.engine_base import BareEngine, EngineBase, EngineWork
from fedlens.core.protocol import (
    Answer,
    Ask,
    ClientId,
    ClientStates,
    Failure,
    Id,
    Op,
    Payload,
    Program,
)
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.schema import tensors_in
from fedlens.core.states import Version
from fedlens.core.step_counts import StepCount
from fedlens.core.tree import Tree
from fedlens.core.types import is_client
from fedlens.engines.executor import Executor, Item
from fedlens.engines.schedule import primed

TOLERANCE = 1e-2  # relative to a tensor's norm, if clients are computed together or on GPUs
_SMALL = 1e-3  # of the reply's norm, added to a tensor's, because a tensor may be rounding errors only
Verify = Annotated[
    int,
    Field(
        ge=0,
        description="clients of each exchange that are computed again as by `inline`, and compared; 0 for none. For "
        "operations of your own",
    ),
]


class Forwarding(BareEngine):
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

    def choose(self, work: EngineWork) -> str | None:
        """Lets the engine choose."""
        return self.engine.choose(work)

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


class Verified(Forwarding):
    """An engine whose replies are partly compared with those of the reference.

    The reference has its own executor and cache. It reads the client states of the time of the ask, and leaves the
    global random generators unchanged, so the results of the run stay the same. If workers sum replies, the clients are
    asked again without the sum, under an unused exchange number.

    Args:
        engine: the engine.
        count: how many clients of each ask are compared.
        exact: whether the engine promises the bits of the reference.
    """

    def __init__(self, engine: EngineBase, count: int, exact: bool) -> None:
        self.engine, self.count, self.exact = engine, count, exact
        self.state_memory = engine.state_memory

    def open(self, program: Program, states: ClientStates) -> None:
        """Opens the engine and the reference."""
        self.engine.open(program, states)
        applied = self.engine.applied(program)
        # If this process cannot use the workers' GPUs, the reference computes on the CPU.
        here = applied.device == "cpu" or torch.cuda.is_available()
        self._reference = Executor(applied if here else replace(applied, device="cpu"))
        self._exact = self.exact and applied.device == "cpu"
        self._states, self._seed = states, program.seed

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """The engine's answers. Raises `HookError` if one of them differs from the reference."""
        slots = self._drawn(ask, round, exchange)
        held = {slot: self._states.hold(ask.requests[slot].client) for slot in slots}
        return primed(self._compared(ask, round, exchange, held, self.engine.answer(ask, round, exchange)))

    def _drawn(self, ask: Ask, round: int, exchange: int) -> list[int]:
        """The slots of the clients to compare, drawn from the seed; data at the server is left out."""
        slots = [slot for slot, request in enumerate(ask.requests) if is_client(request.client)]
        draw = Rng((self._seed, "verify", round, exchange)).numpy("clients")
        return sorted(int(at) for at in draw.choice(slots, min(self.count, len(slots)), replace=False))

    def _compared(
        self,
        ask: Ask,
        round: int,
        exchange: int,
        held: dict[int, Version],
        answers: Generator[Answer, None, None],
    ) -> Generator[Any, None, None]:
        again = ask.reduce is not None
        left = len(ask.requests)
        try:
            yield None  # taken by `primed`
            for answer in answers:
                mine = answer.id[:2] == (round, exchange) and answer.id.slot in held
                if mine and not again:
                    self._compare(ask, answer, held[answer.id.slot])
                left -= 1
                if again and not left:
                    # Before the last answer: then states may change.
                    self._ask_again(ask, round, exchange, held)
                yield answer
                del answer
        finally:
            answers.close()
            while held:
                self._states.release(held.popitem()[1])

    def _ask_again(self, ask: Ask, round: int, exchange: int, held: Mapping[int, Version]) -> None:
        slots = list(held)
        single = replace(ask, requests=[ask.requests[slot] for slot in slots], reduce=None)
        for answer in self.engine.answer(single, round, -1 - exchange):
            self._compare(single, answer, held[slots[answer.id.slot]])

    def _compare(self, ask: Ask, answer: Answer, state: Version) -> None:
        request = ask.requests[answer.id.slot]
        item = Item(answer.id, request.client, request.payload, self._states.read(state))
        with self._reference.program.computing(), random_state_kept(self._reference.device):
            expected = self._reference.block(ask.op, ask.shared, [item], ask.expect, None)[0]
        if isinstance(expected, Failure) or isinstance(answer, Failure):
            if type(expected) is not type(answer):
                raise self._differs(
                    ask,
                    answer.id,
                    answer.client,
                    f"{_outcome(answer)}, but {_outcome(expected)} with 'inline'",
                )
            return
        scale = None if self._exact else _norm(expected.payload)
        payload, proposed, letters = downloaded((answer.payload, answer.state, answer.letters))
        worst = difference("reply", payload, expected.payload, scale)
        worst = worst or difference("state", proposed, expected.state, scale)
        worst = worst or difference("letters", list(letters), list(expected.letters), scale)
        if worst:
            raise self._differs(ask, answer.id, answer.client, worst)

    def _differs(self, ask: Ask, id: Id, client: ClientId, what: str) -> HookError:
        promise = "to the bit" if self._exact else f"to {TOLERANCE:g} of the norm"
        return HookError(
            f"client {client} differs from 'inline' in round {id.round}, operation '{ask.op}': {what}; they must agree "
            f"{promise}",
            where="engine.verify",
            hint="an operation must depend on its payload, client.data, client.state and rng alone",
        )

    @property
    def table(self) -> Mapping[str, Any] | None:  # type: ignore[override]
        """The settings that the engine has chosen, with `verify` if the chosen engine has this setting."""
        table = self.engine.table
        return table if table is None or table["name"] == "inline" else {**table, "verify": self.count}


def verified(engine: EngineBase, count: int, exact: bool) -> EngineBase:
    """The engine, compared with the reference at `count` clients of each ask; the engine itself for 0."""
    return Verified(engine, count, exact) if count else engine


def difference(name: str, here: Any, there: Any, scale: float | None) -> str:
    """The first difference of two payloads in words, with its largest distance; empty if there is none.

    Args:
        name: what errors call the payload.
        here, there: what the engine computed, and the reference.
        scale: the norm of the whole payload; tensors may differ by rounding then. None compares bits.

    >>> difference("reply", {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])}, None)
    "reply['w'] differs by up to 0.5"
    >>> difference("reply", {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.001])}, 1.0)
    ''
    """
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        if set(here) != set(there):
            return f"{name} has {sorted(here)}, but {sorted(there)} with 'inline'"
        return next(
            filter(None, (difference(f"{name}[{key!r}]", here[key], there[key], scale) for key in there)), ""
        )
    if isinstance(here, list | tuple) and isinstance(there, list | tuple) and len(here) == len(there):
        pairs = enumerate(zip(here, there, strict=True))
        return next(filter(None, (difference(f"{name}[{at}]", a, b, scale) for at, (a, b) in pairs)), "")
    numbers = isinstance(here, int | float) and isinstance(there, int | float)
    if numbers and scale is not None:
        here, there = torch.tensor(float(here)), torch.tensor(float(there))
    if not isinstance(here, Tensor) or not isinstance(there, Tensor):
        return "" if here == there or here is there else f"{name} is {here!r}, and {there!r} with 'inline'"
    if here.shape != there.shape or here.dtype != there.dtype:
        return (
            f"{name} is {here.dtype} {list(here.shape)}, but {there.dtype} {list(there.shape)} with 'inline'"
        )
    if torch.equal(here, there):
        return ""
    gap = (here.double() - there.double()).abs().nan_to_num(torch.inf)
    near = scale is not None and float(gap.norm()) <= TOLERANCE * (
        float(there.double().norm()) + _SMALL * scale
    )
    return "" if near else f"{name} differs by up to {float(gap.max()):.3g}"


def _norm(payload: Payload | None) -> float:
    """The norm of all tensors of a payload."""
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors_in(payload)))


def _outcome(answer: Answer) -> str:
    return f"it failed ({answer.reason})" if isinstance(answer, Failure) else "it replied"
