"""Measures one GPU, section by section, with the name of the GPU beside each number.

    python -m benchmarks.gpu --json gpu.json             # everything, on the first GPU: about 15 minutes
    python -m benchmarks.gpu rounds groups --pairs 12    # some sections
    python -m benchmarks.gpu --precision bf16
    python -m benchmarks.gpu --tiny                      # tiny sizes, to see that everything runs

- `launches`: kernels of a round of `mcmahan-cnn`, counted by fedlens and recorded by PyTorch's profiler.
- `groups`: 100 clients of `mcmahan-cnn` a round. Goals: `vectorized` is 10 times as fast as `inline`, and 3 times as
  fast as a loop over clients whose step is one CUDA graph.
- `rounds`: hsu2019's setting on CIFAR-10, 100 clients of 500 images, 10 a round, one epoch. Goals: 20 rounds and
  100,000 images a second.
- `workers`: the same setting with 1, 2 and 4 workers on the GPU, with and without groups.
- `memory`: the memory of groups of 8 and 64 clients, and its estimate.
- `forms`: convolutions of 10 clients, forward and backward, in each form of `fedlens.local.vectorized.convolution`.
- `peak`: FLOP/s of training `hsu-cnn` at 32 x 32 and a ResNet-18 at 224 x 224, as a share of the data sheet's peak.
- `tests`: `pytest tests/gpu`, which compares the results of algorithms, tasks and components with the processor's.

Rounds are timed in turn. Figures are medians, ratios with their 95 % intervals. Each section is printed, and written to
the JSON file, when it ends. An error in a section is its result; then the others go on, and the exit status is 1.
Without a GPU the exit status is 1 too. On a simulated GPU (`tests/simulated_gpu`), CUDA graphs, the profiler and the
peak are skipped, and seconds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlens.base.profiling import recording
from fedlens.benchmark.comparison import ratio
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import Candidate, Measurement, take_turns
from fedlens.benchmark.limit import WORKLOADS, Workload
from fedlens.benchmark.profile import peak_of
from fedlens.benchmark.profile_client import LaunchCounter
from fedlens.core.arithmetic import Arithmetic
from fedlens.core.protocol import BatchedOp
from fedlens.local.vectorized.convolution import FORMS

GPU = torch.device("cuda")
ROOT = Path(__file__).parents[1]
SKIPPED = "skipped: a simulated GPU has none"
Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What the sections train: `many` and `hsu2019` are workloads, the rest counts."""

    many: Workload
    hsu2019: Workload
    batches: tuple[int, int]  # of hsu-cnn and of the ResNet-18
    side: int  # of the ResNet-18's images
    steps: int
    groups: tuple[int, ...]
    workers: tuple[int, ...]


FULL = Sizes(
    many=replace(WORKLOADS["mnist-cnn"], name="100 clients of mcmahan-cnn", cohort=100),
    hsu2019=WORKLOADS["cifar-cnn"],
    batches=(256, 64),
    side=224,
    steps=20,
    groups=(8, 64),
    workers=(1, 2, 4),
)
TINY = Sizes(
    many=replace(FULL.many, clients=4, examples=20, cohort=4),
    hsu2019=replace(FULL.hsu2019, clients=4, examples=20, cohort=2, batch=10),
    batches=(2, 2),
    side=32,
    steps=1,
    groups=(2,),
    workers=(1, 2),
)


@dataclass(frozen=True)
class Setting:
    """The command line: sizes, precision, and how many turns each measurement takes within how many seconds."""

    sizes: Sizes
    precision: Any
    pairs: int
    seconds: float

    def engine(self, name: str, **more: Any) -> dict[str, Any]:
        """The `[engine]` table of this engine on the GPU."""
        return {"name": name, "device": "cuda", "precision": self.precision, **more}


def simulated() -> bool:
    """Whether the GPU is the simulator's."""
    return torch.cuda.get_device_name().startswith("Simulated GPU")


class Graphed:
    """A loop over clients in bare PyTorch; its step is captured once and replayed for every batch."""

    def __init__(self, workload: Workload, precision: Any) -> None:
        self.workload, self.about = workload, dict[str, Any]()
        self.arithmetic = Arithmetic(precision, channels_last=False)
        images, labels = workload.tensors()
        self.images, self.labels = images.to(GPU), labels.to(GPU)
        self.x = torch.zeros(workload.batch, *workload.shape, device=GPU)
        self.y = torch.zeros(workload.batch, dtype=torch.int64, device=GPU)
        with self.arithmetic.on(GPU):
            self.module = self.arithmetic.fit(workload.model(), GPU)
            self.parameters: list[Tensor] = list(self.module.parameters())
            self.server = [p.detach().clone() for p in self.parameters]
            self.graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

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


def resnet18() -> nn.Module:
    """The ResNet-18 of torchvision, with group normalization."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=1000, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    return model


def achieved(model: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, asked: Setting) -> float:
    """FLOP/s of training steps."""
    arithmetic = Arithmetic(asked.precision, channels_last=True)
    with arithmetic.on(GPU):
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
        for _ in range(asked.sizes.steps // 4):
            step()
        torch.cuda.synchronize()
        start, steps = time.perf_counter(), asked.sizes.steps
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return float(counter.get_total_flops() * steps / (time.perf_counter() - start))


def in_turn(
    makers: Mapping[str, Callable[[], Candidate]], asked: Setting
) -> tuple[dict[str, list[float]], Found]:
    """The seconds of each candidate, in turn after a warm-up; and of those that fail, the reasons."""
    measurements = [Measurement(name, "fedlens", maker) for name, maker in makers.items()]
    take_turns(measurements, asked.pairs, asked.seconds)
    failed = {m.name: f"did not run: {m.reason}" for m in measurements if not m.ran}
    return {m.name: m.seconds for m in measurements if m.ran}, failed


def launches(asked: Setting) -> Found:
    """Kernels of a round."""
    found: Found = {}
    for name in ("inline", "vectorized"):
        federation = Federation(asked.sizes.many, asked.engine(name))
        try:
            federation.round()  # fills the caches
            with LaunchCounter("cuda") as counter, recording(counter.scope):
                counter.steps.append(0)
                federation.round()
            found[f"{name}, counted by fedlens, launches a round"] = sum(counter.steps)
            found[f"{name}, counted by fedlens, launches a step"] = statistics.median(counter.steps[1:-1])
            if simulated():
                found[f"{name}, recorded by the profiler"] = SKIPPED
                continue
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                federation.round()
            events = [e for e in recorded.events() or () if str(e.device_type).endswith("CUDA")]
            kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
            found[f"{name}, recorded by the profiler, kernels a round"] = len(kernels)
            found[f"{name}, recorded by the profiler, copies a round"] = len(events) - len(kernels)
        finally:
            federation.close()
    return found


def groups(asked: Setting) -> Found:
    """Clients in one batch, one after the other, and in a loop of CUDA graphs."""
    many = asked.sizes.many
    makers: dict[str, Callable[[], Candidate]] = {
        name: partial(Federation, many, asked.engine(name)) for name in ("inline", "vectorized")
    }
    if not simulated():
        makers["CUDA graphs"] = partial(Graphed, many, asked.precision)
    took, found = in_turn(makers, asked)
    found |= {f"{name}, s a round": statistics.median(seconds) for name, seconds in took.items()}
    for name, goal in (("inline", 10), ("CUDA graphs", 3)):
        if name in took and "vectorized" in took:
            found[f"vectorized, times {name} (goal {goal})"] = str(ratio(took[name], took["vectorized"]))
    return found | ({"CUDA graphs": SKIPPED} if simulated() else {})


def speeds(workload: Workload, makers: Mapping[str, Callable[[], Candidate]], asked: Setting) -> Found:
    """Rounds and images a second of each candidate."""
    took, found = in_turn(makers, asked)
    for name, seconds in took.items():
        rate = 1 / statistics.median(seconds)
        found[f"{name}, rounds/s (goal 20)"] = rate
        found[f"{name}, images/s (goal 100,000)"] = rate * workload.images
    return found


def rounds(asked: Setting) -> Found:
    """hsu2019's setting in one process."""
    workload = asked.sizes.hsu2019
    tables = {"by default": {"device": "cuda", "precision": asked.precision}}
    tables |= {name: asked.engine(name) for name in ("vectorized", "inline")}
    return speeds(
        workload, {name: partial(Federation, workload, table) for name, table in tables.items()}, asked
    )


def workers(asked: Setting) -> Found:
    """hsu2019's setting with several processes on the GPU, each with and without groups."""
    workload = asked.sizes.hsu2019
    makers = {}
    for count in asked.sizes.workers:
        for group in (1, max(2, workload.cohort // count)):
            table = asked.engine("processes", workers=count, group=group)
            makers[f"{count} workers, groups of {group}"] = partial(Federation, workload, table)
    return speeds(workload, makers, asked)


def memory(asked: Setting) -> Found:
    """The largest memory of a round in groups beyond that before it, and the estimate that fedlens goes by."""
    found: Found = {}
    for size in asked.sizes.groups:
        federation = Federation(
            replace(asked.sizes.many, cohort=size), asked.engine("vectorized", group=size)
        )
        try:
            federation.round()  # loads kernels and images
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            federation.round()
            measured = torch.cuda.max_memory_allocated() - before
            (op,) = (op for op in federation.built.algorithm.ops.values() if isinstance(op, BatchedOp))
            data = federation.built.client_data.data_of(0)
            estimated = size * op.footprint(GPU, len(data), data)
        finally:
            federation.close()
        found[f"a group of {size}, measured, MB"] = measured / 1e6
        found[f"a group of {size}, estimated, MB"] = estimated / 1e6
        found[f"a group of {size}, estimate / measurement"] = estimated / max(1, measured)
    return found


# Channels in and out, kernel, side of the images, images in a client's batch.
LAYERS = ((1, 32, 5, 28, 10), (3, 64, 5, 32, 32), (32, 64, 5, 14, 10), (64, 64, 5, 16, 32), (128, 128, 3, 16, 64),
          (512, 512, 3, 4, 32))  # fmt: skip


def forms(asked: Setting) -> Found:
    """Milliseconds of a layer for a group of clients, in each form of its convolution."""
    found: Found = {}
    clients = asked.sizes.groups[0] + 2  # 10, as in `rounds`
    arithmetic = Arithmetic(asked.precision, channels_last=False)
    with arithmetic.on(GPU):
        for channels, out, kernel, side, batch in LAYERS:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(asked.precision, torch.float32)
            images = torch.randn(clients * batch, channels, side, side, device=GPU, dtype=dtype)
            weight = torch.randn(clients, out, channels, kernel, kernel, device=GPU, dtype=dtype)
            learned = [weight.requires_grad_()]
            if channels > 3:  # else the layer is the first one, whose images need no gradient
                learned.append(images.requires_grad_())
            padding = (kernel // 2, kernel // 2)
            for name, form in FORMS.items():
                seconds = []
                for _ in range(2 + asked.pairs):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    result = form(images, weight, (1, 1), padding, (1, 1), 1)
                    torch.autograd.grad(result.sum(), learned)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - start)
                what = f"{channels} -> {out}, {kernel}x{kernel}, {side} pixels, batch {batch}"
                found[f"{what}, {name}, ms"] = 1e3 * statistics.median(seconds[2:])
    return found


def peak(asked: Setting) -> Found:
    """FLOP/s of training, and their share of the peak."""
    sizes, hsu = asked.sizes, asked.sizes.hsu2019
    side = sizes.side
    models: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        f"hsu-cnn, batches of {sizes.batches[0]}": (hsu.model, hsu.shape, sizes.batches[0]),
        f"ResNet-18 at {side} x {side}, batches of {sizes.batches[1]}": (
            resnet18,
            (3, side, side),
            sizes.batches[1],
        ),
    }
    found: Found = {}
    for name, (model, shape, batch) in models.items():
        flops = achieved(model, shape, batch, asked)
        found[f"{name}, TFLOP/s"] = flops / 1e12
        if simulated():
            found[f"{name}, share of the peak"] = SKIPPED
        else:
            found[f"{name}, share of the peak"] = flops / peak_of("cuda", asked.precision, 1).flops
    return found


def tests(asked: Setting) -> Found:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
        )
    return {"pytest tests/gpu": done.stdout.strip().splitlines()[-1]}


SECTIONS: dict[str, Callable[[Setting], Found]] = {
    "launches": launches, "groups": groups, "rounds": rounds, "workers": workers, "memory": memory, "forms": forms,
    "peak": peak, "tests": tests,
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures one GPU.")
    parser.add_argument("sections", nargs="*", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--pairs", type=int, default=12, help="turns of each measurement")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the turns of a section")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, one turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the figures")
    asked = parser.parse_args()
    if unknown := set(asked.sections) - SECTIONS.keys():
        parser.error(f"unknown section: {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        raise SystemExit("no GPU found; to see that everything runs: "
                         "python -m tests.simulated_gpu.launch -m benchmarks.gpu --tiny")  # fmt: skip
    pairs = 1 if asked.tiny else asked.pairs
    setting = Setting(TINY if asked.tiny else FULL, asked.precision, pairs, asked.seconds)
    machine = f"{torch.cuda.get_device_name()}, {asked.precision}" + ", tiny sizes" * asked.tiny
    found: Found = {"machine": machine, "torch": torch.__version__, "cuda": torch.version.cuda}
    wrong = False
    for name in asked.sections or SECTIONS:
        try:
            found[name] = SECTIONS[name](setting)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        for label, value in found[name].items():
            wrong |= label == "error" or str(value).startswith("did not run")
            print(
                f"{name}: {label}: {value if isinstance(value, str) else f'{value:,.4g}'} ({machine})",
                flush=True,
            )
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
