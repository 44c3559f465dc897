"""A user's own file: an algorithm of which some clients answer wrongly, and an engine that answers twice.

`faults` names, for each of the clients numbered from `first` on, what is wrong with its reply.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlens.aggregate.server_steps import ServerSGD, momentum
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.core.protocol import BatchedOp, Call, Client, Op, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.local.rules import ClientRule, LocalContext, Traits

NAME = "1.weight"  # of the linear model
Change = Callable[[dict[str, Any]], dict[str, Any]]


def _update(change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda reply: {**reply, "update": {**reply["update"], NAME: change(reply["update"][NAME])}}


def _raise(reply: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("the camera is broken")


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[-1, -1] = math.nan
    return changed


FAULTS: dict[str, tuple[Change, str]] = {
    "nan": (_update(_one_nan), "update holds NaN or Inf"),
    "inf": (_update(lambda t: t * math.inf), "update holds NaN or Inf"),
    "shape": (_update(lambda t: t.T), f"update.{NAME} has shape (64, 10) where (10, 64) is expected"),
    "one": (_update(lambda t: t[:1, 0]), f"update.{NAME} has shape (1,) where (10, 64) is expected"),
    "dtype": (
        _update(lambda t: t.double()),
        f"update.{NAME} is torch.float64 where torch.float32 is expected",
    ),
    "leaf missing": (lambda r: {**r, "update": {NAME: r["update"][NAME]}}, "update lacks 1.bias"),
    "leaf extra": (
        lambda r: {**r, "update": {**r["update"], "2.bias": torch.ones(1)}},
        "update has an extra 2.bias",
    ),
    "missing": (lambda r: {n: v for n, v in r.items() if n != "update"}, "update is missing"),
    "extra": (
        lambda r: {**r, "note": 1},
        'there is an extra note, which `expect` does not announce: add "note": NumberField() to it '
        '(from fedlens.rules import NumberField), and "note": "mean" to `fields` of a client rule for its mean',
    ),
    "zero": (lambda r: {**r, "weight": 0.0}, "weight is 0, outside (0, {most}]"),
    "negative": (lambda r: {**r, "weight": -r["weight"]}, "weight is -{weight}, outside (0, {most}]"),
    "nan weight": (lambda r: {**r, "weight": math.nan}, "weight is nan"),
    "absurd": (lambda r: {**r, "weight": 1e30}, "weight is 1e+30, outside (0, {most}]"),
    "raises": (_raise, "RuntimeError: the camera is broken (faulty.py, line {line})"),
}


class Mute(Exception):
    """An exception that says nothing: looking at it raises."""

    def __str__(self) -> str:
        raise SystemExit(9)

    __repr__ = __str__


class Bare(BaseException):
    pass


class Trap(dict[str, Any]):
    """A reply that raises when it is looked into."""

    def keys(self) -> Any:
        raise GeneratorExit


def _raising(make: Callable[[], BaseException]) -> Change:
    def change(reply: dict[str, Any]) -> dict[str, Any]:
        raise make()

    return change


def _deep(reply: dict[str, Any]) -> dict[str, Any]:
    return _deep(reply)


# What no client should be able to end a run with: the fault, and the beginning of the sentence that counts it.
HOSTILE: dict[str, tuple[Change, str]] = {
    "sparse": (
        _update(lambda t: t.to_sparse()),
        f"update.{NAME} is a sparse_coo tensor where a dense one is expected",
    ),
    "meta": (
        _update(lambda t: t.to("meta")),
        f"update.{NAME} is a meta tensor where a dense one is expected",
    ),
    "exit": (_raising(lambda: SystemExit(3)), "SystemExit: 3 (faulty.py, line "),
    "generator": (_raising(GeneratorExit), "GeneratorExit (faulty.py, line "),
    "stop": (_raising(StopIteration), "StopIteration (faulty.py, line "),
    "interrupt": (_raising(KeyboardInterrupt), "KeyboardInterrupt (faulty.py, line "),
    "bare": (_raising(lambda: Bare("x")), "Bare: x (faulty.py, line "),
    "mute": (_raising(Mute), "Mute: (its message cannot be read) (faulty.py, line "),
    "long": (
        _raising(lambda: RuntimeError("m" * 5_000_000)),
        "RuntimeError: " + "m" * 200 + "... (faulty.py, line ",
    ),
    "control": (
        _raising(lambda: RuntimeError("\x1b[2J\x07gone\nand more")),
        "RuntimeError: \\x1b[2J\\x07gone (faulty.py, line ",
    ),
    "recursion": (_deep, "RecursionError: maximum recursion depth exceeded"),
    "memory": (_raising(MemoryError), "MemoryError (faulty.py, line "),
    "trap": (lambda reply: Trap(reply), "GeneratorExit (faulty.py, line "),
    "name": (lambda reply: {**reply, "\x1b]0;owned\x07": 1}, "there is an extra \\x1b]0;owned\\x07"),
}


@dataclass(frozen=True)
class Faulty:
    """Local training, and then the fault; where there is a file `cured` nothing is wrong any more."""

    train: Op
    first: int
    faults: tuple[str, ...]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcome = self.train(payload, client, rng)
        at = int(client.id) - self.first
        if at < 0 or at >= len(self.faults) or Path("cured").exists():
            return outcome
        if self.faults[at] == "kills":
            os._exit(9)
        if self.faults[at] == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        change, _ = (FAULTS | HOSTILE)[self.faults[at]]
        if self.faults[at] == "trap":
            return Outcome(change(dict(outcome.payload)))
        return Outcome(change(dict(outcome.payload)), {"marked": True}, outcome.metrics)


METRICS: dict[str, tuple[dict[str, float], str]] = {
    "score": ({"test_accuracy": 0.999, "test_loss": 0.0}, "its metric 'test_accuracy' is not declared"),
    "split": ({"validation_accuracy": 1.0}, "its metric 'validation_accuracy' is not declared"),
    "other": ({"a\nb": 1.0}, "its metric 'a\\nb' is not declared"),
    "count": ({"examples": -1e9}, "its metric 'examples' is -1e+09, outside [0, "),
    "half": ({"batches": 0.5}, "its metric 'batches' is 0.5, not a whole number"),
    "lost": ({"loss": math.nan}, "its metric 'loss' holds NaN or Inf"),
}


@dataclass(frozen=True)
class Training(BatchedOp):
    """Local training, alone or together, whose outcomes are `changed`."""

    train: Any

    def changed(self, client: Client, outcome: Any) -> Any:
        raise NotImplementedError

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        changed: Outcome = self.changed(client, self.train(payload, client, rng))
        return changed

    def together(self, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
        return [self.changed(c.client, o) for c, o in zip(calls, self.train.together(calls), strict=True)]

    def obstacle(self) -> Any:
        return self.train.obstacle()

    def footprint(self, *given: Any) -> Any:
        return self.train.footprint(*given)


@dataclass(frozen=True)
class Boasting(Training):
    """The clients from `first` on send the metrics of `METRICS`."""

    first: int

    def changed(self, client: Client, outcome: Any) -> Any:
        added = dict(enumerate(METRICS.values(), self.first)).get(int(client.id))
        return outcome if added is None else outcome._replace(metrics={**outcome.metrics, **added[0]})


@dataclass(frozen=True)
class Boasters:
    """FedAvg whose clients from `first` on become `Boasting`."""

    inner: Averaging
    first: int

    @property
    def ops(self) -> dict[str, Op]:
        return {**self.inner.ops, "train": Boasting(self.inner.ops["train"], self.first)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def boasting(parts: Parts, *, first: int) -> Boasters:
    return Boasters(averaging(parts), first)


@dataclass(frozen=True)
class Huge(Training):
    """One client answers with +-`value` everywhere once `after` of its replies were accepted."""

    client: int
    after: int
    value: float

    def changed(self, client: Client, outcome: Any) -> Any:
        if client.id != self.client:
            return outcome
        visits = client.state.get("visits", 0)
        reply = dict(outcome.payload)
        if visits >= self.after:
            reply["update"] = {n: self._huge(t) for n, t in reply["update"].items()}
        return Outcome(reply, {"visits": visits + 1}, outcome.metrics)

    def _huge(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of different signs for different classes: equal logits of all would be no harm."""
        signs = torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1)) % 2 * 2 - 1
        return torch.full_like(tensor, self.value) * signs


@dataclass(frozen=True)
class Wrapped:
    """An algorithm around another one, as a user may write it."""

    inner: Averaging
    first: int
    faults: tuple[str, ...]

    @property
    def ops(self) -> dict[str, Op]:
        return {**self.inner.ops, "train": Faulty(self.inner.ops["train"], self.first, self.faults)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def algorithm(parts: Parts, *, beta: float = 0.0, first: int = 0, faults: list[str] = []) -> Wrapped:  # noqa: B006
    """FedAvg, or FedAvgM where beta is not 0."""
    server = momentum(momentum=beta) if beta else ServerSGD()
    return Wrapped(averaging(parts, server=server), first, tuple(faults))


def hostile_rule(*, fault: str) -> ClientRule:
    """A rule whose `start` raises at each client with 71 examples."""

    def start(context: LocalContext) -> None:
        if len(context.problem.data) == 71:
            HOSTILE[fault][0]({})

    return ClientRule(start=start, traits=Traits(stackable=True))


@dataclass(frozen=True)
class WithHuge:
    """FedAvg with one client that becomes `Huge`."""

    inner: Averaging
    client: int
    after: int
    value: float

    @property
    def ops(self) -> dict[str, Op]:
        train = Huge(self.inner.ops["train"], self.client, self.after, self.value)
        return {**self.inner.ops, "train": train}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def huge(parts: Parts, *, client: int, after: int, value: float = 3e38) -> WithHuge:
    return WithHuge(averaging(parts), client, after, value)


@dataclass(frozen=True)
class Growing:
    """FedAvg whose learning rate is `times` as high after some rounds. What it returns without a reply is no state."""

    inner: Averaging
    after: int
    times: float

    def round(self, state: Any, ctx: Any) -> Any:
        steps = self.inner.round(state, ctx)
        ask = next(steps)
        lr = ask.shared["lr"] * (self.times if ctx.round > self.after else 1.0)
        answers = yield replace(ask, shared={**ask.shared, "lr": lr})
        try:
            steps.send(answers)
        except StopIteration as stop:
            return {"model": None} if stop.value is state else stop.value
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def growing(parts: Parts, *, after: int, times: float) -> Growing:
    return Growing(averaging(parts), after, times)


@dataclass(frozen=True)
class Fading:
    """FedAvg whose model is gone after the second round: an earlier round stays the best."""

    inner: Averaging

    def round(self, state: Any, ctx: Any) -> Any:
        new = yield from self.inner.round(state, ctx)
        gone = {name: torch.zeros_like(value) for name, value in new["model"].items()}
        return new if ctx.round <= 2 else {**new, "model": gone}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def fading(parts: Parts) -> Fading:
    return Fading(averaging(parts))


class Twice:
    """An engine whose every answer from the clients comes twice."""

    def __init__(self) -> None:
        self.engine = inline()

    def answer(self, *arguments: Any) -> Iterator[Any]:
        answers = self.engine.answer(*arguments)
        try:
            for answer in answers:
                yield answer
                if not isinstance(answer.client, str):
                    yield answer
        finally:
            answers.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def twice() -> Twice:
    return Twice()
