"""Runs single rounds of fedlens on a workload, so that they can be timed in turn with other candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedlens.benchmark.limit import Workload, cifar_cnn, linear, mnist_cnn
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.traits import traits_of
from fedlens.run.build import build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of

MODELS = {cifar_cnn: "hsu-cnn", mnist_cnn: "mcmahan-cnn", linear: "linear"}
_MANY = 1_000_000  # rounds: more than any benchmark takes


class Federation:
    """Rounds of an algorithm of fedlens on a workload, timed as a run times a round's `seconds`.

    `engine` is the run's table `[engine]`; without a device it trains on that of the workload. `model` names the model,
    by default the workload's. With `parties`, such as "quadrants", these have parts of all images in place of clients.
    Images are random bytes, with the number and shape of the limit's. Raises `ConfigError` where the engine's settings
    are invalid.

    >>> tiny = Workload("tiny", linear, clients=4, examples=20, shape=(1, 28, 28), cohort=2, batch=10)
    >>> federation = Federation(tiny, {"name": "inline"})
    >>> federation.round() > 0
    True
    >>> federation.close()
    """

    def __init__(
        self,
        workload: Workload,
        engine: Mapping[str, Any],
        algorithm: str | Mapping[str, Any] = "fedavg",
        model: str | None = None,
        parties: str | None = None,
    ) -> None:
        partition = {"name": "iid", "clients": workload.clients}
        on_cluster = traits_of(engine).place == "cluster"  # which places its workers
        settings = {
            "rounds": _MANY,
            "data": {
                "dataset": {
                    "name": "synthetic",
                    "shape": list(workload.shape),
                    "train": workload.clients * workload.examples,
                    "test": 10,
                },
                **({"parties": {"split": parties}} if parties else {"partition": partition}),
            },
            "model": MODELS[workload.model] if model is None else model,
            "algorithm": algorithm,
            **({} if parties else {"select": {"clients_per_round": workload.cohort}}),
            "local": {"lr": workload.lr, "epochs": workload.epochs, "batch_size": workload.batch},
            "engine": {**({} if on_cluster else {"device": workload.device}), **engine},
        }
        self.built = build(plan_of(Source(settings)), Path(), download=False)
        self.number = 0
        engine_table = dict(self.built.config.engine)  # with what `auto` has chosen
        self.about = {
            "processes": engine_table.get("workers") or 1,
            "threads": engine_table.get("threads", 1),
            "engine": engine_table,
        }
        self.on_gpu = str(engine_table.get("device")).startswith("cuda")
        self.built.engine.listen(self._chosen)
        states = ClientStates()
        self.built.engine.open(Program(self.built.algorithm.ops, self.built.source, 0), states)
        # As the engine wants them in this process; others open after it.
        self.threads = torch.get_num_threads()
        self.driver = Driver(self.built.engine, states)
        self.state = self.built.on_device(self.built.algorithm.init(self.built.model, self.built.federation))

    def _chosen(self, line: str | None, choice: Mapping[str, Any]) -> None:
        """Notes what the engine chose during the run."""
        self.about |= {"processes": choice.get("workers", 1), "chosen": dict(choice)}

    def round(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Runs one round and returns its seconds, by default of wall time."""
        self.number += 1
        self.driver.tally = Tally()
        context = RoundContext(self.number, _MANY, self.built.federation, Rng((0, "round", self.number)))
        torch.set_num_threads(self.threads)
        start = clock()
        self.state = self.driver.drive(self.built.algorithm.round(self.state, context), self.number)
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = clock() - start
        assert self.driver.tally.failed == 0
        return seconds

    def close(self) -> None:
        """Ends the workers."""
        self.built.engine.close()
