"""`fedlens bench profile`: where a round's time goes, and what a model costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.base.format import many, percent, size
from fedlens.cli.display.output import print_columns, print_json, reported, stdout_kept_clean
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


Document = Mapping[str, Any]


def print_profile(document: Document, layers: bool) -> None:
    """Prints the parts of a round, where one was timed, and what the model costs; `layers` adds a row for each."""
    rows = _model_rows(document["model"])
    if "round" in document:
        print(_heading(document), end="\n\n")
        _print_parts(document["round"])
        print("", *_remarks(document["round"]), "", sep="\n")
        rows += _experiment_rows(document)
    print_columns(rows)
    if layers:
        print()
        _print_layers(document["model"])


def _heading(document: Document) -> str:
    """What was profiled, in one line."""
    experiment, processes = document["experiment"], document["round"]["workers"]["processes"]
    engine, clients = experiment["engine"], experiment["clients"]
    workers = f" {processes} x {engine.get('threads', 1)}" if processes else ""
    return (
        f"{experiment['name']}: {experiment['algorithm']}, {experiment['model']}, {experiment['dataset']}, "
        f"{experiment['clients_per_round'] or clients} of {clients} clients a round; "
        f"{engine['name']}{workers}, {experiment['device']}, {experiment['precision']}"
    )


def _print_parts(round: Document) -> None:
    """Where a round's time goes: the driver's and, where workers train, theirs; the last row is the sum."""
    from fedlens.benchmark.profile_engine import PARTS

    seconds, processes = round["seconds"], round["workers"]["processes"]
    head, columns = ["part", "ms a round", "share"], [(round["parts"], seconds)]
    if processes:
        workers, available = dict(round["workers"]["parts"]), processes * seconds
        # Between its operations a worker waits, checks replies, aggregates them and sends.
        workers["engine"] = max(0.0, available - sum(workers.values()))
        head = ["part", "driver, ms", "share", f"{many(processes, 'worker')}, ms", "share"]
        columns.append((workers, available))
    rows = []
    for name in (*PARTS, "a round"):
        row = [name.rpartition(".")[2]]
        for parts, whole in columns:
            value = sum(parts.values()) if name == "a round" else parts.get(name, 0.0)
            row += [f"{value * 1e3:,.2f}", percent(value / whole)]
        rows.append(row)
    print_columns(rows, head, numeric=range(1, len(head)))


def _remarks(round: Document) -> list[str]:
    """What a reader needs to know to read the table of parts."""
    low, high = round["clock_overhead_quartiles"]
    lines = [
        f"{many(round['pairs'], 'pair')} of rounds: {round['seconds'] * 1e3:,.2f} ms with the clock, which the parts "
        f"add up to, {round['seconds_without_clock'] * 1e3:,.2f} without.",
        f"The clock adds {round['clock_overhead'] * 100:+.1f} % in the median pair; half of the pairs say "
        f"{low * 100:+.1f} to {high * 100:+.1f} %.",
    ]
    if round["evaluated_every"] > 1:
        timed = round["evaluation_seconds"]["timed"]
        lines.append(
            f"An evaluation takes {sum(timed) / len(timed) * 1e3:,.1f} ms; a round has its share of the one in "
            f"{round['evaluated_every']} rounds."
        )
    if round["workers"]["processes"]:
        lines.append(
            "The workers timed their own parts; the time between their operations counts as 'engine'."
        )
    return lines


def _model_rows(model: Document) -> list[tuple[str, str]]:
    """The cost of the model."""
    parameters = f"{model['trainable']:,} trainable"
    parameters += f", {model['frozen']:,} frozen" if model["frozen"] else ""
    parameters += f"; {model['buffers']:,} numbers in buffers" if model["buffers"] else ""
    forward = f"{_si(model['forward'])}FLOPs = {_si(model['macs'])}MACs (a multiply-accumulate is 2 FLOPs)"
    training = f"{_si(model['step_an_image'])}FLOPs; a step of {model['batch']} is {_si(model['step'])}FLOPs"
    return [
        ("parameters", parameters),
        ("size", size(model["nbytes"])),
        ("forward, an image", forward),
        ("training, an image", training),
        ("activations, an image", size(sum(layer["activation_bytes"] for layer in model["layers"]))),
    ]


def _experiment_rows(document: Document) -> list[tuple[str, str]]:
    """The cost of the experiment around the model."""
    from fedlens.benchmark.profile_client import LAUNCH_SECONDS

    sent, speed, memory, files = (document[key] for key in ("bytes", "speed", "memory", "files"))
    peak = speed["peak"]
    rows = [("model, checkpoint", f"{size(files['model'])}, {size(files['checkpoint'])} (files)")]
    for to, key, note in (
        ("sent to a client", "client", ""),
        ("sent in a round", "round", ""),
        ("sent in the run", "run", f" ({document['experiment']['rounds']} rounds)"),
    ):
        rows.append((to, f"{size(sent[f'down_a_{key}'])}, and {size(sent[f'up_a_{key}'])} back{note}"))
    if "not_measured" in memory:
        rows.append(("memory", f"not measured: {memory['not_measured']}"))
    else:
        on_gpu = "" if memory["gpu"] is None else f"{size(memory['gpu'])} on the GPU; "
        rows.append(
            (
                "memory of a client",
                f"{on_gpu}{size(memory['training'])} of tensors while it trains "
                f"({memory['examples']} examples, batches of {memory['batch']})",
            )
        )
    for key, count in document["launches"].items():
        label = {"alone": "launches of a step", "together": "of two clients at once"}[key]
        least = f"at least {count * LAUNCH_SECONDS * 1e3:.2g} ms on a GPU at {LAUNCH_SECONDS * 1e6:g} us each"
        rows.append((label, f"{count:g}: {least} (a model, not measured)"))
    return [
        *rows,
        (
            "training",
            f"{speed['images']:,.0f} images/s, {_si(speed['round'])}FLOP/s: "
            f"{percent(speed['share_of_peak'])} of the peak",
        ),
        ("the passes alone", f"{_si(speed['passes'])}FLOP/s, {percent(speed['passes'] / peak['flops'])}"),
        ("the peak", f"{_si(peak['flops'])}FLOP/s ({peak['source']})"),
    ]


def _print_layers(model: Document) -> None:
    """A row for every layer: of the forward pass, for one image."""
    rows = [
        (
            layer["name"],
            layer["kind"],
            " x ".join(map(str, layer["output"])),
            f"{layer['parameters']:,}",
            f"{layer['flops']:,}",
            size(layer["activation_bytes"]),
        )
        for layer in model["layers"]
    ]
    print_columns(rows, ("layer", "kind", "output", "parameters", "FLOPs", "activations"), numeric=(3, 4, 5))


def _si(value: float) -> str:
    """Four digits and a prefix: 1234567 is "1.235 M"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "
