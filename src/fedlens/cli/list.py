"""`fedlens list`: the names that settings may use."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.display.output import print_columns, print_json, reported
from fedlens.cli.options import Debug, Json

if TYPE_CHECKING:
    from fedlens.base.registry import Registry


class Kind(StrEnum):
    """The kinds of names that can be listed."""

    RECIPES = "recipes"
    ALGORITHMS = "algorithms"
    DATASETS = "datasets"
    MODELS = "models"
    PARTITIONS = "partitions"
    ENGINES = "engines"
    TASKS = "tasks"
    ANALYSES = "analyses"


REGISTRIES = {
    Kind.ALGORITHMS: ("fedlens.algorithms.registry", "ALGORITHMS"),
    Kind.DATASETS: ("fedlens.data.datasets.registry", "DATASETS"),
    Kind.MODELS: ("fedlens.models.registry", "MODELS"),
    Kind.PARTITIONS: ("fedlens.data.partition.registry", "PARTITIONS"),
    Kind.ENGINES: ("fedlens.engines.registry", "ENGINES"),
    Kind.TASKS: ("fedlens.tasks.registry", "TASKS"),
    Kind.ANALYSES: ("fedlens.analyses.registry", "ANALYSES"),
}


def list_names(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the available recipes, algorithms, datasets, models, partitions, engines, tasks or analyses.

    With --json, each has a name and a summary; a model also has its task, source, licence, parameters, multiply-adds
    for one image of the stated shape, and normalization layers.
    """
    with reported(debug, as_json):
        if as_json:
            print_json({str(kind): _documented(kind)})
        else:
            print_columns(_rows(kind))


def _rows(kind: Kind) -> list[tuple[str, str]]:
    """Each name with its one-line summary; imports no PyTorch."""
    if kind is Kind.RECIPES:
        from fedlens.settings.config_source import recipes

        return [(name, _first_comment(path)) for name, path in recipes().items()]
    module, name = REGISTRIES[kind]
    registry: Registry = getattr(import_module(module), name)
    return registry.rows()


def _documented(kind: Kind) -> list[dict[str, Any]]:
    """What `--json` prints of each name."""
    if kind is Kind.MODELS:
        return model_rows()
    return [{"name": name, "summary": summary} for name, summary in _rows(kind)]


def _first_comment(path: Path) -> str:
    """The one-line description of a recipe."""
    with path.open(encoding="utf-8") as file:
        return next((line.lstrip("# ").strip() for line in file if line.startswith("#")), "")


def model_rows() -> list[dict[str, Any]]:
    """Each model with its counts, source and licence; imports PyTorch.

    The counts are null, with a `reason`, where a package is missing, and for models of other packages.
    """
    from fedlens.models.registry import MODELS

    return [_row(name, summary, MODELS.entries.get(name)) for name, summary in MODELS.rows()]


def _row(name: str, summary: str, entry: object) -> dict[str, Any]:
    import torch

    from fedlens.base.errors import ConfigError
    from fedlens.models.counts import counted
    from fedlens.models.registry import MODELS, ModelEntry

    row: dict[str, Any] = {"name": name, "summary": summary}
    counts = {"parameters": None, "multiply_adds": None, "norm_layers": None}
    if not isinstance(entry, ModelEntry):
        nothing = dict.fromkeys(("task", "source", "licence", "input_shape", "classes", "vocabulary"))
        why = "the package that offers it does not say for which images it is"
        return row | nothing | counts | {"reason": why}
    about: dict[str, Any] = {
        "task": entry.task,
        "source": entry.source,
        "licence": entry.licence,
        "input_shape": list(entry.shape),
        "classes": entry.classes,
        "vocabulary": entry.vocabulary,
    }
    dtype = torch.int64 if entry.task == "language" else torch.float32
    settings = {} if entry.vocabulary is None else {"vocabulary": entry.vocabulary}
    try:
        found = counted(
            partial(MODELS.find(name), entry.shape, entry.classes, **settings), entry.shape, dtype
        )
    except ConfigError as error:
        return row | about | counts | {"reason": str(error)}
    return row | about | {**vars(found)} | {"reason": None}
