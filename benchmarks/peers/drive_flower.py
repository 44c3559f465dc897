"""Rounds of Flower's simulation, with its Ray backend: an actor for each process, and nothing evaluated.

The round is what Flower's own `FedAvg.start` does for training: sample the nodes, send and receive, aggregate.
Clients index their tensors directly: no DataLoader, and data and model stay in the actor.
"""

from __future__ import annotations

import os
import time
import warnings

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else Ray's workers give way to all others

import flower_client
import turns
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

asked = turns.arguments("Flower")
line = turns.Turns()
workload = turns.workload_of(asked.workload)
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Rounds of FedAvg for as long as they are asked for."""
    strategy = FedAvg(
        fraction_train=workload.cohort / workload.clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.cohort,
        min_available_nodes=workload.clients,
    )
    model = turns.start_of(workload)
    arrays, number = ArrayRecord(model.state_dict()), 0
    config = ConfigRecord({"workload": asked.workload, "threads": asked.threads})
    line.ready()
    while line.wait():
        number += 1
        began = time.perf_counter()
        messages = strategy.configure_train(number, arrays, config, grid)
        replies = list(grid.send_and_receive(messages, timeout=3600))
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != workload.cohort:
            raise RuntimeError(f"{len(failed)} of {len(replies)} replies failed: {failed[:1]}")
        averaged, _ = strategy.aggregate_train(number, replies)
        assert averaged is not None
        arrays = averaged
        seconds = time.perf_counter() - began
        line.done(seconds, arrays.to_torch_state_dict().values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=workload.clients,
        backend_config={
            "client_resources": {"num_cpus": float(asked.threads), "num_gpus": 0.0},
            "init_args": {"num_cpus": asked.processes * asked.threads},
        },
    )
