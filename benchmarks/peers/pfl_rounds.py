"""Rounds of pfl's FederatedAveraging in one process: the first one of a run, or one beside it.

pfl joins the other processes while it is imported, so `drive_pfl.py` imports this when they have been started.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import turns
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Model(torch.nn.Module):
    """A model of the limit with what pfl asks of one."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
        """Mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> dict[str, Any]:
        """Nothing is measured."""
        return {}


class InTurn(TrainingProcessCallback):  # type: ignore[misc]
    """Lets the first process wait before every round until one is asked for, and the others for the first."""

    def __init__(self, line: turns.Turns | None) -> None:
        self.line, self.began = line, 0.0

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Before the first round."""
        if self.line:
            self.line.ready()
        self._wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """After every round; the first value says whether to stop."""
        if self.line:
            self.line.done(time.perf_counter() - self.began, model.pytorch_model.parameters())
        return not self._wait(), Metrics()

    def _wait(self) -> bool:
        go = torch.tensor([float(self.line is not None and self.line.wait())])
        (going,) = pytorch_ops.distributed.all_reduce([go])
        self.began = time.perf_counter()
        return bool(going.item())


def train(asked: argparse.Namespace, line: turns.Turns | None) -> None:
    """Rounds of federated averaging for as long as they are asked for on the line that the first process has."""
    torch.set_num_threads(asked.threads)
    limit = turns.load_limit()
    limit.keep_freed_memory()
    workload = turns.workload_of(asked.workload)
    images, labels = workload.tensors()
    layers = turns.start_of(workload)
    rng = torch.Generator().manual_seed(1)

    def client(user: int) -> Any:
        order = torch.randperm(workload.examples, generator=rng)  # pfl does not shuffle: anew in every round
        tensors = turns.laid_out(workload, images[user][order]), labels[user][order]
        return PyTorchTensorDataset(tensors, user_id=str(user))

    np.random.seed(0)  # the same cohorts in every process
    draw = np.random.RandomState(0)
    cohort: list[int] = []

    def sample() -> int:
        if not cohort:  # without replacement within a round
            cohort.extend(draw.permutation(workload.clients)[: workload.cohort].tolist())
        return cohort.pop()

    model = Model(layers)
    FederatedAveraging().run(
        backend=SimulatedBackend(FederatedDataset(client, sample), None),
        model=PyTorchModel(
            model,
            lambda parameters, lr: torch.optim.SGD(parameters, lr, foreach=False),
            torch.optim.SGD(model.parameters(), 1.0),
        ),
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=workload.cohort,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.lr,
            local_batch_size=workload.batch,
        ),
        callbacks=[InTurn(line)],
        send_metrics_to_platform=False,
    )
