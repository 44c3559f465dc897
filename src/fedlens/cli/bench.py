"""`fedlens bench`: how fast this machine trains, where a round's time goes, and how much memory it takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedlens.base.format import count, size
from fedlens.cli.bench_profile import profile
from fedlens.cli.bench_speed import speed
from fedlens.cli.display.output import print_columns, reported, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName, Json


def memory(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="The batch sizes to measure; default that of the recipe."),
    ] = None,
    changes: Changes = None,
    engine: EngineName = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="C,H,W", help="Image shape, to measure without the recipe's data; needs --classes."
        ),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Number of classes, to measure without data; needs --shape.")
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the memory of local training by batch size, and show the estimate beside it.

    Each batch size is measured in a fresh process: three steps on random examples with the shape and the classes of
    the recipe's data. A batch size that does not fit is a row with the reason.
    """
    with reported(debug, as_json) as output:
        from fedlens.base.errors import ConfigError
        from fedlens.cli.bench_profile import sides

        if (shape is None) != (classes is None):
            missing, given = ("--classes", "--shape") if classes is None else ("--shape", "--classes")
            raise ConfigError(
                f"{given} is set without {missing}", where=missing, hint=f"set both, or leave {given} out"
            )
        with stdout_kept_clean(as_json):
            from fedlens.benchmark.batch_memory import batch_memory, parsed_batches
            from fedlens.cli.run import overrides
            from fedlens.run.environment import command_words

            document = batch_memory(
                recipe,
                None if batch is None else parsed_batches(batch),
                overrides(changes or (), None, None, engine),
                shape=None if shape is None else sides(shape),
                classes=classes,
                data_dir=data_dir,
                download=download,
                say=lambda sentence: print(sentence, file=sys.stderr),
                command=command_words(sys.argv),
            )
        if as_json:
            output.json(document)
        else:
            _print(document)
        if all(row["measured"] is None for row in document["rows"]):
            raise typer.Exit(1)


def _print(document: Mapping[str, Any]) -> None:
    """Prints what was measured, and a row for each batch size."""
    about, rows = document["experiment"], document["rows"]
    form = "x".join(map(str, about["input_shape"]))
    print(
        f"{about['name']}: {about['model']}, {count(about['parameters'])} parameters of which "
        f"{count(about['trainable'])} are trained, {form}, {about['classes']} classes; {about['optimizer']}, "
        f"{about['device']}, {about['precision']}",
        end="\n\n",
    )
    on_gpu = any(row["reserved"] is not None for row in rows)
    head = ["batch", "measured", *(["reserved"] if on_gpu else []), "estimated", "ratio", ""]
    cells = []
    for row in rows:
        measured, estimated = row["measured"], row["estimated"]
        ratio = f"{estimated / measured:.2f}" if measured and estimated else ""
        reserved = [size(row["reserved"]) if row["reserved"] else ""] if on_gpu else []
        shown = [size(value) if value else "" for value in (measured, estimated)]
        cells.append([f"{row['batch']:,}", shown[0], *reserved, shown[1], ratio, row["reason"] or ""])
    print_columns(cells, head, numeric=range(len(head) - 1))


class _SpeedFirst(TyperGroup):
    """`fedlens bench [WORKLOAD ...]` is `fedlens bench speed [WORKLOAD ...]`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts `speed` before arguments that do not begin with the name of a command."""
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["speed", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_SpeedFirst,
    help="Measure the speed of fedlens on this machine, compared with plain PyTorch.",
    epilog="Without a command, [bold]speed[/bold]: fedlens bench linear --pairs 20",
    rich_markup_mode="rich",
)
bench.command("speed")(speed)
bench.command("profile")(profile)
bench.command("memory")(memory)
