"""Trains one client again, for the memory of tensors that it takes and the kernels that a GPU would launch for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlens.base.parse_text import parse_json
from fedlens.base.profiling import recording
from fedlens.core.protocol import Ask, BatchedOp, Failure, Id, Payload
from fedlens.core.random import random_state_kept
from fedlens.engines.client_groups import Groups
from fedlens.engines.executor import Executor, Item
from fedlens.run.build import Built


def measure_memory(built: Built, ask: Ask, state: Payload) -> dict[str, Any]:
    """Trains the first client of an ask, with this state, once more in this process.

    Returns `training`, the bytes of tensors that training adds at its largest moment, the model and the images not
    counted; `gpu`, the bytes of all tensors on the GPU at the largest moment, None on a CPU; and `examples` and
    `batch` of the client. Where the client fails, only `not_measured`, the reason.
    """
    with client_again(built, ask, state) as (executor, item):
        on_gpu = executor.device.type == "cuda"
        # The first time builds the model and fills the caches.
        first = executor.answer(ask.op, ask.shared, item, ask.expect)
        if isinstance(first, Failure):
            return {"not_measured": f"the client failed: {first.reason}"}
        del first
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            executor.answer(ask.op, ask.shared, item, ask.expect)
        gpu = torch.cuda.max_memory_allocated() if on_gpu else None
    examples = len(built.client_data.data_of(item.client))
    batch = built.config.local.batch(examples)
    return {"training": _largest(recorded), "gpu": gpu, "examples": examples, "batch": batch}


@contextmanager
def client_again(built: Built, ask: Ask, state: Payload) -> Iterator[tuple[Executor, Item]]:
    """An executor of this process and the first request of an ask, with this state, as the engine computes."""
    request = ask.requests[0]
    executor = Executor(built.engine.applied(built.program))
    with executor.program.computing(), random_state_kept(executor.device):
        yield executor, Item(Id(1, 0, 0), request.client, request.payload, state)


def _largest(recorded: torch.profiler.profile) -> int:
    """The most bytes that were allocated at one moment and had not been before."""
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = parse_json(file.read_bytes())["traceEvents"]
    changes = [(event["ts"], int(event["args"]["Bytes"])) for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))


LAUNCH_SECONDS = 5e-6  # about, from the call of an operation to the start of its kernel
_IDLE = (
    "empty",
    "new_empty",
    "detach",
    "set_",
    "resize_",
    "_local_scalar",
    "lift_fresh",
    "_unsafe_view",
)  # prefixes of names
_COPIES = ("copy_", "_to_copy", "_foreach_copy_", "copy")


def count_launches(built: Built, ask: Ask, state: Payload) -> dict[str, float]:
    """Trains the first client of an ask, with this state, once more in this process, and counts the launches of a step.

    Returns `alone`, the median over its steps, and `together`, that of a group of two clients, both of them this one.
    Without a counted step there is no entry: where the client fails or cannot be trained in a group, and for solvers.
    """
    counts: dict[str, float] = {}
    with client_again(built, ask, state) as (executor, item):
        op, asked = executor.program.ops[ask.op], (ask.op, ask.shared)
        ways: dict[str, Any] = {"alone": partial(executor.answer, *asked, item, ask.expect)}
        if isinstance(op, BatchedOp) and op.obstacle() is None:
            ways["together"] = partial(Groups(2).answers, executor, *asked, [item, item], ask.expect)
        for name, train in ways.items():
            with LaunchCounter(executor.device.type) as counter, recording(counter.scope):
                train()
            if steps := counter.steps[:-1]:
                counts[name] = median(steps)
    return counts


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches between the starts of two batches while it is entered; its `scope` is given to `recording`.

    Attributes:
        device: operations without a tensor on this kind of device are not counted.
        steps: the launches of each local step so far; the last entry is what came after the last step.

    >>> from fedlens.base.profiling import scoped
    >>> counter = LaunchCounter("cpu")
    >>> with counter, recording(counter.scope):
    ...     for x in scoped("data", [torch.ones(2), torch.ones(2)]):
    ...         _ = (x + 1) * 2
    >>> counter.steps
    [2, 2, 0]
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.steps = device, list[int]()

    def scope(self, name: str) -> nullcontext[None]:
        """A recorder of scopes: a step begins with its batch."""
        if name == "data":
            self.steps.append(0)
        return nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and counts it."""
        result = func(*args, **(kwargs or {}))
        if self.steps:
            places = {
                leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)
            }
            self.steps[-1] += launches_of(func, args, places) if self.device in places else 0
        return result


def launches_of(operation: Any, arguments: Any, places: set[str]) -> int:
    """The number of kernels of one operation of PyTorch; views, allocations and transfers between devices have none.

    Every other operation counts as one kernel, the backward pass of a convolution as one for each of its gradients.

    Args:
        operation: the operation, below autograd.
        arguments: its positional arguments.
        places: the kinds of devices of its tensors and results.

    >>> x = torch.ones(2, 3)
    >>> launches_of(torch.ops.aten.add.Tensor, (x, x), {"cpu"}), launches_of(torch.ops.aten.t.default, (x,), {"cpu"})
    (1, 0)
    """
    name = operation._schema.name.partition("::")[2]
    if name in _COPIES:
        return (len(places) == 1) * (len(arguments[0]) if name == "_foreach_copy_" else 1)
    if name.startswith(_IDLE) or operation.is_view or torch.Tag.inplace_view in operation.tags:
        return 0
    return sum(arguments[-1]) if name == "convolution_backward" else 1
