"""`fedlens show`: a recipe's TOML, ready to be changed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import reported


def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe (fedlens list recipes).")],
    debug: Debug = False,
) -> None:
    """Print a recipe as it is: `fedlens show digits > my.toml` makes one's own."""
    with reported(debug):
        from fedlens.experiment.config_source import recipe_path

        sys.stdout.write(recipe_path(recipe).read_text(encoding="utf-8"))
