"""The limit: the same federated averaging in bare PyTorch.

A round takes a random cohort, gives every client the global weights, runs plain local SGD over its tensors, and
averages the weights by hand. The clients are distributed over P processes of T threads. There are no settings, checks,
metrics or client states: only the arithmetic that this machine has to do. fedlens is measured as a ratio to it, so
nothing of fedlens may be imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

Optimizer = Literal["plain", "foreach", "fused", "forloop"]


def cifar_cnn() -> nn.Module:
    """The CNN of hsu2019: 1,756,426 parameters at 3x32x32 and ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10),
    )  # fmt: skip


def mnist_cnn() -> nn.Module:
    """McMahan's CNN: 1,663,370 parameters at 1x28x28 and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def linear() -> nn.Module:
    """One linear layer over the pixels: 7,850 parameters at 1x28x28 and ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


@dataclass(frozen=True)
class Workload:
    """A model, and a population of equal clients that hold random images.

    The defaults of `optimizer` and `keep_memory` are the fastest that `python -m benchmarks.limit --variants` found.

    Attributes:
        examples: images of each client.
        cohort: clients a round.
        optimizer: how a step is taken: by hand (`plain`), or by a form of `torch.optim.SGD`.
        channels_last: the memory layout of images and convolutions; the benchmark tries both.
        keep_memory: whether freed memory is kept for the next batch.
        alike: whether all images of a client are the same, so that their order does not matter.
        device: where it trains; processes share a GPU.
    """

    name: str
    model: Callable[[], nn.Module]
    clients: int
    examples: int
    shape: tuple[int, ...]
    cohort: int
    batch: int
    epochs: int = 1
    lr: float = 0.01
    optimizer: Optimizer = "plain"
    channels_last: bool = False
    keep_memory: bool = True
    alike: bool = False
    device: str = "cpu"

    @property
    def images(self) -> int:
        """Images trained on in one round, each counted once an epoch."""
        return self.cohort * self.examples * self.epochs

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Every client's images [clients, examples, *shape] and labels [clients, examples]."""
        rng = torch.Generator().manual_seed(seed)
        images = torch.empty(self.clients, self.examples, *self.shape)
        for client in images:  # one by one, so that the peak of memory is the result
            client.normal_(generator=rng)
        labels = torch.randint(10, (self.clients, self.examples), generator=rng)
        if self.alike:
            images[:], labels[:] = images[:, :1].clone(), labels[:, :1].clone()
        return images, labels


WORKLOADS = {
    w.name: w
    for w in (
        Workload("cifar-cnn", cifar_cnn, clients=100, examples=500, shape=(3, 32, 32), cohort=10, batch=32),
        Workload("mnist-cnn", mnist_cnn, clients=100, examples=600, shape=(1, 28, 28), cohort=10, batch=10),
        Workload("linear", linear, clients=1000, examples=60, shape=(1, 28, 28), cohort=100, batch=10),
    )
}


def keep_freed_memory() -> None:
    """Asks glibc to keep freed memory: otherwise every batch of a large model pays for its pages again.

    This affects the whole process and cannot be undone. Does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, 1 << 30)


class Learner:
    """One model, trained for one client after another; each process has one."""

    def __init__(self, workload: Workload, images: Tensor, labels: Tensor) -> None:
        if workload.keep_memory:
            keep_freed_memory()
        self.workload = workload
        self.images, self.labels = images.to(workload.device), labels.to(workload.device)
        self.model = workload.model().to(workload.device)
        if workload.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.weights = [p.detach() for p in self.parameters]  # the same memory, without autograd history
        self.step = self._by_hand
        if workload.optimizer != "plain":
            self.optimizer = torch.optim.SGD(
                self.parameters,
                lr=workload.lr,
                foreach=workload.optimizer == "foreach",
                fused=workload.optimizer == "fused",
            )
            self.step = self._by_optimizer
        self.loss = nn.functional.cross_entropy

    def train(self, weights: list[Tensor], client: int, seed: int) -> None:
        """Local SGD from `weights` on the client's examples, shuffled in every epoch."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, weights)
        rng = torch.Generator().manual_seed(seed)
        size = self.workload.batch
        for _ in range(self.workload.epochs):
            order = torch.randperm(self.workload.examples, generator=rng).to(self.images.device)
            images, labels = self.images[client][order], self.labels[client][order]
            if self.workload.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            for x, y in zip(images.split(size), labels.split(size), strict=True):
                self.step(self.loss(self.model(x), y))

    def _by_hand(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, self.parameters)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.add_(gradient, alpha=-self.workload.lr)

    def _by_optimizer(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def add_to(self, total: list[Tensor], share: float) -> None:
        """Adds `share` times the trained weights to `total`."""
        with torch.no_grad():
            torch._foreach_add_(total, self.parameters, alpha=share)


def synchronize(workload: Workload) -> None:
    """Waits until the GPU has computed everything that it was given."""
    if workload.device != "cpu":
        torch.cuda.synchronize(workload.device)


def fresh_weights(workload: Workload, seed: int = 0) -> list[Tensor]:
    """The initial weights of the federation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = workload.model().to(workload.device)
        if workload.channels_last:
            model.to(memory_format=torch.channels_last)
        return [p.detach().clone() for p in model.parameters()]


class BareLimit:
    """Rounds of bare federated averaging, in P persistent processes of T threads each.

    One process is this one, unless `apart`. Otherwise images, weights and sums are in shared memory, and each
    worker gets the cohort and replies with a word. Workers take the clients one by one from a shared counter, so
    that none idles while another has two left.

    >>> tiny = Workload("tiny", linear, clients=4, examples=20, shape=(1, 28, 28), cohort=2, batch=10)
    >>> limit = BareLimit(tiny, processes=1, threads=1)
    >>> limit.round() > 0
    True
    >>> limit.close()
    """

    def __init__(
        self, workload: Workload | str, processes: int = 1, threads: int = 1, *, apart: bool = False
    ) -> None:
        self.workload = WORKLOADS[workload] if isinstance(workload, str) else workload
        self.processes, self.threads, self.rounds = processes, threads, 0
        self.about: dict[str, Any] = {}
        self._here = processes == 1 and not apart
        # Workers share the weights; those of a GPU take a copy each round.
        self.weights = fresh_weights(self.workload if self._here else replace(self.workload, device="cpu"))
        images, labels = self.workload.tensors()
        self._workers: list[Any] = []
        if self._here:
            self._learner = Learner(self.workload, images, labels)
            self._sum = [torch.zeros_like(w) for w in self.weights]
            return
        spawn = mp.get_context("spawn")
        self._next = spawn.Value("q", 0)
        self._sums = [[torch.zeros_like(w).share_memory_() for w in self.weights] for _ in range(processes)]
        for tensor in (images, labels, *self.weights):
            tensor.share_memory_()
        for total in self._sums:
            here, there = spawn.Pipe()
            everything = (self.workload, threads, images, labels, self.weights, total, self._next, there)
            worker = spawn.Process(target=_work, args=everything, daemon=True)
            worker.start()
            there.close()
            self._workers.append((worker, here))
        for _, pipe in self._workers:
            pipe.recv()

    def round(self) -> float:
        """Runs one round of a random cohort and returns its wall time in seconds."""
        self.rounds += 1
        threads = self.threads if self._here else 1  # with workers, only sums are computed here
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        start = time.perf_counter()
        rng = torch.Generator().manual_seed(self.rounds)
        cohort = torch.randperm(self.workload.clients, generator=rng)[: self.workload.cohort].tolist()
        if self._here:
            torch._foreach_zero_(self._sum)
            for client in cohort:
                self._learner.train(self.weights, client, seed=self.rounds * 1_000_003 + client)
                self._learner.add_to(self._sum, 1 / len(cohort))
            self.weights, self._sum = self._sum, self.weights
            synchronize(self.workload)
        else:
            self._next.value = 0
            for _, pipe in self._workers:
                pipe.send((self.rounds, cohort))
            for _, pipe in self._workers:
                pipe.recv()
            torch._foreach_copy_(self.weights, self._sums[0])
            for total in self._sums[1:]:
                torch._foreach_add_(self.weights, total)
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends the workers."""
        for worker, pipe in self._workers:
            pipe.send(None)
            worker.join()
            pipe.close()
        self._workers = []


class BatchedLinear:
    """Rounds of the linear workload whose cohort is one batched product, written by hand with its gradient.

    The rounds equal those of `BareLimit` in one process, to rounding.

    >>> tiny = Workload("tiny", linear, clients=4, examples=20, shape=(1, 28, 28), cohort=2, batch=10)
    >>> one, batched = BareLimit(tiny), BatchedLinear(tiny)
    >>> one.round() > 0, batched.round() > 0
    (True, True)
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.weights, batched.weights, strict=True))
    True
    """

    def __init__(self, workload: Workload, threads: int = 1) -> None:
        assert workload.model is linear
        keep_freed_memory()
        self.workload, self.threads, self.rounds = workload, threads, 0
        self.about: dict[str, Any] = {}
        self.weights = fresh_weights(workload)
        images, labels = workload.tensors()
        self.images = images.flatten(0, 1).flatten(1).to(workload.device)
        self.labels = labels.flatten().to(workload.device)

    def round(self) -> float:
        """Runs one round of a random cohort and returns its wall time in seconds."""
        self.rounds += 1
        load = self.workload
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        rng = torch.Generator().manual_seed(self.rounds)
        cohort = torch.randperm(load.clients, generator=rng)[: load.cohort].tolist()
        weight, bias = (w.expand(load.cohort, *w.shape).clone() for w in self.weights)
        rngs = [torch.Generator().manual_seed(self.rounds * 1_000_003 + client) for client in cohort]
        share = 1 / load.batch
        for _ in range(load.epochs):
            orders = [
                torch.randperm(load.examples, generator=g) + client * load.examples
                for g, client in zip(rngs, cohort, strict=True)
            ]
            for places in torch.stack(orders).to(load.device).split(load.batch, dim=1):
                x = self.images.index_select(0, places.flatten()).view(load.cohort, load.batch, -1)
                y = self.labels.index_select(0, places.flatten()).view(load.cohort, load.batch, 1)
                slope = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)).softmax(2)
                slope.scatter_add_(2, y, torch.full_like(y, -1, dtype=slope.dtype))
                weight.baddbmm_(slope.transpose(1, 2), x, alpha=-load.lr * share)
                bias.sub_(slope.sum(1), alpha=load.lr * share)
        self.weights = [weight.mean(0), bias.mean(0)]
        synchronize(load)
        return time.perf_counter() - start

    def close(self) -> None:
        """Does nothing: there are no workers."""


def _work(
    workload: Workload,
    threads: int,
    images: Tensor,
    labels: Tensor,
    weights: list[Tensor],
    total: list[Tensor],
    counter: Any,
    pipe: Any,
) -> None:
    torch.set_num_threads(threads)
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = "ieee"  # as fedlens computes
    learner = Learner(workload, images, labels)
    sums = [each.to(workload.device) for each in total]  # on the processor the same tensors
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        number, cohort = message
        torch._foreach_zero_(sums)
        begun = [each.to(workload.device) for each in weights]
        while True:
            with counter.get_lock():
                slot = counter.value
                counter.value += 1
            if slot >= len(cohort):
                break
            learner.train(begun, cohort[slot], seed=number * 1_000_003 + cohort[slot])
            learner.add_to(sums, 1 / len(cohort))
        torch._foreach_copy_(total, sums)
        pipe.send("done")
