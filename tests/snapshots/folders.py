"""Makes the finished runs, a run of each task and those of a `cost`, that the snapshots of pages are made from.

`python -m tests.snapshots.folders` makes all of them anew, and with names those alone. They need not be made anew when
pages change, only when runs write something else that a page is to show. Models and checkpoints are left out; times
and the machine are replaced by others that are always the same.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedlens import Experiment, cost
from tests.golden.folders import elsewhere, pack
from tests.snapshots.kit import ARCHIVES
from tests.snapshots.page_snapshots import COST, SEEDS
from tests.unit.results import test_client_results as of_classes
from tests.unit.run import test_language_runs as of_texts
from tests.unit.run import test_multi_label_runs as of_labels
from tests.unit.run import test_segmentation_runs as of_masks
from tests.unit.tasks import detection_kit as of_boxes

_LEFT_OUT = ("model.safetensors", "best.safetensors", ".lock", "report.html", "cost.html")
_ROUND, _PROCESSOR = 0.5, 0.75  # seconds of a round, and of the processor in a round
_HOME = "/home/somebody"
_AT_EACH = {"evaluation.clients": "all", "record.images": "true"}


def _classification(out: Path) -> None:
    made = of_classes.experiment(record={"clients": True, "images": True})
    made.with_settings("algorithm.name=finetune").run(out, report=False)


def _multi_label(out: Path) -> None:
    folder = Path("pairs")
    folder.mkdir()
    of_labels.write_pairs(folder)
    made = of_labels.experiment(folder, "rounds=10", "local.lr=1.0", "evaluation.every=5")
    made.with_settings(*map("=".join, _AT_EACH.items())).run(out, report=False)


def _segmentation(out: Path) -> None:
    made = of_masks.experiment("rounds=4", "evaluation.every=2", *map("=".join, _AT_EACH.items()))
    made.run(out, report=False)


def _detection(out: Path) -> None:
    local = {"lr": 0.02, "batch_size": 8, "optimizer": "adam", "epochs": 4}
    data = {
        "dataset": {"name": of_boxes.squares, "n": 80},
        "partition": "natural",
        "validation": 0.25,
        "validation_from": "client",
    }
    made = of_boxes.settings(
        data=data, local=local, rounds=8, evaluation={"every": 4}, select={"clients_per_round": 4}
    )
    Experiment(**made).with_settings(*map("=".join, _AT_EACH.items())).run(out, report=False)


def _language(out: Path) -> None:
    of_texts.write_plays(Path("data"))
    os.environ["FEDLENS_DATA"] = "data"
    of_texts.experiment(
        "data.validation=0.25", 'data.validation_from="client"', "evaluation.clients=all"
    ).run(out, report=False)


def _cost(out: Path) -> None:
    cost(Experiment(**COST), seeds=SEEDS, out=out, report=False)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "classification": _classification,
    "multi-label": _multi_label,
    "segmentation": _segmentation,
    "detection": _detection,
    "language": _language,
    "cost": _cost,
}
"""What makes each folder."""


def make(name: str) -> None:
    """Makes one archive."""
    folder = Path(name)
    FOLDERS[name](folder)
    for path in [*folder.rglob("checkpoint")]:
        shutil.rmtree(path)
    for path in [*folder.rglob("*")]:
        if path.name in _LEFT_OUT:
            path.unlink()
        elif path.suffix in (".toml", ".json", ".jsonl"):
            text = path.read_text("utf-8").replace(str(Path.cwd()), _HOME)
            path.write_text(_always_the_same(path.name, text), encoding="utf-8")
    ARCHIVES.mkdir(exist_ok=True)
    pack(ARCHIVES / f"{name}.tar.xz", [folder])


def _always_the_same(name: str, text: str) -> str:
    """The text of a file of a run with other times and another machine."""
    if name.endswith(".jsonl"):
        return "".join(f"{json.dumps(timed(json.loads(line)))}\n" for line in text.splitlines())
    if name == "environment.json":
        return json.dumps(_elsewhere(json.loads(text)), indent=2)
    return json.dumps(timed(json.loads(text)), indent=2) if name.endswith(".json") else text


def timed(value: Any, rounds: float = 1.0) -> Any:
    """A value of a JSON file with times that follow from its rounds."""
    if isinstance(value, list):
        return [timed(item, rounds) for item in value]
    if not isinstance(value, Mapping):
        return value
    rounds = value.get("rounds_done", rounds)
    at = value.get("round", rounds)
    known = {"seconds": _ROUND * (1.0 if "round" in value else rounds), "elapsed": _ROUND * at,
             "cpu_seconds": _PROCESSOR * rounds}  # fmt: skip
    return {key: known[key] if key in known else timed(item, rounds) for key, item in value.items()}


def _elsewhere(environment: dict[str, Any]) -> dict[str, Any]:
    """What a run ran on, without the machine, its places and its day."""
    environment.pop("data_dir", None)
    own = {Path(path).name: digest for path, digest in environment.get("own_files", {}).items()}
    fixed = {
        "python": "3.11", "torch": "2.10.0", "cuda": None, "libraries": {"numpy": "2.0"}, "os": "Linux", "git": None,
        "cpu": {"model": "a processor", "cores": 2}, "memory": 8_000_000_000, "command": ["fedlens", "run"],
        "started": "2026-01-02T03:04:05+00:00", "own_files": own,
    }  # fmt: skip
    return {key: fixed.get(key, value) for key, value in environment.items()}


def main(names: list[str]) -> None:
    """Makes all archives, or those of these names."""
    torch.set_num_threads(1)
    for name in names or list(FOLDERS):
        with elsewhere():
            make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
