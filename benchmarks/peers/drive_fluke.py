"""Rounds of fluke's FedAvg: its clients one after the other, in one process, with nothing evaluated.

The round is what fluke's `CentralizedFL.run` does between its events `start_round` and `end_round`. Batches come from
its own `FastDataLoader`: views into tensors that are gathered once an epoch.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

os.environ["WANDB_MODE"] = "disabled"  # fluke imports it; nothing is sent anywhere

import torch
import turns
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver


class Stop(Exception):
    """No further round is requested."""


class Loader(FastDataLoader):  # type: ignore[misc]
    """fluke's loader, whose images have the workload's memory layout."""

    workload: Any

    def __iter__(self) -> Loader:
        super().__iter__()
        images, labels = self.tensors
        self.tensors = [turns.laid_out(self.workload, images), labels]
        return self


class Clients:
    """Every client's tensors, in place of fluke's splitter of a dataset."""

    def __init__(self, workload: Any) -> None:
        Loader.workload = self.workload = workload
        self.images, self.labels = workload.tensors()

    def assign(self, clients: int, size: int) -> tuple[tuple[list[Loader], list[None]], None]:
        """The clients' loaders for training; there are none for evaluation."""
        about = {"num_labels": 10, "batch_size": size, "shuffle": True, "skip_singleton": False}
        loaders = [Loader(self.images[client], self.labels[client], **about) for client in range(clients)]
        return (loaders, [None] * clients), None


class InTurn(FederationObserver):  # type: ignore[misc]
    """Waits at the start of every round until one is requested, and reports its end."""

    def __init__(self, line: turns.Turns) -> None:
        self.line, self.began = line, 0.0

    def start_round(self, round: int, global_model: Any) -> None:
        """Called before the clients are sampled."""
        self.model = global_model
        if not self.line.wait():
            raise Stop
        self.began = time.perf_counter()

    def end_round(self, round: int) -> None:
        """Called with the new global model in place."""
        self.line.done(time.perf_counter() - self.began, self.model.parameters())


def main() -> None:
    """Rounds of FedAvg for as long as they are requested."""
    asked = turns.arguments("fluke")
    line = turns.Turns()
    torch.set_num_threads(asked.threads)
    turns.load_limit().keep_freed_memory()
    workload = turns.workload_of(asked.workload)
    FlukeENV().set_seed(1)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    settings = {
        "model": turns.start_of(workload),
        "server": {"weighted": True},
        "client": {
            "batch_size": workload.batch,
            "local_epochs": workload.epochs,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": workload.lr},
            "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        },
    }
    federation = FedAVG(workload.clients, Clients(workload), DDict(settings))
    federation.set_callbacks([InTurn(line)])
    line.ready()
    with contextlib.suppress(Stop):
        federation.run(10**9, turns.share_of(workload))


if __name__ == "__main__":
    main()
