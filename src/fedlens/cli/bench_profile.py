"""`fedlens bench profile`: where a round's time goes, and what a model costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.options import DataDir, Debug
from fedlens.cli.output import print_columns, print_json, reported, stdout_kept_clean
from fedlens.cli.training import terminated_like_interrupted

if TYPE_CHECKING:
    from fedlens.benchmark.profile import Profile
    from fedlens.benchmark.profile_model import ModelCost

_STANDARD_OUTPUT = Path("-")


def profile(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE_OR_FILE]", help="A recipe (fedlens list recipes) or a TOML file."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds to time; else as many as take about 20 s.")
    ] = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="What carries the work out.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Without a recipe: what this model costs by itself.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="Of --model: its images; 3,32,32 unless said.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Of --model: how many classes; 10 unless said.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="A line for every layer of the model.")] = False,
    peak: Annotated[
        float | None, typer.Option(metavar="TFLOPS", help="What the chip can do, in 10^12 FLOP/s.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers here; '-' prints them.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a Chrome trace of one more round here, with every operator."
        ),
    ] = None,
    data_dir: DataDir = None,
    download: Annotated[bool, typer.Option("--download", help="Get data that are missing.")] = False,
    debug: Debug = False,
) -> None:
    """Show where a round's time goes, what the model costs, and how near training comes to the chip.

    Runs some rounds, half of them with a clock and half without, and keeps none of them.
    """
    with reported(debug):
        of_recipe = {
            "--rounds": rounds,
            "--engine": engine,
            "--peak": peak,
            "--trace": trace,
            "--data-dir": data_dir,
            "--download": download or None,
        }
        _refuse(recipe, model, {"--shape": shape, "--classes": classes}, of_recipe, peak)
        to_stdout = json_file == _STANDARD_OUTPUT
        if model is not None:
            document = _model(model, changes or (), shape or "3,32,32", classes or 10, layers, to_stdout)
        else:
            assert recipe is not None
            with stdout_kept_clean(to_stdout), terminated_like_interrupted():
                document = _recipe(
                    recipe, changes or (), rounds, engine, peak, trace, data_dir, download, layers
                )
        _keep(document, json_file)


def _refuse(
    recipe: str | None,
    model: str | None,
    of_model: Mapping[str, Any],
    of_recipe: Mapping[str, Any],
    peak: float | None,
) -> None:
    """Raises `ConfigError` where the options do not go together."""
    from fedlens.core.errors import ConfigError

    if (recipe is None) == (model is None):
        what = "there is neither a recipe nor a model" if recipe is None else "a recipe brings its own model"
        hint = "name a recipe, or --model" if recipe is None else "take one of them out"
        raise ConfigError(what, where="--model", hint=hint)
    others, why = (
        (of_model, "it is for --model: a recipe's data say it")
        if model is None
        else (of_recipe, "it is for a recipe: with --model nothing is trained")
    )
    stray = next((name for name, value in others.items() if value is not None), None)
    if stray is not None:
        raise ConfigError(why, where=stray, hint="take it out")
    if peak is not None and not peak > 0:
        raise ConfigError(f"the chip's peak is {peak:g} TFLOP/s", where="--peak", hint="take more than 0")


def _model(
    name: str, changes: Sequence[str], shape: str, classes: int, layers: bool, silent: bool
) -> dict[str, Any]:
    from fedlens.benchmark.profile import model_document, profile_model
    from fedlens.cli.bench_profile_tables import layer_rows, model_rows
    from fedlens.core.errors import ConfigError

    try:
        sides = tuple(int(side) for side in shape.split(","))
    except ValueError:
        sides = ()
    if len(sides) != 3 or min(sides) < 1:
        raise ConfigError(
            f"'{shape}' is no shape of an image",
            where="--shape",
            hint="channels, height and width, such as 3,32,32",
        )
    cost: ModelCost = profile_model(name, changes, sides, classes)
    if not silent:
        print_columns(model_rows(cost))
        if layers:
            _print_layers(layer_rows(cost))
    return {
        "model": model_document(cost),
        "experiment": {"model": name, "input_shape": sides, "classes": classes},
    }


def _recipe(
    recipe: str,
    changes: Sequence[str],
    rounds: int | None,
    engine: str | None,
    peak: float | None,
    trace: Path | None,
    data_dir: Path | None,
    download: bool,
    layers: bool,
) -> dict[str, Any]:
    from fedlens.benchmark.profile import profile as profiled
    from fedlens.cli.run import overrides

    found = profiled(
        recipe,
        overrides(changes, None, None, engine),
        rounds=rounds,
        peak=None if peak is None else peak * 1e12,
        trace=trace,
        data_dir=data_dir,
        download=download,
        say=lambda sentence: print(sentence, file=sys.stderr),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )
    _print(found, layers)
    return found.document()


def _print(found: Profile, layers: bool) -> None:
    from fedlens.cli import bench_profile_tables as tables

    print(tables.heading(found))
    print()
    print_columns(tables.part_rows(found), tables.part_head(found), numeric=tables.part_numeric(found))
    print()
    for line in tables.remarks(found):
        print(line)
    print()
    print_columns([*tables.model_rows(found.model), *tables.cost_rows(found)])
    if layers:
        _print_layers(tables.layer_rows(found.model))


def _print_layers(rows: Sequence[Sequence[str]]) -> None:
    head = ("layer", "kind", "output", "parameters", "FLOPs", "activations")
    print()
    print_columns(rows, head, numeric=(3, 4, 5))


def _keep(document: Mapping[str, Any], file: Path | None) -> None:
    if file is None:
        return
    if file == _STANDARD_OUTPUT:
        print_json(document)
        return
    import json

    from fedlens.core.errors import ConfigError
    from fedlens.experiment.rundir import plain

    text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}", where=str(file), hint="name another"
        ) from None
