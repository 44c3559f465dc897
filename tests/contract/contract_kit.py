"""The table that every property runs over, and how two runs are told apart."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Experiment, Result
from fedlens.core.tree import digest
from fedlens.run import checkpoint
from fedlens.run.progress import ProgressBase

USERS = str(Path(__file__).with_name("users.py"))

# Every algorithm there is, and a user's own. A new one has to come in here: test_table.py looks.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedavgm": {"name": "fedavgm", "momentum": 0.5, "lr": 0.8},
    "fedavgm-nesterov": {"name": "fedavgm", "momentum": 0.5, "nesterov": True},
    "fedprox": {"name": "fedprox", "mu": 0.3},
    "fedir": {"name": "fedir"},
    "fedir-population": {"name": "fedir", "target": "population", "normalize": False},
    "fedvc": {"name": "fedvc", "examples": 40},
    "scaffold": {"name": "scaffold"},
    "scaffold-full-gradient": {"name": "scaffold", "option": "I", "lr": 0.25},
    "feddyn": {"name": "feddyn", "alpha": 0.5},
    "feddyn-by-examples": {"name": "feddyn", "alpha": 0.5, "weighting": "examples"},
    "mime": {"name": "mime", "beta": 0.5},
    "mime-adam": {"name": "mime", "optimizer": "adam", "beta": 0.5, "eps": 0.1, "v0": 1.0},
    "mimelite": {"name": "mimelite", "beta": 0.5},
    "feddane": {"name": "feddane", "mu": 0.1},
    "fedadagrad": {"name": "fedadagrad"},
    "fedadam": {"name": "fedadam"},
    "fedadam-corrected": {"name": "fedadam", "bias_correction": True},
    "fedyogi": {"name": "fedyogi"},
    "fednova": {"name": "fednova"},
    "moon": {"name": "moon", "mu": 1.0},
    "admm": {"name": "admm", "sigma": 0.5, "max_iterations": 3},
    "admm-sgd-last": {"name": "admm", "solver": "sgd", "absent": "last", "sigmas": "equal"},
    "ceadmm": {"name": "ceadmm", "sigma": 1.0, "k_0": 2, "max_iterations": 2},
    "iceadmm": {"name": "iceadmm", "absent": "last", "sigma": 5.0, "r": 5.0},
    "liadmm": {"name": "liadmm"},
    "liadmm-training": {"name": "liadmm", "gradient": "training"},
    "fedbn": {"name": "fedbn"},
    "local-only": {"name": "local-only"},
    "finetune": {"name": "finetune", "epochs": 1},
    "fedgkt": {"name": "fedgkt", "client": f"{USERS}:norm_net", "cut": "1"},
    "splitfed": {"name": "splitfed", "cut": "1"},
    "splitfed-v2": {"name": "splitfed", "cut": "1", "variant": "v2", "keep_optimizer": True},
    "splitfed-two-cuts": {"name": "splitfed", "cut": ["0", "3"], "activations": "float16"},
    "split-relay": {"name": "split-relay", "cut": "1"},
    "split-relay-fresh": {
        "name": "split-relay",
        "cut": ["0", "3"],
        "carry_optimizer": False,
        "server_rate": 0.5,
    },
    "fednas": {"name": "fednas", "alpha_lr": 0.05},
    "fedma": {"name": "fedma"},
    "vertical": {"name": "vertical", "top": "concat", "width": 4, "hidden": [8]},
    "centralized": {"name": "centralized"},
    "remembering": {"name": f"{USERS}:remembering", "pull": 0.2},
    "centred": {"name": f"{USERS}:centred", "share": 0.5},
    "dsgd": {"name": "dsgd", "topology": {"name": "ring"}},
    "push-sum": {
        "name": "push-sum",
        "topology": {"name": "erdos-renyi", "probability": 0.5, "redraw": True},
    },
    "gradient-tracking": {"name": "gradient-tracking"},
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
DATASET = {"name": "synthetic", "shape": [1, 8, 8], "train": 300, "test": 60}
PATTERNS = {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 240, "test": 80, "noise": 0.1}
LOCAL = {"lr": 0.05, "momentum": 0.5, "epochs": 1, "batch_size": 20}
# Algorithms that are measured at the clients, each on what it holds out of its own data.
PERSONAL = {"fedbn", "local-only", "finetune"}
HELD_OUT = {"validation": 0.2, "validation_from": "client"}
# Names of algorithms that refuse a momentum at the clients, and of those that ask clients twice a round.
WITHOUT_MOMENTUM = {"mime", "mimelite", "gradient-tracking"}
TWO_EXCHANGES = {"mime", "feddane"}
# Rows of which all clients take part.
PEERS = {"dsgd", "push-sum", "gradient-tracking"}
STEP_BY_STEP = {"push-sum", "gradient-tracking"}  # of which each step is a round trip, or several
# Rows whose algorithm takes models of one kind alone.
OWN_MODELS = {
    "fednas": {"name": "darts-search", "channels": 2, "cells": 3, "nodes": 1},
    "fedma": {"name": "small-cnn", "width": 4},
}
# Rows whose clients are parties with parts of the same images.
ON_PARTIES = {"vertical"}
WITHOUT_SELECT = {"centralized", *PEERS, *ON_PARTIES}
# The partition of an algorithm where one is enough: a property that runs over the table says something of all of them.
PARTITION_OF = dict(zip(ALGORITHMS, cycle(PARTITIONS), strict=False)) | dict.fromkeys(PEERS, "shards")
# Whose server trains too, on what clients send of each example.
SERVER_TRAINS = {"fedgkt"}
# Rows whose clients solve a subproblem, and refuse settings of local steps.
SOLVERS = {"admm", "ceadmm", "iceadmm", "liadmm"}


def settings(inner: str = "fedavg", partition: str = "iid", **changes: Any) -> dict[str, Any]:
    """A small experiment; a cohort of three of six clients, which train about three steps each."""
    made: dict[str, Any] = {
        "rounds": 4,
        "model": NORM_NET,
        "algorithm": ALGORITHMS[inner],
        "local": LOCAL,
        "data": {"dataset": DATASET, "partition": PARTITIONS[partition], "augment": "pad-crop-flip"},
        "record": {"clients": True},
    }
    if inner not in WITHOUT_SELECT:
        made["select"] = {"clients_per_round": 3}
    if made["algorithm"]["name"] in WITHOUT_MOMENTUM:
        made["local"] = LOCAL | {"momentum": 0.0}
    made |= changes
    if inner in OWN_MODELS and "model" not in changes:
        made["model"] = OWN_MODELS[inner]
    if inner == "fednas" and "local" not in changes:  # its steps take ten times as long: one of each kind
        made["local"] = made["local"] | {"batch_size": 50}
    if inner in ON_PARTIES:
        made["data"] = {"dataset": made["data"]["dataset"], "parties": {"split": "quadrants", "overlap": 0.8}}
    if inner in SOLVERS:
        made["local"] = {"lr": made["local"]["lr"], "batch_size": made["local"]["batch_size"]}
    if inner in PERSONAL:
        made["data"] = made["data"] | HELD_OUT
    return made


# Of different makes: one of each kind of selection, state and exchange. The others run in the nightly tier too.
CHOSEN = (
    "fedavg", "fedvc", "fedir-population", "scaffold", "mime", "feddane", "admm-sgd-last", "ceadmm", "fedbn",
    "remembering", "dsgd", "splitfed", "centralized",
)  # fmt: skip

Baseline = Callable[..., Result]


def nightly_but(chosen: Container[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters: those not in `chosen` run in the nightly tier alone."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def experiment(inner: str = "fedavg", partition: str = "iid", **changes: Any) -> Experiment:
    """The experiment of these settings."""
    return Experiment(**settings(inner, partition, **changes))


def separable(algorithm: str, partition: str, **changes: Any) -> Experiment:
    """Four smooth patterns with little noise."""
    data = {"dataset": PATTERNS, "partition": PARTITIONS[partition]}
    local = {"lr": 0.1, "epochs": 2, "batch_size": 10}
    model = {"name": "small-cnn", "norm": "batch" if algorithm == "fedbn" else "none"}
    easy = {"rounds": 8, "model": model, "data": data, "local": local}
    if algorithm == "fednas":
        search = {"name": "darts-search", "channels": 4, "cells": 3, "nodes": 1}
        easy |= {"model": search, "rounds": 20}
    if algorithm == "fedma":
        easy |= {"rounds": 12}
    if algorithm == "fedgkt":
        client = {"name": "small-cnn", "norm": "none"}
        easy |= {"algorithm": {"name": "fedgkt", "client": client, "cut": "0"}, "rounds": 12}
    if algorithm in STEP_BY_STEP | ON_PARTIES:
        easy["local"] = local | {"epochs": 1}
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
    rows = result.directory / "clients.jsonl"  # a blind sum records no single clients
    client_lines = rows.read_text() if rows.exists() else ""
    return weights(result), lines(result), client_lines, summary["best"], summary["failures"]


def judged(line: dict[str, Any]) -> tuple[float, float]:
    """Loss and accuracy of a round: on test, or at the clients where there is no one model to test."""
    split = "test" if "test_loss" in line else "validation"
    return line[f"{split}_loss"], line[f"{split}_accuracy"]


def failures(result: Result) -> dict[str, dict[str, int]]:
    """The failures of a summary, without the place in the code that a reason may end with."""
    counted = result.summary["failures"]
    return {
        client: {reason.split(" (")[0]: n for reason, n in row.items()} for client, row in counted.items()
    }


class Stopping(ProgressBase):
    """Ctrl-C as soon as a round is written down."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt
