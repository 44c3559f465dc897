"""Lists what adds floating-point numbers in no fixed order on a GPU: which models, tasks, augmentations and metrics.

`python -m tests.simulated_gpu.launch -m tests.simulated_gpu.unordered` prints the operations of each, and writes the
list of docs/on-a-gpu.md. The operations are those that `torch.use_deterministic_algorithms` names. The simulator has no
fused attention and no cuDNN, so models with attention or an LSTM are listed for these layers.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from fedlens.benchmark.memory_step import measure, planned, trial
from fedlens.core.dataset_info import DatasetInfo
from fedlens.models.registry import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "on-a-gpu.md"
LIST = re.compile(r"(<!-- list: unordered -->\n\n?)(?:\|.*\n)*")
CLASSES = ("a", "b", "c")
INFO = {
    "classification": DatasetInfo("images", "classification", CLASSES, (3, 64, 64)),
    "detection": DatasetInfo("boxes", "detection", CLASSES, (3, 128, 128)),
    "segmentation": DatasetInfo("masks", "segmentation", CLASSES, (3, 64, 64)),
    "language": DatasetInfo("texts", "language", tuple(map(str, range(20))), (12,), vocabulary=20),
}
SIDE = {
    "vit-b-16": 224,
    "vit-tiny": 224,
    "linear": 28,
    "mlp": 28,
    "small-cnn": 28,
    "mcmahan-cnn": 28,
    "hsu-cnn": 32,
    "vgg9": 32,
}


def operations(work: Callable[[], Any]) -> set[str]:
    """The operations without a fixed order in a block of work on the simulated GPU."""
    import simgpu

    layers: set[str] = set()
    attention, lstm = nn.functional.scaled_dot_product_attention, nn.LSTM.forward
    with simgpu.counted() as counts:
        nn.functional.scaled_dot_product_attention = lambda *given, **named: (
            layers.add("attention") or attention(*given, **named)
        )
        nn.LSTM.forward = lambda *given, **named: layers.add("LSTM") or lstm(*given, **named)
        try:
            work()
        finally:
            nn.functional.scaled_dot_product_attention, nn.LSTM.forward = attention, lstm
    assert counts["kernels"], "nothing ran on the GPU"
    return layers | {kind.removeprefix("unordered ") for kind in counts if kind.startswith("unordered ")}


def train(name: str) -> None:
    """Trains a model of the table for three steps."""
    info = INFO[MODELS.entries[name].task]
    if side := SIDE.get(name):
        info = DatasetInfo(info.name, info.kind, CLASSES, (3, side, side))
    device = ["engine.name=inline", "engine.device=cuda"]
    found = measure(trial(planned("digits", [f"model={name}", *device]), info, 2))
    if found.reason is not None:
        raise SystemExit(f"{name}: {found.reason}")


def models() -> Iterator[tuple[str, set[str]]]:
    """Each model that trains, and its operations."""
    for name in MODELS:
        yield f"model `{name}`", operations(lambda name=name: train(name))


def parts() -> Iterator[tuple[str, set[str]]]:
    """Runs of each algorithm, task and augmentation, and the k-NN accuracy, on models without such operations."""
    from tests.contract.contract_kit import ALGORITHMS
    from tests.gpu import test_precision, test_tasks
    from tests.gpu.device_kit import GPU, GROUP_NORM, run, small
    from tests.gpu.test_augmentation import MADE, augmented

    def ran(given: dict[str, Any], engine: str = "inline") -> set[str]:
        with tempfile.TemporaryDirectory() as folder:
            return operations(lambda: run(Path(folder) / "run", given, GPU, engine))

    for name in ALGORITHMS:
        yield f"algorithm `{name}`", ran(small(name))
    yield "clients that train together", ran(small("scaffold", model=GROUP_NORM), "vectorized")
    for name, changes in test_tasks.ROWS.items():
        data = changes["data"] | {"partition": "natural"}
        yield f"task `{name}`", ran(small(**changes | {"data": data}))
    for name, step in MADE.items():
        yield f"augmentation `{name}`", operations(lambda step=step: augmented(step, GPU))
    neighbours = {"neighbours": {"dataset": test_precision.DATA, "k": 3}}
    engine = {"name": "inline", "device": GPU}
    task = {"name": "simsiam", "width": 8, "bottleneck": 4}
    measured = test_precision.experiment(engine, task=task, evaluation=neighbours)
    with tempfile.TemporaryDirectory() as folder:
        found = operations(lambda: measured.run(Path(folder) / "run", report=False))
        yield "`evaluation.neighbours`", found


def rendered(page: str, rows: Sequence[tuple[str, set[str]]]) -> str:
    """The page with its list written anew."""
    grouped: dict[str, list[str]] = {}
    for what, found in rows:
        if found:
            grouped.setdefault(", ".join(f"`{name}`" for name in sorted(found)), []).append(what)
    lines = [f"| {', '.join(of)} | {names} |\n" for names, of in grouped.items()]
    head = "| part | operations without a fixed order |\n|---|---|\n"
    return LIST.sub(lambda match: match[1] + head + "".join(lines), page)


def main() -> None:
    """Prints the operations of each part, and writes the list of the page."""
    rows = []
    for what, found in chain(models(), parts()):
        sys.stdout.write(f"{what}: {', '.join(sorted(found)) or '-'}\n")
        sys.stdout.flush()
        rows.append((what, found))
    PAGE.write_text(rendered(PAGE.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main()
