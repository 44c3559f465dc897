"""The initial weights of a run that starts from a file, and their copy in the run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import tree_of
from fedlens.files.text_files import parsed_fact
from fedlens.models.prepare import Preparation
from fedlens.models.weights import InitialWeights
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.settings.resolve import Resolved

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


def with_trained_widths(model: Resolved) -> tuple[Resolved, tuple[str, ...]]:
    """The model with the widths that the file of its weights states, if they grew in its run; and a note of them."""
    weights = None if model.shared is None else model.shared.initial_weights
    about = {} if weights is None else weights.metadata
    if model.shared is None or weights is None or "varied" not in about:
        return model, ()
    path = Path(weights.setting)
    if parsed_fact(about, "model", path)["name"] != model.name:
        return model, ()
    changes, now = parsed_fact(about, "varied", path), model.table()
    varied = replace(
        model,
        settings={**model.settings, **changes["settings"]},
        shared=model.shared.varied(**changes["prepare"]),
    )
    new = [f"model.{name} = {value}" for name, value in varied.table().items() if now.get(name) != value]
    return varied, (f"{', '.join(new)}: the widths of {weights.setting}",) if new else ()


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
