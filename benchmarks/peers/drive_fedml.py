"""Rounds of FedML's simulation in one process ("sp"): its FedAvg, client after client, with nothing evaluated.

FedML reports what it does to servers of its own; that is left out, and nothing is sent anywhere. In its first round,
which is not counted, the clients train one upon the other, for what they are handed is the live model; from the
second on a round is the limit's. Batches are views into tensors that were gathered once an epoch: no DataLoader.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch
import turns
from fedml.simulation.sp.fedavg import fedavg_api


class Silence:
    """In the place of the module that reports: whatever is looked up in it or called does nothing."""

    def __getattr__(self, name: str) -> Silence:
        return self

    def __call__(self, *arguments: Any, **more: Any) -> None:
        pass


class Stop(Exception):
    """No further round is asked for."""


class InTurn(fedavg_api.FedAvgAPI):  # type: ignore[misc]
    """FedAvg that waits before every round until one is asked for, and leaves the measuring out."""

    line: turns.Turns
    began: float | None = None

    def _client_sampling(self, *arguments: Any) -> Any:
        if self.began is not None:
            weights = self.model_trainer.get_model_params().values()
            self.line.done(time.perf_counter() - self.began, weights)
        if not self.line.wait():
            raise Stop
        self.began = time.perf_counter()
        return super()._client_sampling(*arguments)

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        pass


def main() -> None:
    """Rounds of FedAvg for as long as they are asked for."""
    asked = turns.arguments("FedML")
    line = turns.Turns()
    torch.set_num_threads(asked.threads)
    limit = turns.load_limit()
    limit.keep_freed_memory()
    workload = turns.workload_of(asked.workload)
    model = turns.start_of(workload)
    settings = SimpleNamespace(
        comm_round=10**9,
        frequency_of_the_test=10**9,
        client_num_in_total=workload.clients,
        client_num_per_round=workload.cohort,
        client_optimizer="sgd",
        learning_rate=workload.lr,
        epochs=workload.epochs,
        batch_size=workload.batch,
        dataset="random images",
    )
    images, labels = workload.tensors()
    rng = torch.Generator().manual_seed(1)
    clients = range(workload.clients)
    loaders = {k: turns.Batches(workload, images[k], labels[k], rng) for k in clients}
    sizes = dict.fromkeys(clients, workload.examples)
    total = workload.clients * workload.examples
    dataset = [total, 0, None, None, sizes, loaders, dict.fromkeys(clients), 10]
    federation = InTurn(settings, torch.device("cpu"), dataset, model)
    federation.line = line
    fedavg_api.mlops = Silence()
    line.ready()
    with contextlib.suppress(Stop):
        federation.train()


if __name__ == "__main__":
    main()
