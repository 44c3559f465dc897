"""Measures secure sums against plain aggregation: bytes and seconds by drop-out and number of clients.

    python -m benchmarks.secure docs/figures/secure-sums.jsonl
    python -m benchmarks.secure docs/figures/secure-sums.jsonl --model linear --cohorts 1000 --rates 0 0.45
    python -m benchmarks.secure --coding        # the masks of a client, and the coding of LightSecAgg's masks

Each measurement is a line of JSON at the end of the file; `python -m tools.secure_page` makes docs/who-may-know-what.md
of it. With `--only`, several commands can measure at once. Each client trains one step on four random images, on the
engine `inline` with one thread, so that most of a round is the aggregation. Clients are lost after *Shares*, before
they send their words: then the server has to rebuild each of their masks with every survivor, which is the dearest
case. The threshold is 0.51. SecAgg+ has 200 clients or more here, and the others have at most 200; Turbo-Aggregate has
15 to 100, since 200 need 4 GB of memory.

Bytes are those of a client that lasts: the mean of a message of each step. Seconds are processor time, which other work
on the machine disturbs less than the clock: those of all operations by the number of clients, and those of the rest of
the round, which is the server's. Each is the smallest of several rounds, which have 30 clients in all, or that of one.

With `--coding`, masks are compared with bare AES-256-CTR over as many bytes (the goal is 1.3 times), and the coding and
decoding of LightSecAgg's masks with bare products of float64 matrices of their halves (the goal is twice).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

COHORTS = (10, 20, 50, 100, 200)
RATES = (0.0, 0.1, 0.3, 0.45)
THRESHOLD = 0.51
TABLES: Mapping[str, Mapping[str, Any]] = {
    "quantized": {"name": "quantized"},
    "secagg": {"name": "secagg", "threshold": THRESHOLD},
    "secagg-plus": {"name": "secagg-plus", "dropout": 0.45},
    "lightsecagg": {"name": "lightsecagg", "threshold": THRESHOLD},
    "turbo-aggregate": {"name": "turbo-aggregate"},
}
CLIENTS = {
    "secagg": (3, 200),
    "secagg-plus": (200, 1000),
    "lightsecagg": (3, 200),
    "turbo-aggregate": (15, 100),
}
CODED = 1_663_371  # words: those of McMahan's CNN
TURNS = 25


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
            start = time.process_time()
            answer = next(answers, None)
            self.seconds += time.process_time() - start
            if answer is None:
                return
            yield (
                Failure(answer.id, answer.client, "lost") if trains and answer.client in self.lost else answer
            )
            del answer


class Rounds:
    """Rounds of FedAvg with one aggregate."""

    def __init__(self, cohort: int, aggregate: Mapping[str, Any], model: str) -> None:
        self.built, self.cohort = _built(cohort, aggregate, model), cohort
        self.engine, states = LossyEngine(self.built.engine), ClientStates()
        self.built.engine.open(Program(self.built.algorithm.ops, self.built.source, 0), states)
        self.driver = Driver(self.engine, states)
        self.state = self.built.algorithm.init(self.built.model, self.built.federation)
        self.number = 0

    @property
    def words(self) -> int:
        """The words of a vector: the weights of the model, and the client's."""
        return sum(leaf.numel() for leaf in self.state["model"].values()) + 1

    def round(self, lost: int) -> dict[str, float]:
        """What a client that lasts sends and gets, and the seconds, in a round in which so many clients are lost."""
        self.number += 1
        self.driver.tally, self.engine.seconds = Tally(), 0.0
        self.engine.lost = frozenset(range(lost))
        context = RoundContext(self.number, 10_000, self.built.federation, Rng((0, "round", self.number)))
        start = time.process_time()
        self.state = self.driver.drive(self.built.algorithm.round(self.state, context), self.number)
        seconds, steps = time.process_time() - start, self.driver.tally.traffic.rows.values()
        return {
            "up": round(sum(step["bytes_up"] / step["replies"] for step in steps)),
            "down": round(sum(step["bytes_down"] / step["asks"] for step in steps)),
            "client_seconds": self.engine.seconds / self.cohort,
            "server_seconds": seconds - self.engine.seconds,
        }


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


def measured(
    cohort: int, rates: Sequence[float], model: str, only: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each rate of drop-out and each of these aggregates that is for so many clients."""
    kinds = {
        name: Rounds(cohort, TABLES[name], model)
        for name in only
        if CLIENTS.get(name, (1, cohort))[0] <= cohort <= CLIENTS.get(name, (1, cohort))[1]
    }
    repeats = max(1, 30 // cohort)
    for rate in rates:
        lost = int(rate * cohort)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        refused: dict[str, str] = {}
        for _ in range(repeats):
            for name, rounds in kinds.items():
                try:
                    found[name].append(rounds.round(lost))
                except RoundRefused as error:
                    refused[name] = str(error)
        for name, each in found.items():
            row = {"aggregate": name, "clients": cohort, "lost": lost, "words": kinds[name].words}
            if name in refused:
                yield {**row, "refused": refused[name]}
            else:
                best = {key: min(one[key] for one in each) for key in each[0]}
                yield {
                    **row,
                    "rounds": repeats,
                    **{key: float(f"{value:.4g}") for key, value in best.items()},
                }


def masks(words: int, passes: int) -> tuple[float, float]:
    """The smallest seconds of adding `passes` masks to a vector, and of bare AES-256-CTR over as many bytes."""
    vector = np.zeros(words, np.uint32)
    zeros, stream = bytes(vector.nbytes), bytearray(vector.nbytes)
    keys = [bytes([k]) * 32 for k in range(passes)]

    def bare() -> None:
        for key in keys:
            Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update_into(zeros, stream)

    return _smallest(lambda: add_masks(vector, [(key, 1) for key in keys]), bare)


def coding(words: int, cohort: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The smallest seconds of coding a mask, and of decoding it, each beside the bare products of the halves."""
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
    with threadpool_limits(1):
        return (
            _smallest(lambda: coded(parts[:-noise], parts[-noise:], cohort), lambda: left[0] @ halves),
            _smallest(lambda: decoded(rows, survive - noise, cohort), lambda: left[1] @ halves),
        )


def _smallest(ours: Callable[[], Any], bare: Callable[[], Any]) -> tuple[float, float]:
    """The smallest seconds of processor time of two functions, which take turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for work, seconds in zip((ours, bare), taken, strict=True):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
    return min(taken[0]), min(taken[1])


def main() -> None:
    """Prints a line for each number of clients, rate and aggregate, or compares masks and codes with bare ones."""
    parser = argparse.ArgumentParser(description="Secure sums against plain aggregation.")
    parser.add_argument("file", type=Path, nargs="?", help="gets a line of JSON for each measurement")
    parser.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--coding", action="store_true", help="compare masks and codes with bare ones")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for cohort in asked.cohorts:
        if asked.coding:
            coded_seconds, decoded_seconds = coding(CODED, cohort)
            both = {"masks": masks(CODED, cohort), "coding": coded_seconds, "decoding": decoded_seconds}
            for name, (ours, bare) in both.items():
                print(
                    f"{cohort:4} clients, {name}: {ours * 1e3:.1f} ms, bare {bare * 1e3:.1f} ms: "
                    f"{ours / bare:.2f} times",
                    flush=True,
                )
            continue
        for row in measured(cohort, asked.rates, asked.model, asked.only):
            line = json.dumps(row)
            print(line, flush=True)
            if asked.file:
                with asked.file.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
