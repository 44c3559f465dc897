"""Rounds of BlazeFL's FedAvg in its pool of threads or of processes, with nothing evaluated.

The round is what the pipeline of BlazeFL's quickstart does between two evaluations. BlazeFL starts its pool anew in
every round. Batches are views into tensors that were gathered once an epoch: no DataLoader. Each thread or process has
one model. Processes are forked and share the parameters in memory. BlazeFL saves the state of each client's random
numbers to a file, here in `/dev/shm` where that exists.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import turns
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode


class Batches(turns.Batches):
    """A client's batches, with the attribute that BlazeFL reads of a DataLoader."""

    dataset = None


class Clients:
    """Every client's tensors, in place of BlazeFL's partitioned dataset; forked processes have them already."""

    workload: Any
    images: torch.Tensor
    labels: torch.Tensor

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: torch.Generator) -> Batches:
        """The client's batches, shuffled anew in every pass."""
        assert batch_size == self.workload.batch
        return Batches(self.workload, self.images[cid], self.labels[cid], generator)

    def set_dataset(self, type_: str, cid: int, dataset: Any) -> None:
        """Does nothing: the tensors stay where they are."""


class Models:
    """The workload's model, one for each thread; the weights of a client's start are loaded by BlazeFL."""

    start: torch.nn.Module
    of_thread = threading.local()

    def select_model(self, name: str) -> torch.nn.Module:
        """The model of this thread."""
        if not hasattr(self.of_thread, "model"):
            self.of_thread.model = copy.deepcopy(self.start)
        return self.of_thread.model  # type: ignore[no-any-return]


class Threads(FedAvgThreadPoolClientTrainer):  # type: ignore[misc]
    """Its pool of threads, without a progress bar."""

    def progress_fn(self, it: list[Any]) -> Iterable[Any]:
        """The replies as they arrive."""
        return as_completed(it)


class Processes(FedAvgProcessPoolClientTrainer):  # type: ignore[misc]
    """Its pool of processes, without a progress bar."""

    def progress_fn(self, it: list[Any]) -> Iterable[Any]:
        """The replies in order."""
        return it


def trainer_of(mode: str, workload: Any, workers: int, home: Path) -> Threads | Processes:
    """BlazeFL's trainer in this mode, with so many clients at once."""
    common = {
        "model_selector": Models(), "model_name": workload.name, "dataset": Clients(), "device": "cpu", "seed": 1,
        "num_clients": workload.clients, "epochs": workload.epochs, "batch_size": workload.batch, "lr": workload.lr,
        "num_parallels": workers,
    }  # fmt: skip
    if mode == "threads":
        return Threads(**common)
    return Processes(**common, share_dir=home, state_dir=home, ipc_mode=IPCMode.SHARED_MEMORY)


def rounds(asked: Any, line: turns.Turns, home: Path) -> None:
    """Rounds of FedAvg for as long as they are requested."""
    Clients.workload = workload = turns.workload_of(asked.workload)
    Clients.images, Clients.labels = workload.tensors()
    Models.start = turns.start_of(workload, contiguous=True)  # BlazeFL flattens the weights by `view`
    trainer = trainer_of(asked.mode, workload, asked.processes, home)
    server = FedAvgBaseServerHandler(
        Models(), workload.name, Clients(), 10**9, workload.clients, turns.share_of(workload), "cpu",
        workload.batch, seed=0,
    )  # fmt: skip
    assert server.num_clients_per_round == workload.cohort
    line.ready()
    while line.wait():
        began = time.perf_counter()
        cohort = server.sample_clients()
        trainer.local_process(server.downlink_package(), cohort)
        for reply in trainer.uplink_package():
            server.load(reply)
        line.done(time.perf_counter() - began, server.model.parameters())


def main() -> None:
    """The command line."""
    asked = turns.arguments("BlazeFL", modes=("threads", "processes"))
    line = turns.Turns()

    def begin_child() -> None:
        turns.end_with_parent()
        torch.set_num_threads(asked.threads)

    if asked.mode == "processes":
        mp.set_start_method("fork")
        os.register_at_fork(after_in_child=begin_child)
    # A forked process hangs in its first parallel loop if the process before it has had threads.
    torch.set_num_threads(asked.threads if asked.mode == "threads" else 1)
    turns.load_limit().keep_freed_memory()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="blazefl-", dir=memory if memory.is_dir() else None) as home:
        rounds(asked, line, Path(home))


if __name__ == "__main__":
    main()
