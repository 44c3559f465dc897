"""`fedlens run`: train the experiment of a recipe or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from fedlens.cli.display.output import reported
from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName, Json, Quiet, Report, Strict
from fedlens.cli.run_with_progress import train

if TYPE_CHECKING:
    from fedlens.api import Result
    from fedlens.cli.display.run_display import RunDisplay


class RunCommand(TyperCommand):
    """Answers an unknown option that is the name of a setting with the `--set` to use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for option in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if option not in known and option not in ctx.help_option_names:
                with reported(False, "--json" in args):
                    _refuse_option(option, args)
        return super().parse_args(ctx, args)


def _refuse_option(option: str, args: Sequence[str]) -> None:
    from fedlens.base.errors import ConfigError
    from fedlens.settings.config import settings_named

    keys = settings_named(option.lstrip("-").replace("-", "_"))
    if keys:
        wanted = " or ".join(f"--set {key}={_value_of(option, args)}" for key in keys)
        raise ConfigError(f"no such option: {option}", hint=f"use {wanted}")


def _value_of(option: str, args: Sequence[str]) -> str:
    """What follows an option on a command line.

    >>> _value_of("--lr", ["digits", "--lr", "0.1"]), _value_of("--lr", ["--lr=0.2"]), _value_of("--lr", ["--lr"])
    ('0.1', '0.2', 'VALUE')
    """
    for at, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        if arg == option and at + 1 < len(args) and not args[at + 1].startswith("--"):
            return args[at + 1]
    return "VALUE"


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    engine: EngineName = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run directory; default runs/<name>/<run-id>.")
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    report: Report = True,
    quiet: Quiet = False,
    as_json: Json = False,
    strict: Strict = False,
    debug: Debug = False,
) -> None:
    """Run an experiment, and write its results and a result page to a run directory."""

    with reported(debug, as_json) as output:
        settings = overrides(changes or (), rounds, seed, engine)

        def start(progress: RunDisplay) -> Result:
            from fedlens.api import Experiment

            experiment = Experiment.load(recipe, settings)
            return experiment.run(out, data_dir=data_dir, download=download, progress=progress, report=report)

        train(start, quiet=quiet, output=output, strict=strict)


def overrides(changes: Sequence[str], rounds: int | None, seed: int | None, engine: str | None) -> list[str]:
    """The settings of the command line as key=value; those with an option of their own come last and win.

    >>> overrides(["local.lr=0.1"], 5, None, "inline")
    ['local.lr=0.1', 'rounds=5', 'engine.name=inline']
    """
    named = {"rounds": rounds, "seed": seed, "engine.name": engine}
    return [*changes, *(f"{key}={value}" for key, value in named.items() if value is not None)]
