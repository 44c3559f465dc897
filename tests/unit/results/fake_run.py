"""Run directories as the runner writes them, without a runner."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table

_COUNTED = ("clients", "failed", "examples", "batches_max", "bytes_up", "bytes_down", "seconds")


def line(at: int, **more: Any) -> dict[str, Any]:
    """One line of metrics.jsonl, learning as it goes; `more` sets keys, and a key set to ... is left out."""
    row: dict[str, Any] = {
        "round": at,
        "test_loss": 2.3 * math.exp(-at / 12) + 0.2,
        "test_accuracy": 0.1 + 0.75 * (1 - math.exp(-at / 8)) + 0.02 * math.sin(at * 1.7),
        "elapsed": 1.5 * at,
    }
    row |= {"local_loss": None} | dict.fromkeys(_COUNTED, 0)
    if at:
        row |= {
            "local_loss": 1.9 * math.exp(-at / 9) + 0.1,
            "clients": 5,
            "failed": 0,
            "examples": 450,
            "batches_max": 9,
            "bytes_up": 180_000,
            "bytes_down": 180_000,
            "seconds": 1.5,
        }
    return {key: value for key, value in (row | more).items() if value is not ...}


def class_counts(
    clients: int = 20, classes: int = 10, alpha: float = 0.3, *, even: bool = True
) -> np.ndarray:
    """int64 [clients, classes]."""
    rng = np.random.default_rng(0)
    sizes = np.full(clients, 90) if even else (rng.lognormal(4, 0.9, clients) + 2).astype(int)
    return np.stack([rng.multinomial(n, rng.dirichlet(np.full(classes, alpha))) for n in sizes]).astype(
        np.int64
    )


def make_partition(counts: np.ndarray, classes: Sequence[str] | None = None, **more: Any) -> Partition:
    """A partition in which client k holds `counts[k, c]` examples of class c."""
    clients, width = counts.shape
    labels = np.concatenate([np.repeat(np.arange(width), row) for row in counts])
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    table = replace(Table.of(labels), classes=tuple(classes or map(str, range(width))))
    given = {"ids": tuple(map(str, range(clients))), "spec": {"name": "own"}, "dataset": "digits"} | more
    return Partition(indices=np.arange(len(labels)), offsets=offsets, **given).counted(table)


def make_run(
    root: Path,
    *,
    name: str = "digits",
    run_id: str = "20261120-101500",
    algorithm: str = "fedavg",
    rounds: int = 30,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    summary: Mapping[str, Any] | None = None,
    counts: np.ndarray | None = None,
    classes: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A run directory root/name/run_id; `summary={}` leaves it out, else changes keys of a finished one."""
    directory = root / name.replace("/", "-") / run_id
    directory.mkdir(parents=True)
    rows = [line(at) for at in range(rounds + 1)] if metrics is None else list(metrics)
    settings: dict[str, Any] = {
        "name": name,
        "seed": 0,
        "rounds": rounds,
        "data": {
            "dataset": "digits",
            "partition": {"name": "shards", "clients": 20, "classes_per_client": 2},
            "validation": 0.0,
        },
        "model": {"name": "small-cnn"},
        "select": {"name": "uniform", "clients_per_round": 5},
        "algorithm": {"name": algorithm},
        "local": {
            "optimizer": "sgd",
            "lr": 0.05,
            "momentum": 0.9,
            "epochs": 2,
            "batch_size": 16,
            "lr_decay": 1.0,
        },
        "engine": {"name": "processes", "workers": 2, "threads": 1},
        "evaluation": {"every": 1, "batch_size": 512},
        "record": {"clients": False},
    }
    (directory / "config.toml").write_text(tomli_w.dumps(settings | dict(config or {})), encoding="utf-8")
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    environment = {
        "fedlens": "0.1.0",
        "python": "3.11.7",
        "torch": "2.10.0",
        "hardware": {"cpu": "a processor", "cores": 2},
        "command": ["fedlens", "run", "digits", "--set", "local.lr=0.05"],
        "start_time": "2026-11-20T10:15:00Z",
        "seed": 0,
    }
    (directory / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    if summary != {}:
        whole = finished(directory, name, run_id, algorithm, rounds, rows) | dict(summary or {})
        (directory / "summary.json").write_text(json.dumps(whole), encoding="utf-8")
    if counts is not None:
        make_partition(counts, classes).save(directory / "partition.npz")
    return directory


def finished(
    directory: Path, name: str, run_id: str, algorithm: str, rounds: int, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The summary of a run that went through."""
    tested = [row for row in rows if row.get("test_accuracy") is not None]
    best = max(tested, key=lambda row: row["test_accuracy"], default=None)
    return {
        "name": name,
        "run_id": run_id,
        "status": "finished",
        "error": None,
        "rounds": rounds,
        "rounds_done": rows[-1]["round"] if rows else 0,
        "final": tested[-1] if tested else {},
        "best": best
        and {
            "round": best["round"],
            "metric": "test_accuracy",
            "value": best["test_accuracy"],
            "chosen_on": "test",
        },
        "totals": {
            key: sum(row.get(key) or 0 for row in rows)
            for key in ("seconds", "examples", "bytes_up", "bytes_down", "clients", "failed")
        },
        "failures": {},
        "partition": {"clients": 20, "examples": 1797, "digest": "ab12" * 16, "emd": 1.6},
        "model": {"name": "small-cnn", "parameters": 28938},
        "algorithm": algorithm,
        "dataset": "digits",
        "engine": "processes",
        "seed": 0,
        "directory": f"runs/{name}/{run_id}",
    }
