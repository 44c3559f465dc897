"""The interface between algorithms and engines: an algorithm asks, an engine answers, and neither knows the other.

An algorithm's round is a generator of `Ask`s. The driver sends back an iterator of answers. The generator's return
value is the new state of the server. An engine answers asks in this process, in others, or on other machines.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.arithmetic import PLAIN, Arithmetic
from fedlens.core.dataset_info import ClientExamples, FederationInfo, GroupExamples
from fedlens.core.random import Rng, Secrets
from fedlens.core.schema import Schema
from fedlens.core.states import ClientStates, Journal
from fedlens.core.tree import Leaf, Tree, TreeSpec, spec_of
from fedlens.core.types import ClientId, Metrics, Obstacle, Payload, is_server


class Id(NamedTuple):
    """Identifies a request and its answer. Each request is answered once."""

    round: int
    exchange: int
    slot: int


class Letter(NamedTuple):
    """What an operation sends to another client, or to several, instead of to the server's algorithm.

    Attributes:
        to: the addressee, or several: clients, or "@server" and "@server:K".
        content: a payload. It is copied once for all, and its bytes count once an addressee.
    """

    to: ClientId | tuple[ClientId, ...]
    content: Payload


@dataclass(frozen=True)
class Request:
    """One client's part of an ask: the client, and its own payload."""

    client: ClientId
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Reduce:
    """Sums the replies of `block` neighbouring slots in the worker, which then sends one tree instead of `block`.

    `fields` maps a payload name to how its trees (or numbers) are reduced: `"sum"` adds them, each times the reply's
    `weight` field; `"plain"` adds them as they are; `"max"` takes the largest value leaf by leaf. The reduced payload
    also contains the sum of the weights and the number of `replies`. It is in `reduced` of the block's last answer,
    and the reduced names are removed from the replies, unless `keep` is set. The order of additions depends only on
    the slots, so every engine gets the same bits.
    """

    fields: Mapping[str, Literal["sum", "plain", "max"]]
    weight: str = "weight"
    block: int = 1
    keep: bool = False


@dataclass(frozen=True)
class Ask:
    """One exchange: one operation, asked of several clients.

    Attributes:
        op: the name of one of the algorithm's operations.
        requests: one for each slot; a client may appear in several slots.
        shared: the part of the payload that is the same for all; it is sent once per worker or node.
        expect: the schema of a valid reply and its metrics; any other reply becomes a `Failure` before it is
            aggregated.
        order: `"request"` gives the answers in the order of the slots, the same sum on every engine. `"arrival"`
            gives them as they arrive, including late answers to earlier asks in arrival order.
        deadline: seconds after which a missing answer becomes a `Failure`.
        reduce: sum replies in the workers (request order only).
        letter: the schema of the content of every `Letter` that the operation sends (request order only). A letter that
            does not fit is its sender's failure; so is any letter where this is None.
        deliver: gives each client the letters of the asks before, as `payload["letters"]`: a list of
            `(sender, content)` in the order of the senders' slots, empty if none came (request order only). Letters to
            clients that this ask does not ask are dropped. Letters travel with their sender's answer, so an algorithm
            has to read all answers of an ask, or the unread ones' letters are not delivered.
        counts: whether a client that answers has taken part in the round. False for an ask that supports another one,
            such as one for gradients before the training.
        measuring: whether the ask only measures. It has no bytes and does not count as taking part; the algorithm names
            in `discloses` what leaves the clients by it.
        holds: whether the states in its answers are kept back until the round's generator returns, and dropped if it
            raises or holds another ask: for a sum that a later ask opens. They are in the journal before the round's
            next ask goes out, so a killed run can still commit them.
        logged: whether each client keeps a log of such asks, which outlives a kill and is never rolled back with its
            state. The operation gets its log as `payload["log"]`, empty at first, and returns the new one as `log` in
            its payload, or none to leave it. The driver of a simulation keeps logs in the journal, and a site those of
            its clients (`fedlens.site.client_logs`). They are not sent, and the algorithm does not see them.

    Raises `ValueError` for what an ask in arrival order cannot do. Letters belong to the round, or to the evaluation,
    that sends them. "@server" and "@server:K" are asked once an ask.
    """

    op: str
    requests: Sequence[Request]
    shared: Payload = field(default_factory=dict)
    expect: Schema = field(default_factory=Schema)
    order: Literal["request", "arrival"] = "request"
    deadline: float | None = None
    reduce: Reduce | None = None
    letter: Schema | None = None
    deliver: bool = False
    counts: bool = True
    measuring: bool = False
    holds: bool = False
    logged: bool = False

    def __post_init__(self) -> None:
        if self.reduce is not None and self.order == "arrival":
            raise ValueError(
                "an ask in arrival order cannot be reduced, because its blocks would depend on the order of the replies"
            )
        if self.order == "arrival" and (self.letter is not None or self.deliver):
            raise ValueError(
                "an ask in arrival order cannot send or deliver letters, because who gets which would depend on the "
                "order of the replies"
            )
        if self.order == "arrival" and (self.holds or self.logged):
            raise ValueError(
                "an ask in arrival order cannot hold states or have logs: its answers may come in a later round"
            )
        if self.letter is not None:  # engines send `expect` to their workers
            object.__setattr__(self, "expect", replace(self.expect, letter=self.letter))


@dataclass
class Reply:
    """A client's answer. Its new state is stored when the algorithm has read the reply, unless it refused it.

    `allocate` is set by an engine that can send from its memory without a copy: it returns an uninitialized tree like
    its argument, in that memory. Compute a sum that becomes the next model there. `norms` has the Euclidean norms of
    the payload's trees, also of reduced ones, and the largest of each name in letters, as `letter.NAME`. `letters` are
    the addressees and the content of each letter; the driver takes them before the algorithm reads the reply, and drops
    those of a refused one.
    """

    id: Id
    client: ClientId
    payload: Payload
    metrics: Metrics = field(default_factory=dict)
    state: Payload | None = None
    nbytes: int = 0
    reduced: Payload | None = None
    refused: str | None = None
    donated: frozenset[str] = frozenset()  # see `Outcome`
    allocate: Callable[[Tree], dict[str, Tensor]] | None = field(default=None, compare=False, repr=False)
    norms: Mapping[str, float] = field(default_factory=dict, repr=False)
    letters: Sequence[tuple[tuple[ClientId, ...], Payload]] = ()

    def refuse(self, reason: str) -> None:
        """Rejects the reply: the client's state does not change, and the run counts a failure.

        With `reduce` its tree is already summed, so only the schema can reject it.
        """
        self.refused = reason


@dataclass
class Failure:
    """Replaces a reply that is missing or was rejected."""

    id: Id
    client: ClientId
    reason: str
    reduced: Payload | None = None


Answer = Reply | Failure
Answers = Iterator[Answer]


class Outcome(NamedTuple):
    """The result of an operation: the payload to send, the client's new state (None: unchanged), and metrics.

    Metrics are sums over the client's examples, so that they can be added: `loss` summed over `examples`, and
    `batches`. Metrics of other names are declared in `Ask.expect`, see `Schema`. `donated` names the fields of the
    payload whose tensors the operation does not use again, so that they need not be copied; see "Ownership" in
    `fedlens.core.tree`. `letters` go to other clients, see `Ask.letter` and `Ask.deliver`.
    """

    payload: Payload
    state: Payload | None = None
    metrics: Mapping[str, float] = {}
    donated: frozenset[str] = frozenset()
    letters: Sequence[Letter] = ()


@dataclass
class Client:
    """The client's side of an operation: its data and state. Only what the operation sends leaves the client.

    `scratch` is a cache of the worker, shared by its clients. Results must not depend on it.
    """

    id: ClientId
    data: Any
    state: Payload
    secrets: Secrets
    scratch: dict[Any, Any]
    device: torch.device
    arithmetic: Arithmetic = PLAIN


class Op(Protocol):
    """An operation at a client: a pure function, apart from `client.scratch`. It never changes its inputs.

    The payload contains the names of `Ask.shared` and of `Request.payload`.
    """

    def __call__(self, payload: Payload, client: Client, rng: Rng, /) -> Outcome: ...


class Call(NamedTuple):
    """The arguments of one call to an operation, where several calls are made together."""

    payload: Payload
    client: Client
    rng: Rng


class Trial(NamedTuple):
    """Plain training of a few steps, which an engine times to compare ways of computing it."""

    op: BatchedOp
    shared: Payload
    convolutions: bool  # whether the model has any, so that a memory layout is worth trying
    layout: bool = False  # whether `channels_last = "auto"` applies to them on a CPU that gains from it


@runtime_checkable
class BatchedOp(Op, Protocol):
    """An operation that can also answer several calls as one batched computation; the engine decides.

    Implemented by `fedlens.local.vectorized.batched_train` and `fedlens.algorithms.full_gradients`; used by engines
    that train clients together. Other operations are called once per client.
    """

    def together(self, calls: Sequence[Call], /) -> Sequence[Outcome | BaseException]:
        """The outcome of each call, or the exception of that client; raises exceptions that belong to no client.

        `fedlens.core.calls.StackedOutcomes` are checked and counted all at once.
        """
        ...

    def obstacle(self) -> Obstacle | None:
        """Why the calls cannot be computed together; None if they can."""
        ...

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The approximate number of bytes of each call in `together`.

        Args:
            device: the device of the computation.
            largest: the number of examples of the largest client, if known.
            data: the data of one client, if those of all clients have the same form.
        """
        ...


class ClientDataSource(Protocol):
    """Gives the data of each client by its row, and the server's data by name.

    A source that subclasses it inherits the defaults of `largest` and `on`, which engines use.
    """

    @property
    def largest(self) -> int | None:
        """The number of examples of the largest client, or None if only `data_of` can tell."""
        return None

    def data_of(self, client: ClientId, /) -> Any:
        """The data of a client, or of the server's `@test` and so on. Raises `KeyError` for an unknown name."""
        ...

    def on(self, device: torch.device, /) -> ClientDataSource:
        """The same source for training on `device`, where it may keep its images."""
        return self

    def group(self, clients: Sequence[ClientId], /) -> GroupExamples | None:
        """The examples of these clients, to be read together; None where each client's are read on their own."""
        return None


@dataclass(frozen=True)
class Program:
    """What an engine is opened with: operations, data, seed, device and number format; at a site, its own secrets."""

    ops: Mapping[str, Op]
    data: ClientDataSource
    seed: int
    device: str = "cpu"
    arithmetic: Arithmetic = PLAIN
    secrets: Callable[[ClientId], Secrets] | None = None

    def secrets_of(self, client: ClientId) -> Secrets:
        """The client's secrets: those of `secrets`, or simulated ones, which derive from the seed."""
        return Secrets((self.seed, client)) if self.secrets is None else self.secrets(client)

    def data_of(self, client: ClientId) -> Any:
        """The data of a client; None for "@server" and "@server:K". Raises what the source raises for it."""
        return None if is_server(client) else self.data.data_of(client)

    def computing(self) -> AbstractContextManager[None]:
        """Sets PyTorch's options for this device and number format, see `Arithmetic.on`."""
        return self.arithmetic.on(torch.device(self.device))


class Prepare(Protocol):
    """What changes the module that a model's factory made, as the keys of `[model]` that work on any model say."""

    @abstractmethod
    def __call__(self, module: torch.nn.Module, model: ModelSpec, initial: bool, /) -> torch.nn.Module:
        """The module of the model; see `ModelSpec`."""

    @abstractmethod
    def varied(self, **keys: Any) -> Prepare:
        """The same with other values of these keys."""


@dataclass(frozen=True)
class ModelSpec:
    """How a model is built: its name or import path, its settings, the input shape and the classes.

    `build()` returns a new module; its initial weights depend only on `seed`, and on a file of weights if it has one.
    `prepare` is called with the factory's module, this spec and `initial`, and returns the module of the model; see
    `fedlens.models.prepare`. `wrapper` is called with that module and this spec, and returns the module that is
    trained, with the layers that a task puts around the model. `fixed` holds the leaves that no training changes, if
    they are known: workers get them once, with the operations, and no message needs to carry them (`sent`). A resumed
    run takes their values from its checkpoint. If it is empty, messages carry every leaf.

    A model whose shapes change during a run is `varied`: `origin` is the first model then, and `changes` what differs.
    An operation builds it from its payload, `model.of(payload)`.
    """

    factory: Callable[..., torch.nn.Module]
    name: str
    settings: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    seed: int
    prepare: Prepare | None = None
    wrapper: Callable[[torch.nn.Module, ModelSpec], torch.nn.Module] | None = None
    fixed: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    origin: ModelSpec | None = field(default=None, compare=False, repr=False)
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def varied(
        self, settings: Mapping[str, Any] | None = None, prepare: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """The same model with other settings of its factory, such as widths, or other keys of its preparation.

        Its messages carry every leaf. Raises `ConfigError` for keys of a preparation that it does not have.
        """
        if prepare and self.prepare is None:
            raise ConfigError(
                f"the model '{self.name}' has no keys that could change, and {', '.join(prepare)} should",
                where="model",
            )
        given = {"settings": settings or {}, "prepare": prepare or {}}
        changes = {part: {**self.changes.get(part, {}), **values} for part, values in given.items()}
        return replace(
            self,
            settings={**self.settings, **given["settings"]},
            prepare=self.prepare.varied(**prepare) if self.prepare and prepare else self.prepare,
            fixed={},
            origin=self.origin or self,
            changes=changes,
        )

    def of(self, payload: Payload) -> ModelSpec:
        """The model of a payload or a state: varied by its field `varied`, if it has one."""
        return self.varied(**payload["varied"]) if "varied" in payload else self

    @property
    def varying(self) -> Payload:
        """The field of a payload from which `of` makes this model; empty for the first one."""
        return {} if self.origin is None else {"varied": self.changes}

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """The spec of its tree."""
        return spec_of(self.build(initial=False))

    def sent(self, tree: Tree) -> Tree:
        """The leaves of a tree that have to be sent: all except those that workers already have."""
        return {name: value for name, value in tree.items() if name not in self.fixed} if self.fixed else tree

    def build(self, initial: bool = True) -> torch.nn.Module:
        """Builds a new module. The global random state does not change.

        Args:
            initial: whether to set the initial weights; if not, only its structure is valid, and no file is read.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            module = self.factory(self.input_shape, self.classes, **self.settings)
            module = module if self.prepare is None else self.prepare(module, self, initial)
            return module if self.wrapper is None else self.wrapper(module, self)


@dataclass(frozen=True)
class RoundContext:
    """The current round (1 is the first that trains), and the server's random generators for it.

    Attributes:
        metrics: numbers of the round that the server's code sets, by name, such as `ctx.metrics["eta_g"] = 2.0`; each
            is a column of `metrics.jsonl`. A name that replies have too gets the sum.
        entropy: returns this number of random bytes of the operating system, which no seed repeats.
        journal: what a round keeps of itself in case the server is killed.
        available: the clients that can be asked now; None for all. Selections draw among them.
    """

    round: int
    rounds: int
    federation: FederationInfo
    rng: Rng
    metrics: dict[str, float] = field(default_factory=dict, compare=False, kw_only=True)
    entropy: Callable[[int], bytes] = field(default=os.urandom, compare=False, kw_only=True)
    journal: Journal = field(default_factory=Journal, compare=False, kw_only=True)
    available: Sequence[int] | None = field(default=None, kw_only=True)

    @property
    def eligible(self) -> np.ndarray:
        """The clients to select from, int64: those that hold data and are available."""
        return self.federation.eligible_of(self.available)


State = Payload
Round = Generator[Ask, Answers, State]
Evaluation = Generator[Ask, Answers, Metrics]
Steps = Generator[Ask, Answers, Any]  # either of them


class Algorithm(Protocol):
    """Interface of an algorithm: it asks clients for work and aggregates. Its state is a payload, not `self`."""

    @property
    @abstractmethod
    def ops(self) -> Mapping[str, Op]:
        """The operations that clients can run, by name."""

    @abstractmethod
    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: State, ctx: RoundContext) -> Round:
        """Runs one round: yields asks, receives answers, returns the new state."""

    @abstractmethod
    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """Evaluates the state with asks, and returns the metrics; see `fedlens.tasks.central_evaluation`."""

    @abstractmethod
    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The global model, for checkpoints and export."""


class Engine(Protocol):
    """Interface of an execution backend: answers asks. It reads client states from `states` and never changes them."""

    @abstractmethod
    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program, once, before the first ask."""

    @abstractmethod
    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask. Closing the generator drops the missing answers (request order)."""

    @abstractmethod
    def close(self) -> None:
        """Stops all work and releases all processes and memory. May be called twice."""


__all__ = [
    "Algorithm", "Answer", "Answers", "Arithmetic", "Ask",
    "BatchedOp", "Call", "Client",
    "ClientDataSource", "ClientExamples", "ClientId", "ClientStates", "Engine", "Evaluation", "Failure",
    "FederationInfo", "GroupExamples", "Id", "Letter", "Metrics", "ModelSpec", "Obstacle", "Op", "Outcome", "Payload",
    "Program", "Reduce", "Reply", "Request", "Round", "RoundContext", "Schema", "State", "Tree", "TreeSpec", "Trial",
]  # fmt: skip
