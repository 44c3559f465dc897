"""Rounds of FedLab's standalone simulation: its serial trainer and its synchronous server, in one process.

The round is what `StandalonePipeline.main` does between two evaluations. Batches are views into tensors that were
gathered once an epoch: no DataLoader.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import turns
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler


class Clients:
    """Every client's tensors, in the form that FedLab's trainer asks for."""

    def __init__(self, workload: Any) -> None:
        self.workload = workload
        self.images, self.labels = workload.tensors()
        self.rng = torch.Generator().manual_seed(1)

    def get_dataloader(self, client: int, size: int) -> turns.Batches:
        """The client's batches, shuffled anew whenever they are gone through."""
        assert size == self.workload.batch
        return turns.Batches(self.workload, self.images[client], self.labels[client], self.rng)


def main() -> None:
    """Rounds of FedAvg for as long as they are asked for."""
    asked = turns.arguments("FedLab")
    line = turns.Turns()
    torch.set_num_threads(asked.threads)
    limit = turns.load_limit()
    limit.keep_freed_memory()
    workload = turns.workload_of(asked.workload)
    model = turns.start_of(workload, contiguous=True)  # FedLab flattens the weights by `view`
    server = SyncServerHandler(model, global_round=10**9, sample_ratio=turns.share_of(workload))
    trainer = SGDSerialClientTrainer(model, workload.clients)
    trainer.setup_dataset(Clients(workload))
    trainer.setup_optim(workload.epochs, workload.batch, workload.lr)
    server.num_clients = trainer.num_clients
    assert server.num_clients_per_round == workload.cohort
    line.ready()
    while line.wait():
        began = time.perf_counter()
        trainer.local_process(server.downlink_package, server.sample_clients())
        for reply in trainer.uplink_package:
            server.load(reply)
        line.done(time.perf_counter() - began, [server.model_parameters])


if __name__ == "__main__":
    main()
