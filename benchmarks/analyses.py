"""Measures what recordings and analyses cost beyond the arithmetic that they need.

    python -m benchmarks.analyses                 # one thread
    python -m benchmarks.analyses --turns 10

Recording: rounds of FedAvg that record every local model, against the same rounds without, in turn, and against the
time in which PyTorch's safetensors library writes the same tensors; the goal is the write time and no more. Surface:
the loss surface of 1,000 convex combinations of 10 models, against 1,000 evaluations of a model that is loaded already;
the goal is nothing beyond one matrix product. Each figure is a median over turns.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedlens.analyses.loss_surface import sample_surface
from fedlens.analyses.opened_run import OpenedRun, open_run
from fedlens.api import Experiment

ROUNDS, MODELS, COMBINATIONS = 20, 10, 1000
NETWORKS = {"linear": "linear", "small-cnn": "small-cnn"}


def main() -> None:
    """Prints the two measurements for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, network in NETWORKS.items():
            path = Path(folder) / name
            report_recording(name, network, path, turns)
            report_surface(name, open_run(path / "recorded"), turns)


def report_recording(name: str, network: str, path: Path, turns: int) -> None:
    """Prints what recording adds to a round, and how long its files take to write."""
    plain, recorded, written = [], [], []
    for _ in range(turns):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        plain.append(seconds_of(lambda: run(network, path / "plain")))
        recorded.append(seconds_of(lambda: run(network, path / "recorded", record=True)))
        written.append(writing(open_run(path / "recorded"), path / "written"))
    added = statistics.median(r - p for r, p in zip(recorded, plain, strict=True)) / ROUNDS
    alone = statistics.median(written) / ROUNDS
    print(
        f"recording, {name}: {1e3 * added:.1f} ms a round of {MODELS} clients beyond the round, "
        f"{1e3 * alone:.1f} ms to write the same files"
    )


def run(network: str, path: Path, record: bool = False) -> None:
    """Trains some rounds of the recipe `digits`, with ten clients each."""
    changes = [f"model={network}", f"rounds={ROUNDS}", "engine=inline", "evaluation.every=20"]
    changes += [f"select.clients_per_round={MODELS}", "checkpoint.seconds=3600"]
    changes += ["record.local_models={every=1}"] if record else []
    Experiment.load("digits", changes).run(path, report=False)


def writing(run: OpenedRun, path: Path) -> float:
    """The seconds in which safetensors writes the recorded tensors, one file for each model."""
    path.mkdir(exist_ok=True)
    trees = []
    for recorded in run.recorded:
        before = recorded.before()
        trees += [before, recorded.after(), *(recorded.local_model(r, before) for r in recorded.trained)]

    def write() -> None:
        for number, tree in enumerate(trees):
            save_file(tree, path / f"{number}.safetensors")

    return seconds_of(write)


def report_surface(name: str, run: OpenedRun, turns: int) -> None:
    """Prints the time of a loss surface against that of its evaluations."""
    recorded = run.recorded[-1]
    before = recorded.before()
    models = [recorded.local_model(reply, before) for reply in recorded.trained]
    evaluator = run.evaluator
    surface, evaluations = [], []
    for _ in range(turns):
        surface.append(seconds_of(lambda: sample_surface(models, evaluator, COMBINATIONS)))
        evaluations.append(seconds_of(lambda: list(evaluator.several([before] * COMBINATIONS))))
    ratio = statistics.median(s / e for s, e in zip(surface, evaluations, strict=True))
    print(
        f"loss surface, {name}: {statistics.median(surface):.2f} s for {COMBINATIONS:,} combinations of {len(models)} "
        f"models, {ratio:.2f} times {COMBINATIONS:,} evaluations of one model"
    )


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds that this takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
