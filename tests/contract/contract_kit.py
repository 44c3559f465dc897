"""The table that every property runs over, and how two runs are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.api import Experiment, Result
from fedlens.core.tree import digest
from fedlens.experiment import checkpoint
from fedlens.experiment.progress import Silent

USERS = str(Path(__file__).with_name("users.py"))

# Every algorithm there is, and a user's own. A new one has to come in here: test_table.py looks.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedavgm": {"name": "fedavgm", "momentum": 0.5, "lr": 0.8},
    "fedavgm-nesterov": {"name": "fedavgm", "momentum": 0.5, "nesterov": True},
    "fedprox": {"name": "fedprox", "mu": 0.3},
    "centralized": {"name": "centralized"},
    "remembering": {"name": f"{USERS}:remembering", "pull": 0.2},
    "centred": {"name": f"{USERS}:centred", "share": 0.5},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid", "clients": 6},
    "shards": {"name": "shards", "clients": 6, "classes_per_client": 2},
    "mcmahan": {"name": "shards", "clients": 6, "classes_per_client": 2, "scheme": "mcmahan"},
    "dirichlet": {"name": "dirichlet", "clients": 6, "alpha": 0.3},
    "uneven": {"name": f"{USERS}:uneven", "clients": 6},
}
# Those that need more than labels, or are of the same make as one above: with one algorithm, over SCATTERED.
MORE_PARTITIONS: dict[str, dict[str, Any]] = {
    "iid-log-normal": {"name": "iid", "clients": 6, "sizes": "log-normal"},
    "quantity": {"name": "quantity", "clients": 6},
    "classwise": {"name": "dirichlet-classwise", "clients": 6, "alpha": 0.3},
    "pachinko": {"name": "pachinko", "clients": 6},
    "multilabel": {"name": "lda-multilabel", "clients": 4, "alpha": 0.5},
    "frequency": {"name": "detection-frequency", "clients": 4},
    "natural": {"name": "natural"},
    "s2": {"name": "s2", "n_max": 60},
    "feature": {"name": "feature", "clients": 6},
    "mix": {"name": "mix", "outer": "natural", "inner": {"name": "feature", "clients": 2}},
    "file": {"name": "file", "path": "saved.npz"},
    "federated-csv": {"name": "federated-csv", "path": "list.csv"},
}
SCATTERED = f"{USERS}:scattered"
NORM_NET = {"name": f"{USERS}:norm_net"}
INLINE = {"name": "inline"}
LOCAL = {"lr": 0.05, "momentum": 0.5, "epochs": 1, "batch_size": 32}


def settings(algorithm: str = "fedavg", partition: str = "iid", **changes: Any) -> dict[str, Any]:
    """A small experiment on the embedded digits; a cohort of three of six."""
    made: dict[str, Any] = {
        "rounds": 4,
        "model": NORM_NET,
        "algorithm": ALGORITHMS[algorithm],
        "local": LOCAL,
        "data": {"dataset": "digits", "partition": PARTITIONS[partition], "augment": "pad-crop-flip"},
        "record": {"clients": True},
    }
    if algorithm != "centralized":
        made["select"] = {"clients_per_round": 3}
    return made | changes


def experiment(algorithm: str = "fedavg", partition: str = "iid", **changes: Any) -> Experiment:
    """The experiment of these settings."""
    return Experiment(**settings(algorithm, partition, **changes))


def separable(algorithm: str, partition: str, **changes: Any) -> Experiment:
    """Four smooth patterns with little noise."""
    dataset = {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 240, "test": 80, "noise": 0.1}
    data = {"dataset": dataset, "partition": PARTITIONS[partition]}
    local = {"lr": 0.1, "epochs": 2, "batch_size": 10}
    easy = {"rounds": 12, "model": "small-cnn", "data": data, "local": local}
    return experiment(algorithm, partition, **easy | changes)


def weights(result: Result) -> str:
    """The digest of the final model."""
    tree, _ = checkpoint.read_model(result.directory / "model.safetensors")
    return digest(tree)


def lines(result: Result) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, times aside."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in result.metrics]


def outcome(result: Result) -> tuple[Any, ...]:
    """All that has to be equal where two runs are the same."""
    summary = result.summary
    client_lines = (result.directory / "clients.jsonl").read_text()
    return weights(result), lines(result), client_lines, summary["best"], summary["failures"]


def failures(result: Result) -> dict[str, dict[str, int]]:
    """The failures of a summary, without the place in the code that a reason may end with."""
    counted = result.summary["failures"]
    return {
        client: {reason.split(" (")[0]: n for reason, n in row.items()} for client, row in counted.items()
    }


class Stopping(Silent):
    """Ctrl-C as soon as a round is written down."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt
