"""The rows of `fedlens list models --json`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.models.registry import MODELS, ModelEntry


def model_rows() -> list[dict[str, Any]]:
    """Each model with its counts, source and licence; imports PyTorch.

    The counts are null, with a `reason`, where a package is missing, and for models of other packages.
    """
    return [_row(name, summary, MODELS.entries.get(name)) for name, summary in MODELS.rows()]


def _row(name: str, summary: str, entry: object) -> dict[str, Any]:
    from fedlens.models.counts import counted

    row: dict[str, Any] = {"name": name, "summary": summary}
    counts = {"parameters": None, "multiply_adds": None, "norm_layers": None}
    if not isinstance(entry, ModelEntry):
        nothing = dict.fromkeys(("task", "source", "licence", "input_shape", "classes", "vocabulary"))
        return (
            row
            | nothing
            | counts
            | {"reason": "the package that offers it does not say for which images it is"}
        )
    about: dict[str, Any] = {
        "task": entry.task,
        "source": entry.source,
        "licence": entry.licence,
        "input_shape": list(entry.shape),
        "classes": entry.classes,
        "vocabulary": entry.vocabulary,
    }
    import torch

    dtype = torch.int64 if entry.task == "language" else torch.float32
    settings = {} if entry.vocabulary is None else {"vocabulary": entry.vocabulary}
    try:
        found = counted(
            partial(MODELS.find(name), entry.shape, entry.classes, **settings), entry.shape, dtype
        )
    except ConfigError as error:
        return row | about | counts | {"reason": str(error)}
    return row | about | {**vars(found)} | {"reason": None}
