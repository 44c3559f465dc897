"""Answers a block of requests: the part that all engines share, run where the data is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from fedlens.base.errors import HookError, one_line, told
from fedlens.base.interrupts import from_code
from fedlens.base.profiling import scope
from fedlens.core.calls import Calls, StackedOutcomes
from fedlens.core.device_copies import downloaded, uploaded
from fedlens.core.input_checks import FIRST_VISITS, Inputs, version
from fedlens.core.protocol import (
    Answer,
    BatchedOp,
    ClientId,
    Failure,
    Id,
    Letter,
    Outcome,
    Payload,
    Program,
    Reduce,
    Reply,
)
from fedlens.core.reduction import add_columns, add_reply, add_rows
from fedlens.core.schema import LETTER, Schema, column_norms, nbytes, tensors_in
from fedlens.core.stacked import StackedRow, row_of
from fedlens.core.tree import NO_NORMS, copied, leaf_norms, mapped
from fedlens.core.types import is_client

_PLAIN = (torch.Tensor, float, int, str, bytes)
# Looked up first: nearly all have one of these types, and `isinstance` is slower.
_EXACTLY = frozenset((*_PLAIN, StackedRow))


class Item(NamedTuple):
    """One request with its client's committed state."""

    id: Id
    client: ClientId
    payload: Payload
    state: Payload


class GroupAnswers(Protocol):
    """How an executor answers several clients at once; implemented by `fedlens.engines.client_groups.Groups`."""

    def answers(
        self,
        executor: Executor,
        op: str,
        shared: Payload,
        items: Sequence[Item],
        expect: Schema,
        reduce: Reduce | None = None,
        /,
    ) -> list[Answer]:
        """Answers these requests in groups; with `reduce`, the last answer of a group has its reduced payload."""
        ...


@dataclass
class Executor:
    """Runs operations: it has the program, and a cache that lives as long as the worker.

    With `groups`, operations that support it answer several clients at once. Inputs are moved to the program's device.
    Answers are moved to the CPU, unless the executor `stays` on the device. An ask whose operation sends letters is
    answered one client after the other.
    """

    program: Program
    scratch: dict[Any, Any] = field(default_factory=dict)
    groups: GroupAnswers | None = None
    stays: bool = False  # the server computes on the device, in this process
    failures: Mapping[Id, str] = field(default_factory=dict)  # requests that fail instead of running, and why

    def __post_init__(self) -> None:
        self.device = torch.device(self.program.device)
        self._shared: tuple[Payload, Payload] | None = None  # of the last ask, as received and on the device
        self._known: set[ClientId] = set()  # to whom letters may go, once looked up
        # Its tensors as received and on the device, by the id and the version of those received.
        self._sent: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        self._visits: dict[tuple[str, bool], int] = {}  # calls in which inputs are compared
        if self.device.type != "cpu":
            self.program = replace(self.program, data=self.program.data.on(self.device))

    def answer(self, op: str, shared: Payload, item: Item, expect: Schema) -> Answer:
        """Runs one operation and checks its outcome. An exception in it is a failure of the client, not of the run.

        Raises `HookError` for an operation that changes its inputs.
        """
        if item.id in self.failures:
            return Failure(item.id, item.client, self.failures[item.id])
        inputs: Inputs | None = None
        try:
            if op not in self.program.ops:
                return Failure(item.id, item.client, f"the algorithm has no operation '{op}'")
            (call,) = self._calls(shared, [item])
            call.rng.seed_torch(self.device)
            inputs = self._inputs(op, call.payload, call.client.state)
            with scope("client"):
                outcome = self.program.ops[op](*call)
            answer = self.checked(item, Outcome(*_returned(op, outcome)), expect)
        except HookError:
            raise
        except BaseException as error:  # SystemExit, GeneratorExit and others are failures of the client, too
            if not from_code(error):
                raise
            answer = Failure(item.id, item.client, told(error))
        if inputs is not None:
            inputs.refuse(f"the operation '{op}'")
        return answer

    def _inputs(self, op: str, payload: Any, state: Any, together: bool = False) -> Inputs | None:
        """The inputs of one of the first calls of an operation, to be compared after it; None for later calls."""
        visits = self._visits.get((op, together), 0)
        if visits == FIRST_VISITS:
            return None
        self._visits[op, together] = visits + 1
        return Inputs({"payload": payload, "client.state": state}, contents=True)

    def alone(self, op: str, shared: Payload, item: Item, expect: Schema) -> Answer:
        """The answer of one client, in its own memory."""
        return taken(self.answer(op, shared, item, expect))

    def together(
        self, op: str, shared: Payload, items: Sequence[Item], expect: Schema, reduce: Reduce | None = None
    ) -> list[Answer]:
        """Runs one operation for several clients as one computation, by the `together` of the operation.

        With `reduce`, the last answer has the reduced payload of all. Raises what that `together` raises.
        """
        batched = self.program.ops[op]
        assert isinstance(batched, BatchedOp)
        calls = self._calls(shared, items)
        inputs = self._inputs(op, [calls.shared, *calls.payloads], calls.states, together=True)
        with scope("client"):
            outcomes = _returned(op, batched.together(calls))
        if inputs is not None:
            inputs.refuse(f"the operation '{op}'")
        if isinstance(outcomes, StackedOutcomes):
            with scope("client.check"):
                good = expect.admits(outcomes.metrics) and all(
                    expect.passing(outcomes.payload, len(outcomes))
                )
            if good:
                return _replies(items, outcomes, reduce)
        # On a GPU, one synchronization for the values of all replies; the norms of rows are known.
        replies = [o for o in outcomes if isinstance(o, Outcome) and isinstance(o.payload, dict)]
        values = [
            value
            for o in replies
            for value in (*o.payload.values(), o.state)
            if type(value) is not StackedRow
        ]
        tensors = tensors_in(values)  # kept while `known` is used, because ids of freed tensors are reused
        known = leaf_norms(tensors)
        answers: list[Answer] = [
            Failure(item.id, item.client, told(outcome))
            if isinstance(outcome, BaseException)
            else self.checked(item, outcome, expect, known)
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        return answers if reduce is None else reduced(answers, reduce)

    def _calls(self, shared: Payload, items: Sequence[Item]) -> Calls:
        ids, clients, payloads, states = zip(*items, strict=True)
        if self.device.type != "cpu":
            payloads, states = uploaded((payloads, states), self.device)
        return Calls(
            self.program, self.device, self.scratch, self._brought(shared), ids, clients, payloads, states
        )

    def _brought(self, shared: Payload) -> Payload:
        """The shared part of an ask on the device; moved once per ask, and once for a model evaluated and then sent."""
        if self.device.type == "cpu":
            return shared
        if self._shared is None or self._shared[0] is not shared:
            known = mapped(shared, lambda t: self._sent.get((id(t), version(t)), (t, t))[1])
            self._shared = shared, uploaded(known, self.device)
            pairs = zip(tensors_in(shared), tensors_in(self._shared[1]), strict=True)
            self._sent = {(id(came), version(came)): (came, there) for came, there in pairs}
        return self._shared[1]

    def block(
        self,
        op: str,
        shared: Payload,
        items: Sequence[Item],
        expect: Schema,
        reduce: Reduce | None,
        alone: bool = False,
    ) -> list[Answer]:
        """Answers neighbouring slots; with `reduce`, the last answer of each block has its reduced payload.

        `alone` answers one client after the other even if there are groups.
        """
        grouped = self.groups if expect.letter is None and not alone else None
        if grouped is not None and isinstance(self.program.ops.get(op), BatchedOp):
            # Groups are also reduced together: their last bits differ from those of single clients anyway.
            return [self._home(a) for a in grouped.answers(self, op, shared, items, expect, reduce)]
        # A generator: each operation may reuse the memory of the answer before.
        many = (self.answer(op, shared, item, expect) for item in items)
        if reduce is None:
            return [self._home(answer if len(items) == 1 else taken(answer)) for answer in many]
        answers: list[Answer] = []
        for start in range(0, len(items), reduce.block):
            block = islice(many, len(items[start : start + reduce.block]))
            answers += map(self._home, reduced(block, reduce))
        return answers

    def _home(self, answer: Answer) -> Answer:
        """The answer with its tensors on the CPU, or unchanged if they stay on the device."""
        if self.device.type == "cpu" or self.stays:
            return answer
        if isinstance(answer, Failure):
            answer.reduced = downloaded(answer.reduced)
        else:  # all at once: one synchronization
            parts = answer.payload, answer.state, answer.reduced, answer.letters
            answer.payload, answer.state, answer.reduced, answer.letters = downloaded(parts)
        return answer

    def checked(
        self, item: Item, outcome: Outcome, expect: Schema, known: Mapping[int, float] = NO_NORMS
    ) -> Answer:
        """The reply, or a failure if something about it is invalid."""
        try:
            with scope("client.check"):
                metrics = {name: float(value) for name, value in outcome.metrics.items()}
                fault, norms = expect.check(outcome.payload, outcome.state, known)
                fault = fault or _fault(outcome) or expect.metric_fault(metrics)
                letters: list[tuple[tuple[ClientId, ...], Payload]] = []
                if fault is None and outcome.letters:
                    fault, letters, norms = self._letters(outcome.letters, expect, norms)
                donated = frozenset(outcome.donated)
        except BaseException as error:  # a reply may be of any class, with methods that raise
            if not from_code(error):
                raise
            return Failure(item.id, item.client, told(error))
        if fault is not None:
            return Failure(item.id, item.client, one_line(fault))
        size = nbytes(outcome.payload)
        reply = Reply(item.id, item.client, outcome.payload, metrics, outcome.state, size, donated=donated)
        reply.norms, reply.letters = norms, letters
        return reply

    def _letters(
        self, letters: Sequence[Letter], expect: Schema, norms: dict[str, float]
    ) -> tuple[str | None, list[tuple[tuple[ClientId, ...], Payload]], dict[str, float]]:
        """What is wrong with the first bad letter, or None; the letters; and `norms` with their largest ones."""
        if expect.letter is None:
            return (
                "it sends a letter, and the ask expects none: set `letter` of the Ask to its schema",
                [],
                norms,
            )
        typical = {
            name.removeprefix(LETTER): norm
            for name, norm in expect.typical.items()
            if name.startswith(LETTER)
        }
        schema = replace(expect.letter, typical=typical)
        sent: list[tuple[tuple[ClientId, ...], Payload]] = []
        for to, content in letters:
            addressees = to if isinstance(to, tuple) else (to,)
            unknown = next((client for client in addressees if not self._knows(client)), None)
            if unknown is not None:
                return f"its letter goes to {unknown!r}, which is no client", [], norms
            fault, found = schema.check(content)
            if (fault := fault or foreign(content, "the content")) is not None:
                return f"its letter to {', '.join(map(str, addressees))}: {fault}", [], norms
            for name, norm in found.items():
                norms[LETTER + name] = max(norm, norms.get(LETTER + name, 0.0))
            sent.append((addressees, content))
        return None, sent, norms

    def _knows(self, client: Any) -> bool:
        """Whether a letter may go to this client."""
        named = not is_client(client) or (type(client) is int and client >= 0)
        if named and client not in self._known:
            try:
                self.program.data_of(client)
            except LookupError:
                return False
            self._known.add(client)
        return named


def _returned(op: str, outcome: Any) -> Any:
    if outcome is None:
        raise TypeError(
            f"the operation '{op}' returned None: end it with return Outcome(payload, state, metrics)"
        )
    return outcome


def _replies(items: Sequence[Item], outcomes: StackedOutcomes, reduce: Reduce | None) -> list[Answer]:
    """The replies of outcomes that are all valid; with `reduce`, the last one has their sum."""
    columns, rows = outcomes.payload, outcomes.rows
    size = nbytes(row_of(columns, rows[0]))  # the same for all
    removed = reduce.fields if reduce and not reduce.keep else ()
    kept = {name: column for name, column in columns.items() if name not in removed}
    norms = column_norms(columns, len(rows))
    replies: list[Answer] = [
        Reply(
            item.id,
            item.client,
            row_of(kept, row),
            {name: float(values[row]) for name, values in outcomes.metrics.items()},
            None,
            size,
            norms=norms[row],
        )
        for item, row in zip(items, rows, strict=True)
    ]
    if reduce is not None:
        total: dict[str, Any] = {}
        replies[-1].reduced = total
        with scope("aggregate"):
            add_columns(total, reduce, columns, rows)
    return replies


def _fault(outcome: Outcome) -> str | None:
    """What is wrong with a reply apart from its schema."""
    fault = foreign(outcome.payload)
    state: Any = outcome.state
    if fault is None and state is not None:
        if not isinstance(state, Mapping):
            return f"its state is a {type(state).__name__}, not a mapping"
        fault = foreign(state, "its state")
    return fault


def foreign(value: Any, name: str = "the payload") -> str | None:
    """What in `value` cannot be part of a payload, as a sentence. Every engine refuses it, even without sending.

    >>> foreign({"model": {"w": torch.ones(1)}, "sizes": [1, {2}]})
    'the payload.sizes holds a set, which cannot be sent'
    """
    if value is None or type(value) in _EXACTLY or isinstance(value, _PLAIN):
        return None
    if isinstance(value, dict | Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            if type(item) not in _EXACTLY and (fault := foreign(item, f"{name}.{key}")) is not None:
                return fault
        return None
    if isinstance(value, list | tuple):
        return next(filter(None, (foreign(item, name) for item in value)), None)
    kind = f"a {type(value).__name__}" + (
        " with keys that are no strings" if isinstance(value, Mapping) else ""
    )
    return f"{name} holds {kind}, which cannot be sent"


def taken(answer: Answer) -> Answer:
    """The answer with copies of all tensors that the operation has not donated (`fedlens.core.tree`)."""
    if not isinstance(answer, Failure):
        answer.payload = {
            name: value if name in answer.donated else copied(value) for name, value in answer.payload.items()
        }
        answer.state, answer.letters = copied((answer.state, answer.letters))
    return answer


class Reduction:
    """A block of replies, summed in the order given."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.total: dict[str, Any] = {}
        self.rows: list[Payload] = []

    def take(self, answer: Answer) -> Answer:
        """Adds the trees of a reply to the total and, without `keep`, removes them from it; failures are unchanged."""
        if isinstance(answer, Failure):
            return answer
        # Copied, because the next operation of the block may reuse the memory of this answer.
        rest = {
            name: value if type(value) is float else copied(value)
            for name, value in answer.payload.items()
            if self.reduce.keep or name not in self.reduce.fields
        }
        left = Reply(
            answer.id,
            answer.client,
            rest,
            answer.metrics,
            copied(answer.state),
            answer.nbytes,
            norms=answer.norms,
            letters=copied(answer.letters),
        )
        if any(type(answer.payload.get(name)) is StackedRow for name in self.reduce.fields):
            self.rows.append(answer.payload)  # the memory of a group's rows is not reused
        else:
            # After the copies: donated trees are changed in place.
            with scope("aggregate"):
                add_reply(self.total, self.reduce, answer.payload, donated=answer.donated)
        return left

    def result(self) -> Payload | None:
        """The reduced payload; None if every reply of the block failed."""
        if self.rows:
            with scope("aggregate"):
                add_rows(self.total, self.reduce, self.rows)
            self.rows = []
        return self.total or None


def reduced(answers: Iterable[Answer], reduce: Reduce) -> list[Answer]:
    """The answers of a block without the reduced fields; the last answer has their total."""
    total = Reduction(reduce)
    kept = [total.take(answer) for answer in answers]
    kept[-1].reduced = total.result()
    return kept
