"""`fedlens list`: the names that settings may use."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import print_columns, reported

if TYPE_CHECKING:
    from fedlens.core.registry import Registry


class Kind(StrEnum):
    """The kinds of names that can be listed."""

    RECIPES = "recipes"
    ALGORITHMS = "algorithms"
    DATASETS = "datasets"
    MODELS = "models"
    PARTITIONS = "partitions"
    ENGINES = "engines"


REGISTRIES = {
    Kind.ALGORITHMS: ("fedlens.algorithms.registry", "ALGORITHMS"),
    Kind.DATASETS: ("fedlens.data.datasets.registry", "DATASETS"),
    Kind.MODELS: ("fedlens.models.registry", "MODELS"),
    Kind.PARTITIONS: ("fedlens.data.partition.registry", "PARTITIONS"),
    Kind.ENGINES: ("fedlens.engines.registry", "ENGINES"),
}


def list_names(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)], debug: Debug = False
) -> None:
    """List the available recipes, algorithms, datasets, models, partitions or engines."""
    with reported(debug):
        if kind is Kind.RECIPES:
            from fedlens.experiment.config_source import recipes

            print_columns([(name, _first_comment(path)) for name, path in recipes().items()])
            return
        module, name = REGISTRIES[kind]
        registry: Registry = getattr(import_module(module), name)
        print_columns(registry.rows())


def _first_comment(path: Path) -> str:
    """The one-line description of a recipe."""
    with path.open(encoding="utf-8") as file:
        return next((line.lstrip("# ").strip() for line in file if line.startswith("#")), "")
