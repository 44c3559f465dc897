"""Base class of algorithms: optional members, each with a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from fedlens.base.errors import ConfigError, HookError
from fedlens.base.signatures import OP, check_methods, check_signature, offered, offers_all
from fedlens.core.protocol import (
    Algorithm,
    BatchedOp,
    Evaluation,
    FederationInfo,
    ModelSpec,
    Op,
    Payload,
    Round,
    RoundContext,
    Schema,
    State,
)
from fedlens.core.tree import Tree


class OwnCurve(NamedTuple):
    """A figure over rounds on a run's page, of numbers that `evaluate` returns beside the metrics of the task.

    Attributes:
        metric: what the numbers are, the first word of the title; such as "accuracy", which is shown in per cent.
        about: the rest of the title.
        lines: the name of each line, by its key in `evaluate`'s metrics.
    """

    metric: str
    about: str
    lines: Mapping[str, str]


class ClientGraph(NamedTuple):
    """Who sends to whom, drawn on a run's page with the clients on a circle.

    Attributes:
        title: above the drawing.
        clients: their number; they are numbered from 0.
        edges: the two ends and the weight of each edge.
        directed: whether the first end sends to the second; if not, they send to each other.
    """

    title: str
    clients: int
    edges: Sequence[tuple[int, int, float]]
    directed: bool = False


class AlgorithmBase(Algorithm):
    """Base class of algorithms: what an algorithm declares about itself, with defaults.

    An algorithm of your own may inherit from it too. A class with only the members of `Algorithm` is wrapped in
    `BareAlgorithm` where it is made, so that all users of an algorithm may call everything below.

    Attributes:
        asks_each_step: whether a round asks each client for single steps, so that sending them to workers does not pay:
            the engines `default` and `auto` stay `inline`.
        sends_single_examples: whether clients send labels or numbers of single examples. A site refuses that unless its
            `min_examples` is 1.
        personal: the leaves of the model that stay at the clients, so that each client has a model of its own; a client
            that trained has their values in its state, as `personal`.
        has_peers: whether clients are peers with a model of their own each, which `evaluation.test_peers` measures on
            the test data.
        grows: whether the shapes of the model change during a run: `model` returns a varied spec (`ModelSpec.varied`).
        composed: the network of the final state, if the algorithm composes it of several in place of `[model]`.
        tested_model: what is measured on the test data, in the words of the run's page.
        replaced: by the name of their table, the components that the algorithm sets up from its own settings and that
            the user's table replaces.
    """

    asks_each_step: bool = False
    sends_single_examples: bool = False
    personal: frozenset[str] = frozenset()
    has_peers: bool = False
    grows: bool = False
    composed: ModelSpec | None = None
    tested_model: str = "the global model"
    replaced: Mapping[str, Any] = MappingProxyType({})

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates, as sentences for the run's report."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the first round, as sentences that the run prints."""
        return ()

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """What the run's page shows over rounds beside the metrics of the task."""
        return ()

    @property
    def graphs(self) -> tuple[ClientGraph, ...]:
        """Who sends to whom, if clients send to each other, for the run's page."""
        return ()

    def files(self, state: State) -> Mapping[str, bytes]:
        """Files of the final state besides the model, by name; the run writes them into its directory."""
        return {}

    def letter_bytes(self, federation: FederationInfo) -> int:
        """About the bytes of the letters that lie in memory at the same time, if they may be large."""
        return 0

    @property
    def evaluation_asks(self) -> int:
        """The maximum number of asks of `evaluate`. With a single ask, it can run during the next round."""
        return 1

    def clients_per_round(self, federation: FederationInfo) -> int | None:
        """The size of a cohort; None if there is no cohort. Raises `ConfigError` if the population is too small."""
        return None

    def candidates(self, federation: FederationInfo) -> Sequence[int]:
        """The clients that may be asked to train, each once; by default all that hold data."""
        eligible: list[int] = federation.eligible.tolist()
        return eligible

    def takes(self, op: str) -> Schema | None:
        """What a client may be asked by this operation: the fields of `Ask.shared` and `Request.payload` together.

        A site refuses every other ask, and, where this is None, each one: the operation is not for clients, or the
        algorithm does not say. `evaluate` is for data of the server: asked of one image, it would tell its label.
        """
        return None

    @property
    def pools_data(self) -> bool:
        """Whether the server trains on the data of all clients, so that no client trains."""
        return False

    @property
    def full_gradients(self) -> bool:
        """Whether clients compute gradients over all their examples, including a last batch that is small."""
        return False

    @property
    def needs_replies(self) -> bool:
        """Whether a round without an accepted reply is in vain: the run skips it, or ends. See `max_skipped`.

        Otherwise the state that `round` returns counts in every round.
        """
        return True

    @property
    def blind(self) -> bool:
        """Whether the server sees sums over clients, and no single reply.

        Each round is then saved before the next begins: it must not be repeated without need, since two sums that
        differ by one client tell what that client sent.
        """
        return False

    @property
    def release(self) -> Mapping[str, Any] | None:
        """What each round will release, in the terms of differential privacy; None if nothing with noise."""
        return None

    def spent(self, state: State) -> Sequence[Mapping[str, Any]]:
        """What the round that made this state released of the clients' data, in the terms of differential privacy.

        One mapping for each noised release; see `fedlens.local.rules.ServerRule.spent`.
        """
        return ()

    def client_release(self, client: int) -> Mapping[str, Any] | None:
        """What this client releases each time that it trains, if it adds the noise itself; see `release`."""
        return None

    @property
    def private(self) -> bool:
        """Whether the run keeps to itself who took part, as the promise of `[privacy]` needs; see `docs/run-directory`.

        Counts, names, norms, bytes and seconds of rounds then go to `private.jsonl`, which its owner alone can read.
        """
        return False

    @property
    def protects(self) -> bool:
        """Whether its rounds keep the promise of the table `[privacy]`, which it is refused with otherwise."""
        return False

    @property
    def follows_device(self) -> bool:
        """Whether the server's code computes on the device of its inputs, so that state and replies may stay on a GPU.

        It must not combine its inputs with CPU tensors, and must not keep replies except as part of a sum. If False,
        all its inputs are on the CPU.
        """
        return False

    @property
    def training_op(self) -> str | None:
        """The operation whose replies hold the local models (`local_model`); None if no reply holds them."""
        return None

    @property
    def no_local_models(self) -> str:
        """Why no reply holds a local model, if `training_op` is None."""
        return "its class does not define `training_op`"

    def local_model(self, state: State, reply: Payload) -> Tree:
        """The model that a client trained in a round, without the leaves that never change.

        Args:
            state: the server state before the round.
            reply: the payload of the client's reply to `training_op`.
        """
        raise HookError(
            f"{type(self).__name__} names the operation '{self.training_op}' and does not define `local_model`",
            hint="define it, or return None from training_op",
        )


@dataclass(frozen=True)
class BareAlgorithm(AlgorithmBase):
    """An algorithm with only the members of `Algorithm`; the others have their defaults."""

    algorithm: Algorithm

    @classmethod
    def wrap(cls, algorithm: Algorithm) -> AlgorithmBase:
        """The algorithm itself if it inherits from `AlgorithmBase` or forwards to one that does, else wrapped.

        Raises `ConfigError` if it has only some members of `AlgorithmBase`, or if one of its operations has only some
        members of `BatchedOp`.
        """
        check_methods(algorithm, "algorithm")
        for name, op in algorithm.ops.items():
            check_signature(op, OP, f"the operation '{name}'")
        refuse_partly_batched(algorithm.ops)
        if offers_all(algorithm, "algorithm", AlgorithmBase, Algorithm):
            return cast("AlgorithmBase", algorithm)
        return cls(algorithm)

    @property
    def ops(self) -> Mapping[str, Op]:
        """The algorithm's operations."""
        return self.algorithm.ops

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The algorithm's first state."""
        return self.algorithm.init(model, federation)

    def round(self, state: State, ctx: RoundContext) -> Round:
        """A round of the algorithm."""
        return self.algorithm.round(state, ctx)

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The algorithm's evaluation."""
        return self.algorithm.evaluate(state, ctx)

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The algorithm's model."""
        return self.algorithm.model(state)


def refuse_partly_batched(ops: Mapping[str, Op]) -> None:
    """Raises `ConfigError` if an operation has some members of `BatchedOp` and lacks others."""
    for name, op in ops.items():
        batched = offered(op, ("together", "obstacle", "footprint", "trial"))
        if batched and not isinstance(op, BatchedOp):
            raise ConfigError(
                f"the operation '{name}' ({type(op).__name__}) has '{batched[0]}' and not all of BatchedOp's methods, "
                "so it would never be called for several clients at once",
                where="algorithm.name",
                hint="add 'together', 'obstacle', 'footprint' and 'trial' (see fedlens.core.protocol.BatchedOp), or "
                f"rename '{batched[0]}'",
            )
