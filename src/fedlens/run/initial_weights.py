"""The initial weights of a run that starts from a file, and their copy in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import tree_of
from fedlens.models.prepare import Preparation
from fedlens.models.weights import InitialWeights
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir

_NOTE = "note"


def initial_weights(model: ModelSpec, copy: Path | None = None) -> InitialWeights | None:
    """The weights that the model starts from; None if they are drawn.

    Where `copy` exists, the file of the initial model in a run directory, they are read from there. Raises `DataError`
    if it is damaged.
    """
    weights = model.prepare.initial_weights if isinstance(model.prepare, Preparation) else None
    if weights is not None and copy is not None and copy.exists():
        _, metadata = checkpoint.read_model(copy)
        weights.keep(copy, metadata.get(_NOTE))
    return weights


def settings_read(weights: InitialWeights | None) -> dict[str, str]:
    """The settings of the file that was read, with its digest: two runs from different files differ in it."""
    if weights is None or weights.sha256 is None:
        return {}
    return {"weights": weights.setting, "weights_sha256": weights.sha256}


def write_initial(model: ModelSpec, directory: RunDir) -> dict[str, Any]:
    """Writes the initial model of a run that starts from a file, so that `resume` needs the file no more.

    Returns what `environment.json` says of the weights; empty if they were drawn.
    """
    weights = initial_weights(model)
    if weights is None or weights.match is None:
        return {}
    checkpoint.write_model(directory.initial_path, tree_of(model.build()), {_NOTE: weights.note or ""})
    weights.keep(directory.initial_path)
    match = weights.match
    return {
        "weights": {
            "source": weights.setting,
            "sha256": weights.sha256,
            "loaded": len(match.loaded),
            "leaves": match.leaves,
            "resized": match.resized,
            "drawn": [*match.head, *match.drawn],
            "unused": match.unused,
        }
    }
