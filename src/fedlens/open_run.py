"""An experiment that is open: its clients can be asked by hand, for example in a notebook."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import replace
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import Answer, Answers, Ask, ClientStates, Reply, RoundContext, State
from fedlens.core.tree import copied
from fedlens.run.build import Built
from fedlens.run.round_context import new_state, round_context
from fedlens.run.run_state import placed


class OpenRun:
    """The data, clients and engine of an experiment, before its first round. Made by `fedlens.Experiment.open`.

    Close it, or use it in a `with` block. It writes no files and calls no observers. The rounds of `train` have the
    numbers of the same rounds of `Experiment.run`.

    Attributes:
        state: the server's state, such as `state["model"]`; may be set.
        round: the number of rounds that were trained.
    """

    def __init__(self, built: Built) -> None:
        self._built, self._states, self.round = built, ClientStates(), 0
        built.engine.open(built.program, self._states)
        self._driver = Driver(built.engine, self._states)
        try:
            self.state: State = placed(built, built.algorithm.init(built.model, built.federation))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the engine; its workers end."""
        self._built.engine.close()

    @property
    def clients(self) -> dict[int, str]:
        """The id of each client that has training data, by its number."""
        return {int(client): self._built.partition.ids[client] for client in self._built.federation.eligible}

    def ask(self, op: str | Ask, clients: Collection[int] | None = None) -> list[Answer]:
        """Asks clients for an operation, and returns their answers: a `Reply`, or a `Failure` with its reason.

        Nothing is aggregated or stored, so the same ask has the same answers, until `train`.

        Args:
            op: an operation that the algorithm asks for in its next round, with what it would send; or an `Ask` of your
                own.
            clients: the numbers of the clients that can be selected in the round; by default all.

        Raises `ConfigError` if a client has no data, or the round does not ask for the operation.
        """
        number = self.round + 1
        rounds = self._built.algorithm.round(self.state, self._context(number, clients))
        steps = _alone(op) if isinstance(op, Ask) else _first(op, rounds)
        answers: list[Answer] = Driver(self._built.engine, self._states).aside(steps, number)
        self._states.keep()
        return answers

    def train(self, clients: Collection[int] | None = None) -> dict[str, float]:
        """Trains a round with clients selected among these, by default all; `state` and the clients' states move on.

        Returns the sums of what the clients report: `loss`, `examples`, `batches`, and metrics of the algorithm's own.
        Raises `RunFailed` if the round fails.
        """
        number, driver = self.round + 1, self._driver
        driver.tally = Tally()
        steps = self._built.algorithm.round(self.state, self._context(number, clients))
        self.state, self.round = new_state(self._built, driver, steps, self.state, number), number
        return dict(driver.tally.sums)

    def evaluate(self) -> dict[str, float]:
        """Measures the model of `state`, as the settings say."""
        steps = self._built.algorithm.evaluate(self.state, round_context(self._built, self.round))
        measured = dict(self._driver.aside(steps, self.round))
        self._states.keep()
        return measured

    def _context(self, number: int, clients: Collection[int] | None) -> RoundContext:
        for client in clients or ():
            if client not in self.clients:
                known = ", ".join(map(str, list(self.clients)[:5]))
                raise ConfigError(
                    f"client {client} has no training data",
                    where="clients",
                    hint=f"`run.clients` lists those that have: {known}, ...",
                )
        privacy = self._built.config.privacy
        if clients is not None and privacy is not None and privacy.hides_clients:
            raise ConfigError(
                "[privacy] draws among all clients", where="clients", hint="leave `clients` out"
            )
        available = None if clients is None else sorted(clients)
        return round_context(self._built, number, self._driver.journal, available)


def _alone(ask: Ask) -> Generator[Ask, Answers, list[Answer]]:
    """The answers to an ask, whole and copied: the memory of an engine's answer is used again."""
    answers = yield replace(ask, reduce=None)
    return [
        replace(answer, payload=copied(answer.payload), state=copied(answer.state), allocate=None)
        if isinstance(answer, Reply)
        else answer
        for answer in answers
    ]


def _first(op: str, round: Generator[Ask, Answers, Any]) -> Generator[Ask, Answers, list[Answer]]:
    """The answers to the first ask of a round for an operation; the asks before it take their course."""
    asked: list[str] = []
    try:
        ask = next(round)
        while ask.op != op:
            asked.append(ask.op)
            ask = round.send((yield ask))
        return (yield from _alone(ask))
    except StopIteration:
        raise ConfigError(f"the round does not ask for '{op}'", where="op", hint=nearest(op, asked)) from None
    finally:
        round.close()
