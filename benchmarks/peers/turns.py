"""How a driver takes its turns: a line on standard input starts a round, a line of JSON on standard output ends it.

A driver says `{"ready": true}` once, and `{"seconds": ..., "norm": ...}` after every line `round` that it reads.
Anything else, or the end of the input, ends it. By hand:

    yes round | head -5 | FEDLENS_LIMIT=.../fedlens/benchmark/limit.py python drive_flower.py linear

The workload is a name that the limit knows, or a JSON object of `Workload`'s fields. Nothing of fedlens is imported
but the file of the limit, which needs PyTorch alone: models, data and start are the limit's own, and for Flower and
NVFlare the order of the examples too; the others shuffle anew for every client and epoch, with a generator of their
own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def load_limit() -> types.ModuleType:
    """The module of the limit, from the file that FEDLENS_LIMIT names; the same in every process of a peer."""
    if "limit" not in sys.modules:
        checkout = Path(__file__).parents[2] / "src" / "fedlens" / "benchmark" / "limit.py"
        spec = importlib.util.spec_from_file_location("limit", os.environ.get("FEDLENS_LIMIT", checkout))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["limit"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["limit"]


def workload_of(text: str) -> Any:
    """The workload of a command line."""
    limit = load_limit()
    if text in limit.WORKLOADS:
        return limit.WORKLOADS[text]
    fields = json.loads(text)
    models = (limit.cifar_cnn, limit.mnist_cnn, limit.linear)
    fields["model"] = {model.__name__: model for model in models}[fields["model"]]
    return limit.Workload(**{**fields, "shape": tuple(fields["shape"])})


def start_of(workload: Any, contiguous: bool = False) -> Any:
    """The workload's model in its memory layout, with the weights that all start from.

    `contiguous` is for a peer that flattens weights by `view`, which channels-last weights refuse: there only the
    images have the workload's layout, which is what convolutions go by.
    """
    import torch

    model = workload.model()
    if workload.channels_last and not contiguous:
        model.to(memory_format=torch.channels_last)
    for parameter, weight in zip(model.parameters(), load_limit().fresh_weights(workload), strict=True):
        parameter.data.copy_(weight)
    return model


def end_with_parent() -> None:
    """On Linux: this process is killed when the one that started it ends, even where it stands still."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def share_of(workload: Any) -> float:
    """The share of clients a round, for a peer that multiplies it by their number and rounds the product down."""
    if workload.cohort < workload.clients:
        return float(workload.cohort + 0.5) / float(workload.clients)
    return 1.0


def arguments(what: str, modes: Sequence[str] = ()) -> argparse.Namespace:
    """The command line that all drivers have, with `--mode` for a peer that has several; called first."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=f"Rounds of {what}, a line of JSON each.")
    parser.add_argument("workload", help="a name that the limit knows, or a JSON object")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    return parser.parse_args()


class Turns:
    """The two lines between a driver and who drives it. What else is printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def ready(self, **about: Any) -> None:
        """Says that rounds may be asked for."""
        names = ("torch", "numpy", "flwr", "ray", "pfl", "fedlab", "fedml", "nvflare", "blazefl", "fluke-fl")
        found = {}
        for name in names:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
        self._say({"ready": True, "versions": {"python": sys.version.split()[0], **found}, **about})

    def wait(self) -> bool:
        """Waits until a round is asked for; false at the end."""
        return sys.stdin.readline().strip() == "round"

    def done(self, seconds: float, weights: Iterable[Any]) -> None:
        """Says how long the round took, and the norm of the weights it came to, by which rounds can be compared."""
        norm = sum(float(weight.detach().double().square().sum()) for weight in weights) ** 0.5
        self._say({"seconds": seconds, "norm": norm})

    def _say(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._out, flush=True)


def laid_out(workload: Any, images: Any) -> Any:
    """The images in the workload's memory layout."""
    import torch

    return images.contiguous(memory_format=torch.channels_last) if workload.channels_last else images


class Batches:
    """One client's batches, for a peer that wants a loader: shuffled anew in every pass."""

    def __init__(self, workload: Any, images: Any, labels: Any, rng: Any) -> None:
        self.workload, self.images, self.labels, self.rng = workload, images, labels, rng

    def __iter__(self) -> Iterator[Any]:
        import torch

        order = torch.randperm(len(self.labels), generator=self.rng)
        images, size = laid_out(self.workload, self.images[order]), self.workload.batch
        return zip(images.split(size), self.labels[order].split(size), strict=True)
