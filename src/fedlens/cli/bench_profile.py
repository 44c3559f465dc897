"""`fedlens bench profile`: where a round's time goes, and what a model costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import print_json, reported, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName

_STANDARD_OUTPUT = Path("-")
_OF_MODEL = ("shape", "classes")
_OF_RECIPE = ("rounds", "engine", "peak", "trace", "data_dir", "download")


def profile(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE_OR_FILE]", help="A recipe (fedlens list recipes) or a TOML file."),
    ] = None,
    changes: Changes = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of measured rounds; default about 20 s of them.")
    ] = None,
    engine: EngineName = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Profile this model alone, without a recipe.")
    ] = None,
    shape: Annotated[str, typer.Option(metavar="C,H,W", help="Image shape for --model.")] = "3,32,32",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes for --model.")] = 10,
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer of the model.")] = False,
    peak: Annotated[
        float | None,
        typer.Option(metavar="TFLOPS", help="Peak speed of the processor or GPU, in 10^12 FLOP/s."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all numbers to this file; '-' prints them."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace of one extra round, with every operator."),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    debug: Debug = False,
) -> None:
    """Show where a round's time goes, what the model costs, and how near training comes to the chip's peak.

    Runs some rounds, half of them with a clock and half without. Their results are discarded.
    """
    with reported(debug, json_file == _STANDARD_OUTPUT):
        _check(context, recipe, model, peak)
        with stdout_kept_clean(json_file == _STANDARD_OUTPUT):
            from fedlens.benchmark import profile as module
            from fedlens.cli.bench_profile_tables import print_profile
            from fedlens.cli.run import overrides
            from fedlens.run.environment import command_words

            if recipe is not None:
                document = module.profile(
                    recipe,
                    overrides(changes or (), None, None, engine),
                    rounds=rounds,
                    peak=peak and peak * 1e12,
                    trace=trace,
                    data_dir=data_dir,
                    download=download,
                    say=lambda sentence: print(sentence, file=sys.stderr),
                    command=command_words(sys.argv),
                )
            else:
                document = module.profile_model(str(model), changes or (), sides(shape), classes)
            print_profile(document, layers)
        if json_file == _STANDARD_OUTPUT:
            print_json(document)
        elif json_file is not None:
            from fedlens.benchmark.results_file import write

            write(document, json_file)


def _check(context: typer.Context, recipe: str | None, model: str | None, peak: float | None) -> None:
    """Raises `ConfigError` where the options do not go together."""
    from fedlens.base.errors import ConfigError

    if recipe is None and model is None:
        raise ConfigError("neither a recipe nor a model is named", where="--model", hint="name one of them")
    if recipe is not None and model is not None:
        raise ConfigError("a recipe brings its own model", where="--model", hint="remove one of them")
    others, what = (
        (_OF_MODEL, "it applies to --model alone: the data of a recipe determine it")
        if model is None
        else (_OF_RECIPE, "it applies to a recipe alone: with --model nothing is trained")
    )
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(what, where=f"--{name.replace('_', '-')}", hint="remove it")
    if peak is not None and not peak > 0:
        raise ConfigError(f"invalid peak: {peak:g} TFLOP/s", where="--peak", hint="take more than 0")


def sides(shape: str) -> Sequence[int]:
    """Channels, height and width."""
    from fedlens.base.errors import ConfigError

    sides = [int(side) for side in shape.split(",") if side.isdecimal()]
    if len(sides) != 3 or min(sides) < 1 or ",".join(map(str, sides)) != shape:
        raise ConfigError(
            f"'{shape}' is not the shape of an image",
            where="--shape",
            hint="give channels, height and width, such as 3,32,32",
        )
    return sides
