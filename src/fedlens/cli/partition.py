"""`fedlens partition`: make, show and plot partitions."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlens.base.shell_command import quoted_command, setting, shell_command
from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DataDir, DatasetChanges, Debug, Download, Json

PartitionFile = Annotated[Path, typer.Argument(metavar="FILE", help="A saved partition or a run directory.")]
DatasetName = Annotated[
    str, typer.Argument(metavar="DATASET", help="A name (fedlens list datasets), or file.py:function.")
]
Out = Annotated[Path, typer.Option(metavar="FILE", help="Output file (.npz).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


def show(
    file: PartitionFile,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print clients, examples, sizes, classes per client, EMD, imbalance and digest of a partition."""
    with reported(debug, as_json):
        from fedlens.results.partition_statistics import describe, readable
        from fedlens.results.run import read_partition

        partition = read_partition(file)
        if as_json:
            print_json(describe(partition))
            return
        print_columns(readable(partition))


def make(
    dataset: DatasetName,
    partition: Annotated[
        str,
        typer.Argument(metavar="PARTITION", help="A name (fedlens list partitions), or file.py:function."),
    ],
    out: Out,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the partition, or dataset.KEY=VALUE; may be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition (seeds.partition in a run).", min=0)] = 0,
    data_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="seeds.data of the run, for datasets with random data; default as in a run with seed 0.",
        ),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Partition the training examples of a dataset over clients, and save the partition."""
    with reported(debug, as_json):
        from fedlens.data.catalogue import data_directory
        from fedlens.results.partition_statistics import describe, readable
        from fedlens.settings.make_partition import check_free, make_partition

        check_free(out, force)
        made = make_partition(
            dataset,
            partition,
            changes or (),
            seed=seed,
            data_seed=data_seed,
            root=data_directory(data_dir),
            download=download,
        )
        made.partition.save(out)
        changes = made.run_settings(out)
        if as_json:
            options = (
                None
                if changes is None
                else shlex.join(word for change in changes for word in ("--set", change))
            )
            print_json(describe(made.partition) | {"file": str(out), "run": options})
            return
        print_columns(readable(made.partition))
        say(f"saved: {out}")
        if changes is None:
            plot = quoted_command("partition", "plot", out)
            say(f"fedlens cannot train on {made.kind} yet; {plot} draws the partition")
        else:
            command = shell_command("run", "RECIPE", changes=changes)
            say(f"to train on it, use a recipe with the same dataset: {command}")


def import_partition(
    dataset: DatasetName,
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help="The examples of each client, counted from 0.")
    ],
    out: Out,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="dataset.KEY=VALUE; may be repeated."),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a partition that another program wrote, {"CLIENT": [EXAMPLE, ...], ...}, and save it."""
    changes = [*(changes or ()), setting("path", str(file))]
    make(dataset, "file", out, changes, 0, None, data_dir, download, force, as_json, debug)


class PictureFormat(StrEnum):
    """A file format of pictures."""

    PNG = "png"
    PDF = "pdf"
    SVG = "svg"


def plot(
    file: PartitionFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory.")],
    formats: Annotated[
        list[PictureFormat], typer.Option("--format", help="File format; may be repeated.")
    ] = [PictureFormat.PNG, PictureFormat.PDF],  # noqa: B006
    places: Annotated[
        bool,
        typer.Option("--map", help="Add a map of the examples by class, if the dataset has coordinates."),
    ] = False,
    changes: DatasetChanges = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Draw a partition: figures for papers with captions, and a page that opens offline.

    --map reads the dataset: that of the run, or the one that the saved partition names, with its settings in --set.
    """
    with reported(debug):
        from fedlens.base.errors import DataError
        from fedlens.data.partition.partition import Partition
        from fedlens.data.vertical.feature_partition import FeaturePartition
        from fedlens.pages.partition_page import write_captions, write_page
        from fedlens.results.figures.pictures import draw
        from fedlens.results.run import read_partition

        partition = read_partition(file)
        if not isinstance(partition, Partition):
            vertical = isinstance(partition, FeaturePartition)
            others = "parties of vertical learning" if vertical else "sites of a federation"
            raise DataError(
                f"the file has the {others}, and no clients to plot",
                where=str(file),
                hint="'fedlens partition show' prints them, and the page of a run shows their windows",
            )
        shown = None
        if places:
            from fedlens.results.figures.partition_figures import read_places_map

            shown = read_places_map(partition, file, changes or (), data_dir)
        written = draw(partition, out, [str(ending) for ending in dict.fromkeys(formats)], shown)
        written.append(write_captions(partition, out / "captions.txt", shown))
        for path in [*written, write_page(partition, out / "partition.html", shown)]:
            say(path)


partition = typer.Typer(
    name="partition",
    help="Make or import a partition of a dataset, show its statistics, plot it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
partition.command("make")(make)
partition.command("import")(import_partition)
partition.command("show")(show)
partition.command("plot")(plot)
