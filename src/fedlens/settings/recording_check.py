"""Checks what a run is asked to record, and says how much space it takes, before the run begins."""

from __future__ import annotations

from collections.abc import Container
from math import prod

from fedlens.base.errors import ConfigError
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.tree import TreeSpec
from fedlens.settings.config import Config
from fedlens.tasks.task import Task


def check_recording(
    config: Config,
    algorithm: AlgorithmBase,
    task: Task,
    spec: TreeSpec,
    cohort: int | None,
    at_clients: Container[str] = (),
) -> list[str]:
    """Sentences that say how much the recordings take, and which settings record no round.

    Args:
        spec: of the model.
        cohort: the number of clients in a round.
        at_clients: leaves that stay at the clients, so that no reply has them.

    Raises `ConfigError` if a recorded round is beyond the last, if the algorithm has no clients or sends no local
    models, or if the server sees sums alone.
    """
    record = config.record
    sentences = _of_single_clients(config, algorithm.blind)
    for key, wanted in (("local_models", record.local_models), ("updates", record.updates)):
        where = f"record.{key}"
        if wanted is not None and algorithm.pools_data:
            raise ConfigError(
                no_clients(config), where="record", hint="remove the table, or choose another algorithm"
            )
        if wanted is not None and algorithm.grows:
            raise ConfigError(
                f"'{config.algorithm['name']}' changes the shapes of the model, and recordings are of models of the "
                "same shapes",
                where=where,
                hint="remove the table, or choose another algorithm",
            )
        if wanted is not None and wanted.every is None and not wanted.rounds:
            raise ConfigError(
                f"the table [{where}] names no round", where=where, hint="set every = 5, or rounds = [1, 10]"
            )
        beyond = [round for round in (wanted.rounds or () if wanted else ()) if round > config.rounds]
        if beyond:
            raise ConfigError(
                f"round {beyond[0]} is to be recorded, but the run has {config.rounds} rounds",
                where=f"{where}.rounds",
                hint="name rounds of the run",
            )
        if wanted is not None and not any(map(wanted.includes, range(1, config.rounds + 1))):
            asked = f"it asks for every {wanted.every} rounds"
            sentences.append(f"{where} records nothing: {asked}, and the run has {config.rounds}")
    if record.local_models is not None and algorithm.training_op is None:
        raise ConfigError(
            no_local_models(config, algorithm, task, spec),
            where="record.local_models",
            hint="set record.updates, which keeps what clients send, or choose another algorithm",
        )
    price = _price(config, spec, cohort or 1, at_clients)
    return [*sentences, *([price] if price else [])]


def _of_single_clients(config: Config, blind: bool) -> list[str]:
    """A sentence if a private run records single clients all the same.

    Raises `ConfigError` if records of single clients are wanted, and the server sees their sum alone or `[privacy]`
    hides them.
    """
    record, private = config.record, config.privacy is not None and config.privacy.hides_clients
    wanted = {"clients": record.clients, "local_models": record.local_models, "updates": record.updates}
    for key in (key for key, value in wanted.items() if value):
        if blind:
            raise ConfigError(
                f"with aggregate.name = '{(config.aggregate or {}).get('name')}' the server sees the sum over the "
                "clients alone, so there is nothing of single clients to record",
                where=f"record.{key}",
                hint="remove it, or set aggregate.name = 'mean'",
            )
        if private and not record.unsafe:
            raise ConfigError(
                f"[privacy] hides what single clients sent, and record.{key} keeps it",
                where=f"record.{key}",
                hint="remove it, or set record.unsafe = true for a run that is not private",
            )
    unsafe = "not private: record.unsafe = true records what single clients sent, without noise"
    return [unsafe] if private and record.unsafe else []


def no_clients(config: Config) -> str:
    """The sentence that an algorithm on pooled data has no clients to record."""
    return f"'{config.algorithm['name']}' trains on the pooled data and has no clients to record"


def no_local_models(config: Config, algorithm: AlgorithmBase, task: Task, spec: TreeSpec) -> str:
    """The sentence that replies hold no local models, with the reason."""
    if task.local_leaves(spec):
        why = f"with the task '{config.task['name']}', each client keeps a part of the model"
    else:
        why = algorithm.no_local_models
    return f"the replies of '{config.algorithm['name']}' hold no local models: {why}"


def _price(config: Config, spec: TreeSpec, cohort: int, at_clients: Container[str]) -> str | None:
    """How many bytes the recordings take, as a sentence; None if no round is recorded."""
    size = sum(leaf.dtype.itemsize * prod(leaf.shape) for leaf in spec.values())
    sent = sum(
        leaf.dtype.itemsize * prod(leaf.shape)
        for name, leaf in spec.items()
        if not leaf.fixed and name not in at_clients
    )
    rounds = total = 0
    for round in range(1, config.rounds + 1):
        kinds = [w for w in (config.record.local_models, config.record.updates) if w and w.includes(round)]
        rounds += bool(kinds)
        total += 2 * size * bool(kinds) + cohort * sent * len(kinds)
    if not rounds:
        return None
    taken = f"{total / 1e6:,.0f} MB" if total >= 1e6 else f"{total / 1e3:,.0f} kB"
    return f"recording {rounds:,} of {config.rounds:,} rounds takes about {taken} in the run directory"
