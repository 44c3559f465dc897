"""The models of peers on the server's test data: their mean, spread and worst."""

from __future__ import annotations

from dataclasses import dataclass

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_evaluation import spread
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.algorithm_base import OwnCurve
from fedlens.core.protocol import Ask, Client, Evaluation, Failure, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.schema import Schema
from fedlens.tasks.central_evaluation import Evaluate, central, task_metrics

EVALUATE_PEER = "evaluate-peer"
"""The name of the operation `EvaluatePeer`."""


@dataclass(frozen=True)
class EvaluatePeer:
    """Measures the model of one peer; see `Evaluate`.

    It is an operation of its own, because a run keeps what `Evaluate` measures as that of its one model.
    """

    evaluate: Evaluate

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Runs the model in evaluation mode, without gradients."""
        return self.evaluate(payload, client, rng)


@dataclass(frozen=True)
class PeersOnTest:
    """The peers whose models are measured on the test data: `evaluation.test_peers`, the same ones in the whole run.

    Raises `ConfigError` if there are fewer peers.
    """

    parts: Parts

    def __post_init__(self) -> None:
        n, k = self.parts.federation.clients, self.parts.test_peers
        if isinstance(k, int) and k > n:
            raise ConfigError(
                f"the models of {k} peers are to be measured, and there are {n} peers",
                where="evaluation.test_peers",
                hint=f"set at most {n}, or 'all'",
            )

    @property
    def peers(self) -> list[int]:
        """Their numbers, in ascending order."""
        n, k = self.parts.federation.clients, self.parts.test_peers
        if not isinstance(k, int):
            return list(range(n)) if k == "all" else []
        drawn = Rng((self.parts.selection_seed, "test peers")).numpy("draw").choice(n, k, replace=False)
        return sorted(drawn.tolist())

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """For the run's page: the task's score, and the loss."""
        about = f"the models of {len(self.peers)} peers on the test data"
        lines = {"peers_{}_mean": "mean of peers", "peers_{}_worst": "worst peer", "test_{}": "mean model"}
        names = [name for name in (self.parts.task.score, "loss") if name is not None and self.peers]
        return tuple(
            OwnCurve(name, about, {key.format(name): line for key, line in lines.items()}) for name in names
        )

    @property
    def discloses(self) -> tuple[str, ...]:
        """What is read of peers, in a sentence; none without peers."""
        k = len(self.peers)
        return (f"The models of {k} peers are also read to be measured on the test data.",) if k else ()

    def measured(self, shared: Payload, shown: Schema) -> Evaluation:
        """Reads one peer's model after the other, and measures each on the test data: one model at a time in memory.

        Args:
            shared: what the operation "show" needs.
            shown: what it sends; its `model` has all leaves that an evaluation sends.

        Returns for every metric of the task, say the accuracy, `peers_accuracy_mean`, `peers_accuracy_std` and
        `peers_accuracy_worst`, over those that answered: the smallest accuracy, or the largest loss. Empty without
        peers.

        Raises `RunFailed` if none answers.
        """
        measured, reason, task = [], "", self.parts.task
        for peer in self.peers:
            for answer in list((yield Ask("show", [Request(peer)], shared, shown, measuring=True))):
                if isinstance(answer, Failure):
                    reason = answer.reason
                    continue
                model, federation = answer.payload["model"], self.parts.federation
                found = yield from central(model, federation, task, ["@test"], EVALUATE_PEER)
                measured.append(task_metrics(task, found.get("@test")))
        if reason and not measured:
            raise RunFailed(f"no peer could be measured on the test data: {reason}")
        return spread(measured, task.errors, "peers", decile=False)
