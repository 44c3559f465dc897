"""Evaluates many models on the server's data: the numbers that a run records of its global model, for any tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, Literal

import torch

from fedlens.base.errors import ConfigError
from fedlens.base.threads import first, own_cores
from fedlens.core.arithmetic import PLAIN, Arithmetic
from fedlens.core.measured import Measured, Total
from fedlens.core.modules import Loadable, module_in
from fedlens.core.protocol import ModelSpec, Program
from fedlens.core.random import random_state_kept
from fedlens.core.tree import Tree
from fedlens.run.build import Built
from fedlens.tasks.central_evaluation import evaluation_batch, measured_together, stretches_of, task_metrics
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

_AT_ONCE = 16  # models that share the reading of a batch
_MEMORY = 2**28  # bytes of their weights

Each = Callable[[Callable[[Loadable], Measured], Sequence[Loadable]], Iterable[Measured]]


class ModelEvaluator:
    """Measures models of one architecture on the examples of one client, or of the server.

    On a CPU the metrics are to the bit those that a run with this model, task, batch size and number of threads
    records. On a GPU they agree up to rounding.

    Args:
        model: how the module is built; trees have its names and shapes.
        task: measures the outputs.
        data: the examples, such as `built.source.data_of("@test")`.
        examples: how many of them are measured, from the first one on.
        batch_size: examples per forward pass.
        size: at which images are evaluated.
        device, arithmetic: where and in which number format the models compute.
        threads: threads per computation, the setting `engine.threads`. `several` evaluates as many models at once as
            there are cores for so many threads each.
        task_name: the name of the task in messages; by default the kind of its data.
    """

    def __init__(
        self,
        model: ModelSpec,
        task: Task,
        data: Any,
        examples: int,
        batch_size: int,
        size: EvaluationSize = FULL,
        *,
        device: str = "cpu",
        arithmetic: Arithmetic = PLAIN,
        threads: int = 1,
        task_name: str | None = None,
    ) -> None:
        self.model, self.task, self.data, self.examples = model, task, data, examples
        self.batch_size, self.size, self.threads = batch_size, size, threads
        self.task_name = task_name or task.kind
        self.device, self.arithmetic = torch.device(device), arithmetic
        self._scratch: dict[Any, Any] = {}

    def learner(self, tree: Tree, which: int = 0) -> Loadable:
        """The module with the leaves of this tree; the next call with the same number loads another tree into it."""
        learner = self._module(which)
        learner.load(tree)
        return learner

    def metrics(self, tree: Tree) -> dict[str, float]:
        """The metrics by name: the columns `test_<name>` of a run's metrics.jsonl without the prefix."""
        with self.computing():
            return self._metrics([self.learner(tree)], map)[0]

    def several(self, trees: Iterable[Tree]) -> Iterator[dict[str, float]]:
        """The metrics of each tree in turn, equal to those of `metrics` to the bit.

        Up to 16 models share the reading of each batch, and one thread per core evaluates them.
        """
        workers = max(1, own_cores() // self.threads) if self.device.type == "cpu" else 1
        remaining = iter(trees)
        with ExitStack() as ending:
            each: Each = map
            if workers > 1:
                started = ThreadPoolExecutor(
                    workers, initializer=torch.set_num_threads, initargs=(self.threads,)
                )
                each = ending.enter_context(started).map
            while group := list(islice(remaining, self._at_once())):
                # Torch's settings are restored before the caller goes on.
                with self.computing():
                    found = self._metrics([self.learner(tree, k) for k, tree in enumerate(group)], each)
                yield from found

    def require_loss(self) -> None:
        """Raises `ConfigError` if evaluations of this task have no loss, as those of detection."""
        names = self.task.known_metrics()
        if names is not None and "loss" not in names:
            raise ConfigError(
                f"evaluations of {self.task_name} have no loss to compare models by",
                where="task.name",
                hint="analyze a run of classification or segmentation",
            )

    def evenly(self, count: int) -> ModelEvaluator:
        """The evaluator of at most `count` of the examples, at equal distances: data may be sorted by class."""
        if count >= self.examples:
            return self
        at = torch.linspace(0, self.examples - 1, count, dtype=torch.float64).round().long()
        return ModelEvaluator(
            self.model,
            self.task,
            self.data.take(at),
            count,
            self.batch_size,
            self.size,
            device=str(self.device),
            arithmetic=self.arithmetic,
            threads=self.threads,
            task_name=self.task_name,
        )

    def outputs(self, tree: Tree, most: int | None = None) -> Iterator[tuple[Any, Any]]:
        """The outputs of this model and the targets, batch by batch, of the first `most` examples, or of all."""
        module = self.learner(tree).module.eval()
        stop = self.examples if most is None else min(most, self.examples)
        with ExitStack() as ending:
            for inputs, targets in first(self.data.stretches(0, stop, self.batch_size), None, ending):
                with self.computing(), torch.inference_mode():
                    outputs = self.size(self.task, module, inputs, targets)
                yield outputs, targets

    def _at_once(self) -> int:
        return max(1, min(_AT_ONCE, _MEMORY // max(1, self._module(0).weight_bytes)))

    @property
    def layer_kinds(self) -> dict[str, str]:
        """The class of each module by its path, such as "Conv2d"."""
        return {path: type(layer).__name__ for path, layer in self._module(0).module.named_modules()}

    def _module(self, which: int) -> Loadable:
        with self.arithmetic.on(self.device):
            return module_in(self.model, self._scratch, self.device, self.arithmetic, str(which))

    def _metrics(self, learners: Sequence[Loadable], each: Each) -> list[dict[str, float]]:
        totals = [Total() for _ in learners]
        for start, stop in stretches_of(self.examples, self.model.input_shape):
            parts = measured_together(
                self.task, learners, self.data, self.batch_size, start, stop, self.size, each
            )
            for total, part in zip(totals, parts, strict=True):
                total.add(Measured.from_payload(part.to_payload()))  # as a worker sends it
        return [task_metrics(self.task, total.result() if total.count else None) for total in totals]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Sets the number of threads and PyTorch's options; the end restores them and the random state."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self.threads)
            with self.arithmetic.on(self.device), random_state_kept(self.device):
                yield
        finally:
            torch.set_num_threads(before)


def evaluator_of(built: Built, on: Literal["test", "validation"] = "test") -> ModelEvaluator:
    """Evaluates models as the run does, on its test data or on the examples held out for validation.

    Raises `ConfigError` if the run holds out no examples.
    """
    name, held = f"@{on}", built.federation.held
    if name not in held:
        at_clients = built.config.data.validation_from == "client"
        why = "the clients hold out their own examples" if at_clients else "no examples are held out"
        raise ConfigError(
            f"the server has no validation data, because {why}",
            where="data.validation",
            hint="evaluate on the test data"
            + ("" if at_clients else ", or set data.validation = 0.1 in a new run"),
        )
    program = built.engine.applied(Program({}, built.source, 0))
    device = torch.device(program.device)
    source = built.source if device.type == "cpu" else built.source.on(device)
    return ModelEvaluator(
        built.model,
        built.task,
        source.data_of(name),
        held[name],
        evaluation_batch(
            built.config.evaluation.batch_size,
            built.task,
            built.client_data.dataset.info,
            built.evaluation_size,
        ),
        built.evaluation_size,
        device=program.device,
        arithmetic=program.arithmetic,
        threads=int(built.config.engine.get("threads", 1)),
        task_name=built.config.task["name"],
    )
