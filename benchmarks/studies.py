"""Measures what a small run of a study costs beyond its arithmetic, and what a session saves.

    python -m benchmarks.studies                       # 200 runs of ten rounds of `digits` in one session
    python -m benchmarks.studies --runs 20 --model linear
    python -m benchmarks.studies --start               # the start of runs on Fashion-MNIST and CIFAR-10
    python -m benchmarks.studies --jobs 2 --runs 40    # a study with one run at a time, and with two

The arithmetic is a bare PyTorch loop over the same steps: the same network, one process and thread, each client's
images in memory and normalized beforehand, the same cohort size, epochs and batches, plain SGD without an optimizer
object, the mean of the models by examples, and after each round the loss and the right answers on the test images.
Loops and runs take turns, and the figures are means over all of them, in time of the clock and of the processor; the
goal is 0.15 s of either. Runs draw no report page, as in a study.

`--start` times a run of one round with one step from the call to the end, with the data below FEDLENS_DATA: without a
session, as the first run of a session, later in it with another seed, and with the partition of an earlier run.

`--jobs N` times the same study, start of the workers included, with one run at a time and with N, in turn; the goal on
two idle cores is a ratio of 1.8. It compares the results too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fedlens import Experiment
from fedlens.data.normalize import normalize
from fedlens.local.settings import LocalSettings
from fedlens.results.rows import Results
from fedlens.run.build import Built, build, data_directory
from fedlens.run.session import Session
from fedlens.settings.plan import plan
from fedlens.studies.study import Study

GOAL = 0.15
Times = tuple[float, float]  # of the clock and of the processor


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--jobs", type=int, help="compare one run at a time with so many")
    parser.add_argument("--turns", type=int, default=3, help="with --jobs")
    parser.add_argument("--start", action="store_true", help="time the start on image datasets instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.start:
            start(Path(folder))
        elif arguments.jobs:
            how = (arguments.jobs, arguments.runs, arguments.rounds, arguments.model, arguments.turns)
            at_once(Path(folder), *how)
        else:
            beyond(Path(folder), arguments.runs, arguments.rounds, arguments.model)


def beyond(folder: Path, runs: int, rounds: int, model: str) -> None:
    """Prints the cost of a run beyond a bare loop over its steps."""
    session = Session()

    def experiment(seed: int) -> Experiment:
        overrides = (f"rounds={rounds}", f"seed={seed}", f"model.name={model}")
        return Experiment.load("digits", (*overrides, "engine.name=inline", "engine.threads=1"))

    # The first of each kind imports what it needs.
    bare(experiment(0))()
    experiment(0).run(folder / "warm", report=False, session=session)
    alone, with_session = [], []
    for seed in range(runs):
        loop = bare(experiment(seed))
        alone.append(timed(loop))
        out = folder / str(seed)
        with_session.append(timed(lambda: experiment(seed).run(out, report=False, session=session)))  # noqa: B023
    print(f"{runs} runs of {rounds} rounds of digits with {model}: means in ms")
    print(f"{'':12}{'arithmetic':>12}{'run':>10}{'beyond':>10}")
    for at, name in enumerate(("clock", "processor")):
        bare_ms, run_ms = (1e3 * statistics.fmean(t[at] for t in each) for each in (alone, with_session))
        verdict = "met" if run_ms - bare_ms <= 1e3 * GOAL else "missed"
        print(
            f"{name:12}{bare_ms:12.1f}{run_ms:10.1f}{run_ms - bare_ms:10.1f}  goal {1e3 * GOAL:.0f}: {verdict}"
        )


def bare(experiment: Experiment) -> Callable[[], object]:
    """The arithmetic of a run as a bare loop, its images in memory."""
    built = made(experiment)
    config, holders = built.config, built.client_data
    data = holders.dataset
    images = normalize(data.train.inputs, data.mean, data.std)
    clients = [holders.client_indices(client) for client in range(holders.clients)]
    shards = [(images[rows], data.train.targets[rows]) for rows in clients]
    tested = normalize(data.test.inputs, data.mean, data.std), data.test.targets
    module, cohort = built.model.build(), built.clients_per_round or len(shards)
    built.engine.close()

    parameters = list(module.parameters())

    def loop() -> None:
        first = [parameter.detach().clone() for parameter in parameters]
        torch.manual_seed(config.seed)
        for _ in range(config.rounds):
            total = [torch.zeros_like(value) for value in first]
            chosen = torch.randperm(len(shards))[:cohort].tolist()
            examples = sum(len(shards[client][1]) for client in chosen)
            for client in chosen:
                images, labels = shards[client]
                with torch.no_grad():
                    torch._foreach_copy_(parameters, first)
                train(module, parameters, images, labels, config.local)
                with torch.no_grad():
                    torch._foreach_add_(total, parameters, alpha=len(labels) / examples)
            first = total
            with torch.no_grad():
                torch._foreach_copy_(parameters, first)
            evaluate(module, *tested)

    return loop


def train(
    module: torch.nn.Module,
    parameters: Sequence[torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
    local: LocalSettings,
) -> None:
    """Plain local SGD of one client."""
    module.train()
    for _ in range(local.epochs or 1):
        for rows in torch.randperm(len(labels)).split(local.batch(len(labels))):
            loss = F.cross_entropy(module(images[rows]), labels[rows])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-local.lr)


def evaluate(module: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    module.eval()
    with torch.no_grad():
        outputs = module(images)
        right = (outputs.argmax(1) == labels).float().mean()
        return float(F.cross_entropy(outputs, labels)), float(right)


def made(experiment: Experiment) -> Built:
    """The objects of an experiment, without a run."""
    return build(plan(experiment.config, experiment._source), data_directory(None), False)


def start(folder: Path) -> None:
    """Prints the time of a run of one round on Fashion-MNIST and CIFAR-10, without a session and in one."""
    print(
        "a run of one round with one step on 60,000 or 50,000 images, two evaluations of 10,000: ms of the clock"
    )
    print(f"{'':16}{'no session':>12}{'first':>10}{'another seed':>14}{'same seed':>12}")
    for dataset in ("fashion-mnist", "cifar10"):

        def run(
            name: str, seed: int, session: Session | None, lr: float = 0.01, dataset: str = dataset
        ) -> float:
            settings: dict[str, Any] = {
                "seed": seed,
                "rounds": 1,
                "model": "linear",
                "local": {"lr": lr, "steps": 1},
                "select": {"clients_per_round": 1},
                "data": {
                    "dataset": dataset,
                    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 100},
                },
                "engine": {"name": "inline", "threads": 1},
            }
            experiment = Experiment(**settings)
            out = folder / dataset / f"{name}{seed}-{lr}"
            return 1e3 * timed(lambda: experiment.run(out, report=False, session=session))[0]

        run("warm", 0, None)
        alone = statistics.median(run("alone", seed, None) for seed in range(5))
        session = Session()
        first = run("session", 0, session)
        later = statistics.median(run("session", seed, session) for seed in range(1, 6))
        same = statistics.median(run("session", 0, session, lr=0.01 * k) for k in range(2, 7))
        print(f"{dataset:16}{alone:12.0f}{first:10.0f}{later:14.0f}{same:12.0f}")


def at_once(folder: Path, jobs: int, runs: int, rounds: int, model: str, turns: int) -> None:
    """Prints how much faster a study is with several runs at once."""
    study = Study(
        name="speed",
        base="digits",
        set={"rounds": rounds, "model.name": model},
        seeds=list(range(runs)),
    )
    seconds: dict[int, list[float]] = {1: [], jobs: []}
    for turn in range(turns):
        found = []
        for number in seconds:
            out = folder / f"{turn}-{number}"
            seconds[number].append(timed(lambda: study.run(out, jobs=number, report=False))[0])  # noqa: B023
            lines = Results.read(out).lines
            found.append({digest: line.series(line.main) for digest, line in lines.items()})
        if found[0] != found[1]:
            raise SystemExit("the results differ")
    ratios = sorted(one / many for one, many in zip(seconds[1], seconds[jobs], strict=True))
    medians = [statistics.median(each) for each in seconds.values()]
    print(f"{runs} runs of {rounds} rounds of digits with {model}, {turns} turns; the results are equal")
    print(f"one at a time {medians[0]:.1f} s, {jobs} at once {medians[1]:.1f} s")
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def timed(work: Callable[[], object]) -> Times:
    """Seconds of the clock and of this process."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


if __name__ == "__main__":
    main()
