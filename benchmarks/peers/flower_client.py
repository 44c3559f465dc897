"""What a client of Flower does: in a module of its own, so that a task carries its name and not its code."""

from __future__ import annotations

from typing import Any

import torch
import turns
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
_learners: dict[str, Any] = {}  # of this actor: data and model stay for all rounds


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Local SGD from the weights of the message: the limit's own loop over the limit's own tensors."""
    config = message.content["config"]
    learner = _learner(str(config["workload"]), int(config["threads"]))
    arrays = message.content["arrays"].to_torch_state_dict()
    client = int(context.node_config["partition-id"])
    weights = [arrays[name] for name, _ in learner.model.named_parameters()]
    learner.train(weights, client, seed=int(config["server-round"]) * 1_000_003 + client)
    reply = {
        "arrays": ArrayRecord(learner.model.state_dict()),
        "metrics": MetricRecord({"num-examples": learner.workload.examples}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


def _learner(workload: str, threads: int) -> Any:
    if workload not in _learners:
        torch.set_num_threads(threads)
        load = turns.workload_of(workload)
        _learners[workload] = turns.load_limit().Learner(load, *load.tensors())
    return _learners[workload]
