"""What an algorithm and a listener know of a round in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedlens.core.protocol import ClientId, RoundContext
from fedlens.core.random import Rng
from fedlens.core.types import is_client
from fedlens.core.work import Phase, Work
from fedlens.run.build import Built


def round_context(built: Built, round: int) -> RoundContext:
    """The context that the algorithm gets in a round."""
    rng = Rng((built.config.seeds.selection, "round", round))
    return RoundContext(round, built.config.rounds, built.federation, rng)


def round_work(built: Built, phase: Phase, round: int, tell: Callable[[Work], None]) -> Work:
    """The work of a phase of a round; `tell` is called as it advances."""
    config, engine, sizes = built.config, built.engine, built.federation.sizes

    def weigh(clients: Sequence[ClientId]) -> list[float]:
        return [float(sizes[client]) if is_client(client) else 1.0 for client in clients]

    # Epochs take as many steps as a client has batches.
    equal = phase == "training" and (config.local.steps or config.local.examples)
    evaluations = config.rounds // config.evaluation.every
    return Work(
        phase,
        round,
        config.rounds,
        evaluations,
        None if equal else weigh,
        lambda: engine.local_steps,
        tell,
    )
