"""One GPU: clients in one batch, one after the other, and in a loop of CUDA graphs; and the share of the peak.

    python -m benchmarks.gpu                        # everything, on the first GPU
    python -m benchmarks.gpu --precision bf16 --pairs 12

Three questions, each with its goal:

- `mcmahan-cnn`, 100 clients a round: `vectorized` at least 10 times `inline`, and 3 times a loop over clients whose
  step is one CUDA graph, replayed.
- hsu2019's CIFAR-10 setting (100 clients x 500 images, 10 a round, one epoch): 20 rounds a second.
- `hsu-cnn` at 32 x 32 and a ResNet-18 at 224 x 224: FLOP/s of training, as a share of the data sheet's peak.

Rounds are taken in turn; figures are medians, ratios with their 95 % intervals. Without a GPU it exits
with code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import Candidate, Measurement, take_turns
from fedlens.benchmark.limit import WORKLOADS, Workload
from fedlens.benchmark.pairs import ratio
from fedlens.benchmark.profile_peak import peak_of
from fedlens.core.arithmetic import Arithmetic

GPU = torch.device("cuda")
MANY = replace(WORKLOADS["mnist-cnn"], name="100 clients of mnist-cnn", cohort=100)
HSU2019 = WORKLOADS["cifar-cnn"]


class Graphed:
    """A loop over clients in bare PyTorch; its step is captured once and replayed for every batch."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        images, labels = workload.tensors()
        self.images, self.labels = images.to(GPU), labels.to(GPU)
        self.module = workload.model().to(GPU)
        self.parameters = list(self.module.parameters())
        self.server = [p.detach().clone() for p in self.parameters]
        self.x = torch.zeros(workload.batch, *workload.shape, device=GPU)
        self.y = torch.zeros(workload.batch, dtype=torch.int64, device=GPU)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        loss = nn.functional.cross_entropy(self.module(self.x), self.y)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.workload.lr)

    def round(self) -> float:
        """Runs one round and returns its seconds."""
        w = self.workload
        torch.cuda.synchronize()
        start = time.perf_counter()
        total = [torch.zeros_like(p) for p in self.server]
        with torch.no_grad():
            for client in torch.randperm(w.clients)[: w.cohort].tolist():
                torch._foreach_copy_(self.parameters, self.server)
                order = torch.randperm(w.examples, device=GPU)[: w.examples // w.batch * w.batch]
                images, labels = self.images[client][order], self.labels[client][order]
                for x, y in zip(images.split(w.batch), labels.split(w.batch), strict=True):
                    self.x.copy_(x)
                    self.y.copy_(y)
                    self.graph.replay()
                torch._foreach_add_(total, self.parameters, alpha=1 / w.cohort)
        self.server = total
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        """Does nothing: there are no workers."""


def in_turn(makers: Mapping[str, Callable[[], Candidate]], pairs: int) -> dict[str, list[float]]:
    """The seconds of each candidate, in turn after a warm-up. Exits with the reason where one fails."""
    measurements = [Measurement(name, "fedlens", maker) for name, maker in makers.items()]
    take_turns(measurements, pairs)
    for measurement in measurements:
        if not measurement.ran:
            raise SystemExit(f"{measurement.name} did not run: {measurement.reason}")
    return {measurement.name: measurement.seconds for measurement in measurements}


def resnet18() -> nn.Module:
    """The ResNet-18 of torchvision, with group normalization."""
    from torchvision.models import resnet18

    return resnet18(num_classes=1000, norm_layer=lambda channels: nn.GroupNorm(32, channels))


def achieved(
    model: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, precision: Any
) -> dict[str, float]:
    """FLOP/s of training steps, and their share of the peak."""
    arithmetic = Arithmetic(precision, channels_last=True)
    module = arithmetic.fit(model(), GPU)
    x = torch.randn(batch, *shape, device=GPU)
    y = torch.zeros(batch, dtype=torch.int64, device=GPU)
    parameters: list[Tensor] = list(module.parameters())

    def step() -> None:
        gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.01)

    with FlopCounterMode(display=False) as counter:
        step()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start, steps = time.perf_counter(), 20
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    flops = counter.get_total_flops() * steps / (time.perf_counter() - start)
    return {"tflops": flops / 1e12, "share of the peak": flops / peak_of("cuda", precision, 1).flops}


def main() -> None:
    """Prints the figures, and as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description="What one GPU does.")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--json", help="a file for the figures")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    how = {"device": "cuda", "precision": asked.precision}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **how}

    makers: dict[str, Callable[[], Candidate]] = {
        name: partial(Federation, MANY, {"name": name, **how}) for name in ("inline", "vectorized")
    }
    took = in_turn({**makers, "CUDA graphs": partial(Graphed, MANY)}, asked.pairs)
    found["100 clients of mcmahan-cnn"] = {
        **{f"{name}, s": statistics.median(seconds) for name, seconds in took.items()},
        "times inline (goal 10)": str(ratio(took["inline"], took["vectorized"])),
        "times CUDA graphs (goal 3)": str(ratio(took["CUDA graphs"], took["vectorized"])),
    }
    makers = {
        name: partial(Federation, HSU2019, {"name": name, **how, **more})
        for name, more in (("vectorized", {}), ("inline", {}), ("processes", {"workers": 4}))
    }
    took = in_turn(makers, asked.pairs)
    rates = {name: 1 / statistics.median(seconds) for name, seconds in took.items()}
    found["hsu2019 on CIFAR-10"] = {f"{name}, rounds/s (goal 20)": rate for name, rate in rates.items()}
    found["hsu-cnn, batches of 256"] = achieved(HSU2019.model, HSU2019.shape, 256, asked.precision)
    found["resnet-18 at 224 x 224, batches of 64"] = achieved(resnet18, (3, 224, 224), 64, asked.precision)
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
