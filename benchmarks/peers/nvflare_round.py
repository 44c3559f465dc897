"""What NVFlare's server and its sites do in a round: in a module of its own, which the simulator finds by name."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import turns
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg


def workload() -> Any:
    """The workload of this run; not an argument of NVFlare's, which would read the braces as a variable."""
    return turns.workload_of(os.environ["FEDLENS_WORKLOAD"])


class InTurn(FedAvg):  # type: ignore[misc]
    """FedAvg that waits before every round until one is asked for, and writes no model into a file."""

    line: turns.Turns  # of the process that the server runs in

    def __init__(self, sites: int) -> None:
        start = turns.start_of(workload()).named_parameters()
        super().__init__(
            num_clients=sites,
            num_rounds=10**9,
            start_round=1,  # as the limit counts: the same cohorts
            persistor_id="",
            model={name: weight.detach().numpy() for name, weight in start},
            task_check_period=0.01,
        )
        self.sites, self.began = sites, 0.0

    def run(self) -> None:
        """All rounds."""
        self.line.ready()
        super().run()

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """The sites, all of them, once a round is asked for."""
        if not self.line.wait():
            raise SystemExit
        self.began = time.perf_counter()
        names: list[str] = super().sample_clients(num_clients)
        return names

    def save_model(self, model: FLModel) -> None:
        """Called with the new global model, at the end of a round."""
        seconds = time.perf_counter() - self.began
        if self._received_count != self.sites:
            raise RuntimeError(f"{self._received_count} of {self.sites} sites answered")
        self.line.done(seconds, map(torch.as_tensor, model.params.values()))


class Site(Executor):  # type: ignore[misc]
    """A site's share of the cohort: the limit's own loop over the limit's own tensors, which stay in the process."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.sites, self.learner = sites, None

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        """The mean of this share's weights, trained from those of the task."""
        learner = self._learner()
        task = FLModelUtils.from_shareable(shareable)
        names = [name for name, _ in learner.model.named_parameters()]
        weights = [torch.as_tensor(task.params[name]) for name in names]
        rng = torch.Generator().manual_seed(task.current_round)  # the same cohort in every site
        cohort = torch.randperm(learner.workload.clients, generator=rng)[: learner.workload.cohort]
        number = int(fl_ctx.get_identity_name().removeprefix("site-")) - 1
        share = cohort[number :: self.sites].tolist()
        total = [torch.zeros_like(weight) for weight in weights]
        for client in share:
            learner.train(weights, client, seed=task.current_round * 1_000_003 + client)
            learner.add_to(total, 1 / len(share))
        reply = FLModel(
            params_type=ParamsType.FULL,
            params={name: weight.numpy() for name, weight in zip(names, total, strict=True)},
            meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: len(share)},
        )
        return FLModelUtils.to_shareable(reply)

    def _learner(self) -> Any:
        if self.learner is None:
            turns.end_with_parent()
            torch.set_num_threads(int(os.environ["FEDLENS_THREADS"]))
            load = workload()
            self.learner = turns.load_limit().Learner(load, *load.tensors())
        return self.learner
