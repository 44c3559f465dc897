"""The seam: an algorithm asks, an engine answers, and neither knows the other.

An algorithm's round is a generator of `Ask`s; whoever drives it sends back an iterator of answers, and its return
value is the new state of the server. An engine answers asks, in this process, in others, or on other machines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedlens.core.arithmetic import PLAIN, Arithmetic
from fedlens.core.random import Rng, Secrets
from fedlens.core.schema import Schema
from fedlens.core.states import ClientStates
from fedlens.core.tree import Tree, TreeSpec
from fedlens.core.types import ClientId, Metrics, Payload


class Id(NamedTuple):
    """Which request an answer belongs to. It is answered once."""

    round: int
    exchange: int
    slot: int


@dataclass(frozen=True)
class Request:
    """One client's part of an ask: who, and what differs from client to client."""

    client: ClientId
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Reduce:
    """Fold the replies of `block` neighbouring slots where the work ran, so that one tree crosses, not `block`.

    `fields` maps a payload name to how its trees (or numbers) are folded: `"sum"` adds them, each times the reply's
    `weight` field; `"plain"` adds them as they are; `"max"` takes the largest value leaf by leaf. The folded payload
    also holds the sum of the weights, and how many `replies` it is made of. It stands in `folded` of the block's last
    answer; the folded names are gone from the replies themselves. The tree of additions depends on the slots alone,
    so every engine gets the same bits.
    """

    fields: Mapping[str, Literal["sum", "plain", "max"]]
    weight: str = "weight"
    block: int = 1


@dataclass(frozen=True)
class Ask:
    """One exchange: one operation, asked of several clients.

    Attributes:
        op: which of the algorithm's operations.
        requests: one for each slot; a client may appear twice and is told apart by its slot.
        shared: what is the same for all; it is sent once a worker or node, not once a client.
        expect: what a good reply has; a reply that has not becomes a `Failure` before it is folded.
        order: `"request"` gives the answers in the order of the slots, the same sum on every engine. `"arrival"`
            gives them as they come, those of earlier arrival asks that are still out among them.
        deadline: seconds after which what is still out becomes a `Failure`.
        reduce: fold where the work ran (request order only).
    """

    op: str
    requests: Sequence[Request]
    shared: Payload = field(default_factory=dict)
    expect: Schema = field(default_factory=Schema)
    order: Literal["request", "arrival"] = "request"
    deadline: float | None = None
    reduce: Reduce | None = None

    def __post_init__(self) -> None:
        if self.reduce is not None and self.order == "arrival":
            raise ValueError(
                "an ask in arrival order cannot be reduced, because its blocks would depend on the order of the replies"
            )


@dataclass
class Reply:
    """A client's answer. Its proposed state is committed when the algorithm has taken it, unless it was refused.

    `allocate` is set by an engine that has memory from which it sends without a copy: it returns an uninitialized tree
    like its argument, in that memory. A sum that becomes the next model is best computed there. `norms` has the
    Euclidean norms of the payload's trees, also of those that were folded.
    """

    id: Id
    client: ClientId
    payload: Payload
    metrics: Metrics = field(default_factory=dict)
    state: Payload | None = None
    nbytes: int = 0
    folded: Payload | None = None
    refused: str | None = None
    given: frozenset[str] = frozenset()  # see `Outcome`
    allocate: Callable[[Tree], dict[str, Tensor]] | None = field(default=None, compare=False, repr=False)
    norms: Mapping[str, float] = field(default_factory=dict, repr=False)

    def refuse(self, reason: str) -> None:
        """Turns the reply down after a look at it: the client's state stays as it was, and the run counts it.

        Under `reduce` its tree is folded already, so there the schema alone decides.
        """
        self.refused = reason


@dataclass
class Failure:
    """What stands in place of a reply that did not come or was not good."""

    id: Id
    client: ClientId
    reason: str
    folded: Payload | None = None


Answer = Reply | Failure
Answers = Iterator[Answer]


class Outcome(NamedTuple):
    """What an operation returns: what is sent, the client's new state (None: unchanged), and numbers to log.

    Metrics are sums over the client's work, so that they add up: `loss` summed over `examples`, and `batches`. `given`
    names the fields of the payload whose tensors the operation gives away, so that they need not be copied; see
    "Ownership" in `fedlens.core.tree`.
    """

    payload: Payload
    state: Payload | None = None
    metrics: Mapping[str, float] = {}
    given: frozenset[str] = frozenset()


@dataclass
class Client:
    """What an operation finds at home; none of it leaves unless the operation sends it.

    `scratch` is a cache that lives as long as the worker, shared by its clients: results must not depend on it.
    """

    id: ClientId
    data: Any
    state: Payload
    secrets: Secrets
    scratch: dict[Any, Any]
    device: torch.device
    arithmetic: Arithmetic = PLAIN


class Op(Protocol):
    """An operation at a client: pure but for `client.scratch`; it leaves its inputs untouched.

    The payload holds the names of `Ask.shared` and of `Request.payload` together.
    """

    def __call__(self, payload: Payload, client: Client, rng: Rng, /) -> Outcome: ...


class Call(NamedTuple):
    """What an operation is called with, where several calls are made at once."""

    payload: Payload
    client: Client
    rng: Rng


class Obstacle(NamedTuple):
    """Why an operation cannot answer several calls as one: what is wrong, the setting, and what to do."""

    what: str
    where: str
    hint: str


class Trial(NamedTuple):
    """A short piece of an operation's work, which an engine times to compare ways of computing it."""

    op: BatchedOp
    shared: Payload
    convolutions: bool  # whether the model has any, so that a memory layout is worth trying
    layout: bool = False  # whether `channels_last = "auto"` applies to them where the processor gains from it


@runtime_checkable
class BatchedOp(Op, Protocol):
    """An operation that can also answer several calls as one computation; the engine picks the form.

    Offered by `fedlens.local.vectorized.batched_train` and `fedlens.algorithms.full_gradients`; used by the engines
    that compute clients in groups, and by `auto`. An operation without it is answered one call after the other.
    """

    def together(self, calls: Sequence[Call], /) -> Sequence[Outcome | BaseException]:
        """The outcome of each call, or the exception that is that client's own; raises what is no client's own.

        `fedlens.core.outcomes.StackedOutcomes` are checked and counted all at once.
        """
        ...

    def obstacle(self) -> Obstacle | None:
        """What keeps the calls from being answered together; None where nothing does."""
        ...

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """About how many bytes each call takes in `together`.

        Args:
            device: where it runs.
            largest: the examples of the largest client, where that is known.
            data: the data of some client, where those of all are of its kind.
        """
        ...

    def trial(self, steps: int) -> Trial | None:
        """Work of so many steps to time; None where this operation is not the one to choose an engine by."""
        ...


class ClientDataSource(Protocol):
    """Gives the data of each client by its row, and the server's data by name.

    A source that subclasses it inherits the defaults of `largest` and `on`, which engines use.
    """

    @property
    def largest(self) -> int | None:
        """The number of examples of the largest client, or None if only `holder` can tell."""
        return None

    def holder(self, client: ClientId, /) -> Any:
        """The data of this client. Raises `KeyError` for an unknown name."""
        ...

    def on(self, device: torch.device, /) -> ClientDataSource:
        """The same source for training on `device`, where it may keep its images."""
        return self

    def group(self, clients: Sequence[ClientId], /) -> GroupExamples | None:
        """The examples of these clients, to be read together; None where each client's are read on their own."""
        return None


class GroupExamples(Protocol):
    """The examples of A clients that are read together; `fedlens.data.client_datasets.ClientGroup` is one."""

    @property
    def counts(self) -> Sequence[int]:
        """How many examples each client has."""

    def reordered(self, order: Sequence[int], /) -> GroupExamples:
        """The same examples, the clients in this order."""

    def batches(
        self, sizes: Sequence[int], rngs: Sequence[Rng], steps: Sequence[int], whole: bool = False, /
    ) -> torch.Tensor:
        """The positions of the examples of each client's first batches, int64 [steps, A, size]; -1 is padding.

        `whole` leaves out the last batch of an epoch if it is smaller than the others.
        """

    def read(self, positions: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs [k, ...] and targets [k, ...] at these positions, int64 [k]."""


class ClientExamples(Protocol):
    """What batched training asks of a client's data; `ClientDataset` offers it.

    The defaults suit data that caches nothing and gives each client's batches on its own.
    """

    def held(self, n: int, /) -> int:
        """The bytes of images that `batches` keeps in memory for n examples."""
        return 0

    def group(self, others: Sequence[Any], /) -> GroupExamples | None:
        """The examples of this client and of `others`, to be read together; None where each is read on its own."""
        return None


@dataclass(frozen=True)
class Program:
    """What an engine is opened with, once: operations, data, the seed; and where and how the engine computes them."""

    ops: Mapping[str, Op]
    data: ClientDataSource
    seed: int
    device: str = "cpu"
    arithmetic: Arithmetic = PLAIN


@dataclass(frozen=True)
class ModelSpec:
    """How a model is made: a name or import path, its settings, and what it is made for.

    `build()` gives a new module; its initial weights depend on `seed` alone.
    """

    factory: Callable[..., torch.nn.Module]
    name: str
    settings: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    seed: int

    def build(self) -> torch.nn.Module:
        """A new module with the initial weights, leaving the global random state as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return self.factory(self.input_shape, self.classes, **self.settings)


@dataclass(frozen=True)
class FederationInfo:
    """What the server knows of its clients: how many, how many examples each, and what the task is."""

    sizes: np.ndarray
    classes: int
    input_shape: tuple[int, ...]
    held: Mapping[str, int] = field(default_factory=dict)  # examples at the server, by name: "@test", ...
    held_out: np.ndarray | None = (
        None  # int64 [clients]: how many each client holds out of its own, where they do
    )

    @property
    def clients(self) -> int:
        """The number of clients in the population."""
        return len(self.sizes)

    @cached_property
    def eligible(self) -> np.ndarray:
        """The clients that hold at least one example, int64; made once, so that a round does not scan them all."""
        return np.flatnonzero(self.sizes)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64: where each eligible client ends, if their examples are laid end to end; the last is their number."""
        return np.cumsum(self.sizes[self.eligible], dtype=np.int64)

    @cached_property
    def holding_out(self) -> np.ndarray:
        """The clients that hold out at least one example of their own, int64; empty where clients do not."""
        return np.flatnonzero(self.held_out) if self.held_out is not None else np.zeros(0, np.int64)

    @cached_property
    def largest(self) -> int:
        """The examples of the largest client."""
        return int(self.sizes.max())


@dataclass(frozen=True)
class RoundContext:
    """Where the run is: the round (1 is the first that trains), and the server's randomness for it."""

    round: int
    rounds: int
    federation: FederationInfo
    rng: Rng


State = Payload
Round = Generator[Ask, Answers, State]
Evaluation = Generator[Ask, Answers, Metrics]


class Algorithm(Protocol):
    """A coordinator that asks clients for work and aggregates the replies. Its state is a payload, never `self`."""

    @property
    @abstractmethod
    def ops(self) -> Mapping[str, Op]:
        """What clients can be asked to do, by name."""

    @abstractmethod
    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: State, ctx: RoundContext) -> Round:
        """One round: yields asks, gets answers, returns the new state."""

    @abstractmethod
    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The metrics of the state, by asking holders of data; see `fedlens.tasks.central_evaluation`."""

    @abstractmethod
    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The model that is exported."""


class Engine(Protocol):
    """Anything that answers asks. It reads client states from `states` and never changes them."""

    @abstractmethod
    def open(self, program: Program, states: ClientStates) -> None:
        """Takes the program, once, before the first ask."""

    @abstractmethod
    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask; closing the generator drops what is still out (request order)."""

    @abstractmethod
    def close(self) -> None:
        """Ends all work and releases every process and all memory. May be called twice."""


__all__ = [
    "Algorithm", "Answer", "Answers", "Arithmetic", "Ask",
    "BatchedOp", "Call", "Client",
    "ClientDataSource", "ClientId", "ClientStates", "Engine", "Evaluation", "Failure", "FederationInfo",
    "GroupExamples", "Id", "Metrics", "ModelSpec", "Obstacle", "Op", "Outcome", "Payload", "Program", "Reduce", "Reply",
    "Request", "Round", "RoundContext", "Schema", "State", "Tree", "TreeSpec", "Trial",
]  # fmt: skip
