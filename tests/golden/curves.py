"""The runs whose curves are kept in digits.json, and how to draw them anew.

`python -m tests.golden.curves` writes digits.json: after a change that is meant to change results, and only then.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fedlens.api import Experiment

FILE = Path(__file__).with_name("digits.json")
CONTIGUOUS = Path(__file__).with_name("digits-contiguous.json")  # with channels_last = false
TESTED = 360  # images in the test split
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedavgm": {"name": "fedavgm", "momentum": 0.5, "nesterov": True},
    "fedprox": {"name": "fedprox", "mu": 0.5},
}


def experiment(algorithm: str, **engine: Any) -> Experiment:
    """Twenty clients with two classes each; everything that has a default and a say is written down."""
    return Experiment(
        seed=0,
        rounds=5,
        data={
            "dataset": "digits",
            "partition": {"name": "shards", "clients": 20, "classes_per_client": 2, "scheme": "distinct"},
            "validation": 0.0,
            "augment": "none",
        },
        model={"name": "small-cnn", "width": 16},
        algorithm=ALGORITHMS[algorithm],
        select={"name": "uniform", "clients_per_round": 10},
        local={"optimizer": "sgd", "lr": 0.05, "momentum": 0.5, "epochs": 2, "batch_size": 10},
        engine={"name": "inline", "threads": 1, **engine},
    )


def curve(algorithm: str, directory: Path, **engine: Any) -> dict[str, Any]:
    """The curve of one run, in full precision."""
    result = experiment(algorithm, **engine).run(directory)
    lines = result.metrics
    return {
        "partition": result.summary["partition"]["digest"],
        "correct": [_whole(line["test_accuracy"] * TESTED) for line in lines],
        "test_loss": [line["test_loss"] for line in lines],
        "local_loss": [line["local_loss"] for line in lines],
    }


def _whole(number: float) -> int:
    assert abs(number - round(number)) < 1e-9, f"{number} images of {TESTED} are not a whole number"
    return round(number)


def main() -> None:
    """Draws every curve and writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = {name: curve(name, Path(folder) / name) for name in ALGORITHMS}
    FILE.write_text(json.dumps(drawn, indent=2) + "\n")


if __name__ == "__main__":
    main()
