"""`fedlens partition make`: partitions a dataset and saves the partition."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.base.shell_command import quoted_command, shell_command
from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DataDir, Debug, Download, Json


def make(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A name (fedlens list datasets), or file.py:function.")
    ],
    partition: Annotated[
        str,
        typer.Argument(metavar="PARTITION", help="A name (fedlens list partitions), or file.py:function."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file (.npz).")],
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
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Partition the training examples of a dataset over clients, and save the partition."""
    with reported(debug, as_json):
        from fedlens.report.partition_statistics import describe, readable
        from fedlens.settings.datadir import data_directory
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
