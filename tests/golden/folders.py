"""Makes the folders of runs, of a study and of a `cost` that `test_folders.py` continues and reads.

They say that folders which an earlier commit wrote stay readable. So a refactoring must not make them anew: a folder
that can no longer be resumed is what the test is there to show. `python -m tests.golden.folders` is for a change that
is meant to change results, and only then; new kinds of runs are added to `RUNS`, and made alone by their name:
`python -m tests.golden.folders pruned`.

Each archive holds `started/`, a folder that is not finished, and `ended/`, files of the same work done without a stop.
The runs stop in three ways: paused after a round, interrupted, and killed with lines after the last checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import tomli_w
import torch

from fedlens import Experiment, Study, cost
from fedlens.api import resume
from fedlens.core.states import ClientStates
from fedlens.run.progress import ProgressBase
from fedlens.studies.progress import StudyProgress

ARCHIVES = Path(__file__).with_name("folders")
KEPT = (
    "metrics.jsonl", "clients.jsonl", "summary.json", "model.safetensors", "best.safetensors", "results.jsonl",
    "cells.csv", "cost.json",
)  # fmt: skip
_HALF: dict[str, Any] = {"name": "uniform", "clients_per_round": 3}


def settings(name: str, **tables: Any) -> dict[str, Any]:
    """A run of six clients on the digits; `tables` replace those that are written here."""
    return {
        "name": name,
        "rounds": 6,
        "data": data(),
        "model": "linear",
        "local": {"lr": 0.1, "batch_size": 20},
        "engine": {"name": "inline", "threads": 1, "device": "cpu"},
        **tables,
    }


def data(**keys: Any) -> dict[str, Any]:
    """Non-IID digits, of which each client holds out a share."""
    partition = {"name": "dirichlet", "alpha": 0.5, "clients": 6}
    return {
        "dataset": "digits",
        "partition": partition,
        "validation": 0.2,
        "validation_from": "client",
        **keys,
    }


RUNS: dict[str, dict[str, Any]] = {
    # Killed: two lines after the last checkpoint. Rows of clients, of training and of evaluation, every other round.
    "fedavg": settings(
        "fedavg", evaluation={"clients": "all", "every": 2}, record={"clients": True}, select=_HALF
    ),
    # Paused, with the control variates of the clients in state files.
    "scaffold": settings("scaffold", algorithm="scaffold", select=_HALF),
    # Interrupted, with the clients' own layers in the checkpoint, and batch statistics.
    "fedbn": settings(
        "fedbn", algorithm="fedbn", model={"name": "small-cnn", "width": 2, "norm": "batch"}, select=_HALF
    ),
    # Paused, with a server optimizer, recordings before and after the stop, and the best round before it.
    "recorded": settings(
        "recorded",
        seed=3,
        algorithm={"name": "fedadam", "lr": 1.0},
        data=data(validation_from="global"),
        client={"name": "proximal", "mu": 0.1},
        record={"local_models": {"every": 2}, "updates": {"rounds": [1, 4]}},
    ),
    # Paused. It learns nothing, which the later rounds have to notice from what the earlier ones counted.
    "chance": settings("chance", rounds=9, data=data(validation=0.0, validation_from="global"), local={"lr": 1e-12}),
    # Paused. Without labels: the spread of embeddings, and the accuracy of their neighbours.
    "simsiam": settings(
        "simsiam",
        data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}, "augment": ["flip"]},
        model={"name": "small-cnn", "width": 2, "norm": "group"},
        task={"name": "simsiam", "width": 4, "bottleneck": 2},
        evaluation={"neighbours": "digits", "every": 2},
        local={"lr": 0.05, "momentum": 0.9, "steps": 2, "batch_size": 16},
    ),
}  # fmt: skip
STOPS = {name: {"recorded": 5, "chance": 2}.get(name, 3) for name in RUNS}
"""The round after which a run stops, by the run's name."""
STUDY: dict[str, Any] = {
    "name": "two-methods",
    "base": settings("base", rounds=3),
    "seeds": [0, 1],
    "methods": {"fedavg": {}, "fedavgm": {"set": {"algorithm.name": "fedavgm"}}},
}
COST = settings("small-cost", rounds=4, select=_HALF)


class Stop(ProgressBase):
    """Does `how` after a round."""

    def __init__(self, round: int, how: Callable[[], Any]) -> None:
        self._round, self._how = round, how

    def round_done(self, line: Mapping[str, Any]) -> None:
        """Stops the run."""
        if line["round"] == self._round:
            self._how()


def interrupted() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def start(name: str, folder: Path) -> None:
    """Starts a run of `RUNS`, and stops it."""
    experiment = Experiment(**RUNS[name])
    if name == "fedbn":
        with contextlib.suppress(KeyboardInterrupt):
            experiment.run(folder, report=False, progress=Stop(STOPS[name], interrupted))
    elif name == "scaffold":  # 8 kB hold three of the six states
        with mock.patch("fedlens.run.run_saver.ClientStates", lambda store, _: ClientStates(store, 8_000)):
            experiment.run(folder, report=False, until=STOPS[name])
    else:
        experiment.run(folder, report=False, until=STOPS[name])
    if name == "fedavg":
        _in_a_child(lambda: resume(folder, report=False, progress=Stop(STOPS[name] + 2, lambda: os._exit(0))))


def _in_a_child(work: Callable[[], Any]) -> None:
    if (child := os.fork()) == 0:
        work()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _StopStudy(StudyProgress):
    def round_done(self, run: Any, round: int, rounds: int) -> None:
        if run.method == "fedavgm" and run.seed == 1 and round == 2:
            raise KeyboardInterrupt


class _StopCost(StudyProgress):
    """Interrupts the last of the four runs."""

    def round_done(self, run: Any, round: int, rounds: int) -> None:
        """Stops the run."""
        if run.method == "local-only" and round == 2:
            raise KeyboardInterrupt


def make(name: str) -> None:
    """Makes one archive."""
    started, ended = Path("started"), Path("ended")
    if name == "study":
        with contextlib.suppress(KeyboardInterrupt):
            Study(**STUDY).run(started, jobs=0, report=False, progress=_StopStudy())
        Study(**STUDY).run(ended, jobs=0)
    elif name == "cost":
        with contextlib.suppress(KeyboardInterrupt):
            cost(Experiment(**COST), seeds=1, jobs=0, out=started, report=False, progress=_StopCost())
        cost(Experiment(**COST), seeds=1, jobs=0, out=ended, report=False)
        started.joinpath("experiment.toml").write_text(tomli_w.dumps(COST))
    else:
        start(name, started)
        Experiment(**RUNS[name]).run(ended, report=False)
    for path in ended.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in started.rglob("environment.json"):
        path.write_text(json.dumps(_placeless(json.loads(path.read_text())), indent=2) + "\n")
    pack(ARCHIVES / f"{name}.tar.xz", [started, ended])


def _placeless(environment: dict[str, Any]) -> dict[str, Any]:
    """What a run ran on, without the places of the machine."""
    return {**environment, "data_dir": "data", "os": "Linux", "command": "fedlens run", "git": None}


def pack(archive: Path, folders: list[Path]) -> None:
    """Writes an archive of the files in some folders, with the same bytes whenever and wherever it is written."""
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(p for folder in folders for p in folder.rglob("*") if p.is_file()):
            if path.name in (".lock", ".working"):
                continue
            entry = tarfile.TarInfo(path.as_posix())  # no owner and no time
            content = path.read_bytes()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """A temporary folder as the working directory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def main(names: list[str]) -> None:
    """Makes all archives, or those of these names."""
    torch.set_num_threads(1)
    ARCHIVES.mkdir(exist_ok=True)
    for name in names or [*RUNS, "study", "cost"]:
        with elsewhere():
            make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
