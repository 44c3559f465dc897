"""`fedlens show`: the TOML of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Debug


def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe (fedlens list recipes).")],
    debug: Debug = False,
) -> None:
    """Print a recipe's TOML, for example to edit a copy: `fedlens show digits > my.toml`."""
    with reported(debug):
        from fedlens.settings.config_source import recipe_path

        say(recipe_path(recipe).read_text(encoding="utf-8").removesuffix("\n"))
