"""Measures secure sums against plain aggregation: bytes and seconds at several rates of drop-out.

    python -m benchmarks.secure                       # McMahan's CNN of 1,663,370 weights, 20 clients
    python -m benchmarks.secure --cohort 10 --rounds 5
    python -m benchmarks.secure --cohort 200 --model linear --only secagg secagg-plus

Each client trains one step on four random images, on the engine `inline` with one thread, so that most of a round is
the aggregation. Clients are lost after *Shares*, before they send their words: then the server has to rebuild each of
their masks with every survivor, which is the dearest case. The threshold is 0.51. `clients` is the time of all
operations, `server` the rest of the round; both are medians over rounds, which take turns with the plain ones. The
bytes are those of a round; `words` is what the plain reply and its weight have at 4 bytes each.

The first lines compare the masks of one client with bare AES-256-CTR over as many bytes; the goal is 1.3 times. Then
the coding and decoding of LightSecAgg's masks with bare products of float64 matrices of their halves: the goal is
twice, and a busy machine shows more. The goal of the bytes up of SecAgg is 1.02 times the words.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from threadpoolctl import threadpool_limits

from fedlens.aggregate.secure.field import uniform
from fedlens.aggregate.secure.keys import Terms, helpers
from fedlens.aggregate.secure.lightsecagg_steps import coded, decoded
from fedlens.aggregate.secure.masks import add_masks
from fedlens.base.errors import RoundRefused
from fedlens.base.memory import keep_freed_memory
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.run.build import Built, build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan

RATES = (0.0, 0.1, 0.3, 0.45)
THRESHOLD = 0.51
TABLES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"name": "mean"},
    "quantized": {"name": "quantized"},
    "secagg": {"name": "secagg", "threshold": THRESHOLD},
    "lightsecagg": {"name": "lightsecagg", "threshold": THRESHOLD},
    "turbo": {"name": "turbo-aggregate"},
    "secagg-plus": {"name": "secagg-plus", "dropout": 0.45},
}
FEWEST = {"turbo": 15, "secagg-plus": 200}  # clients
TURNS = 9  # of the masks


class Cost(NamedTuple):
    """What one round took."""

    up: int
    down: int
    clients: float
    server: float


class LossyEngine:
    """The engine of a run, whose chosen clients are lost before training; counts the seconds of its operations."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.lost: frozenset[int] = frozenset()
        self.seconds = 0.0

    def answer(self, ask: Ask, round: int, exchange: int) -> Iterator[Answer]:
        """The answers to an ask, without those of lost clients."""
        trains = ask.op == "train"
        answers = self._engine.answer(ask, round, exchange)
        while True:
            start = time.perf_counter()
            answer = next(answers, None)
            self.seconds += time.perf_counter() - start
            if answer is None:
                return
            yield (
                Failure(answer.id, answer.client, "lost") if trains and answer.client in self.lost else answer
            )
            del answer


class Rounds:
    """Rounds of FedAvg with one aggregate."""

    def __init__(self, cohort: int, aggregate: Mapping[str, Any], model: str) -> None:
        self.built = _built(cohort, aggregate, model)
        self.engine, states = LossyEngine(self.built.engine), ClientStates()
        self.built.engine.open(Program(self.built.algorithm.ops, self.built.source, 0), states)
        self.driver = Driver(self.engine, states)
        self.state = self.built.algorithm.init(self.built.model, self.built.federation)
        self.number = 0

    def round(self, lost: int) -> Cost:
        """Runs one round in which so many clients are lost."""
        self.number += 1
        self.driver.tally, self.engine.seconds = Tally(), 0.0
        self.engine.lost = frozenset(range(lost))
        context = RoundContext(self.number, 10_000, self.built.federation, Rng((0, "round", self.number)))
        start = time.perf_counter()
        self.state = self.driver.drive(self.built.algorithm.round(self.state, context), self.number)
        seconds, tally = time.perf_counter() - start, self.driver.tally
        return Cost(tally.bytes_up, tally.bytes_down, self.engine.seconds, seconds - self.engine.seconds)


def _built(cohort: int, aggregate: Mapping[str, Any], model: str) -> Built:
    dataset = {"name": "synthetic", "shape": [1, 28, 28], "train": cohort * 4, "test": 10}
    settings = {
        "rounds": 10_000,
        "data": {"dataset": dataset, "partition": {"name": "iid", "clients": cohort}},
        "model": model,
        "aggregate": dict(aggregate),
        "select": {"clients_per_round": cohort},
        "local": {"lr": 0.01, "steps": 1, "batch_size": 4},
        "engine": {"name": "inline"},
    }
    return build(plan(read_config(settings), Source(settings)), Path(), download=False)


def masks(words: int, passes: int) -> tuple[float, float]:
    """The median seconds of adding `passes` masks to a vector, and of bare AES-256-CTR over as many bytes."""
    vector = np.zeros(words, np.uint32)
    zeros, stream, keys = (
        bytes(vector.nbytes),
        bytearray(vector.nbytes),
        [bytes([k]) * 32 for k in range(passes)],
    )
    ours, bare = [], []
    for _ in range(TURNS):
        start = time.perf_counter()
        add_masks(vector, [(key, 1) for key in keys])
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        for key in keys:
            Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update_into(zeros, stream)
        bare.append(time.perf_counter() - start)
    return statistics.median(ours), statistics.median(bare)


def coding(words: int, cohort: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The median seconds of coding a mask, and of decoding it, each beside the bare products of the halves."""
    terms = Terms(THRESHOLD, "", "")
    survive = terms.needed(cohort)
    noise = helpers(cohort, survive)
    length = -(-words // (survive - noise))
    parts = uniform(bytes(32), survive * length).reshape(survive, length)
    made = coded(parts[:-noise], parts[-noise:], cohort)
    rows = dict(enumerate(made[-survive:], cohort - survive + 1))
    rng = np.random.default_rng(0)
    halves = rng.random((2 * survive, length))
    left = [rng.random((rows, 2 * survive)) for rows in (cohort, survive - noise)]

    def median(*work: Callable[[], Any]) -> list[float]:
        taken: list[list[float]] = [[] for _ in work]
        for _ in range(TURNS):
            for each, seconds in zip(work, taken, strict=True):
                start = time.perf_counter()
                each()
                seconds.append(time.perf_counter() - start)
        return [statistics.median(seconds) for seconds in taken]

    with threadpool_limits(1):
        ours, theirs = median(lambda: coded(parts[:-noise], parts[-noise:], cohort), lambda: left[0] @ halves)
        other, others = median(lambda: decoded(rows, survive - noise, cohort), lambda: left[1] @ halves)
    return (ours, theirs), (other, others)


def main() -> None:
    """Prints the masks of a client, and a line for each rate and aggregate."""
    parser = argparse.ArgumentParser(description="Secure sums against plain aggregation.")
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="mcmahan-cnn")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    kinds = {
        name: Rounds(asked.cohort, TABLES[name], asked.model)
        for name in dict.fromkeys(["plain", *asked.only])
        if asked.cohort >= FEWEST.get(name, 3)
    }
    words = sum(leaf.numel() for leaf in kinds["plain"].state["model"].values()) + 1
    ours, bare = masks(words, asked.cohort)
    print(
        f"{asked.cohort} masks of {words:,} words: {ours * 1e3:.1f} ms, bare AES-256-CTR {bare * 1e3:.1f} ms: "
        f"{ours / bare:.2f} times (goal: 1.3)"
    )
    for name, (ours, bare) in zip(("coding", "decoding"), coding(words, asked.cohort), strict=True):
        print(
            f"{name} a mask: {ours * 1e3:.1f} ms, bare products {bare * 1e3:.1f} ms: {ours / bare:.2f} times (goal: 2)"
        )
    print(
        f"{'lost':>5} {'aggregate':>11} {'MB up':>8} {'x words':>8} {'MB down':>8} {'clients':>9} {'server':>8}"
    )
    for rate in RATES:
        lost = int(rate * asked.cohort)
        costs: dict[str, list[Cost]] = {name: [] for name in kinds}
        for _ in range(asked.rounds):
            for name, rounds in kinds.items():
                with suppress(RoundRefused):  # more than half of a group of Turbo-Aggregate are lost
                    costs[name].append(rounds.round(lost))
        for name, each in costs.items():
            if not each:
                continue
            median = Cost(*(statistics.median(column) for column in zip(*each, strict=True)))
            ratio = median.up / (4 * words * (asked.cohort - lost))
            print(
                f"{lost / asked.cohort:5.0%} {name:>11} {median.up / 1e6:8.1f} {ratio:8.4f} {median.down / 1e6:8.1f} "
                f"{median.clients:7.2f} s {median.server:6.2f} s"
            )


if __name__ == "__main__":
    main()
