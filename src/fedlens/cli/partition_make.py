"""`fedlens partition make`: scatter a dataset, and save who has what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import DataDir, Debug
from fedlens.cli.output import print_columns, print_json, reported


def make(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A name (fedlens list datasets), or file.py:function.")
    ],
    partition: Annotated[
        str,
        typer.Argument(metavar="PARTITION", help="A name (fedlens list partitions), or file.py:function."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to save it: an npz file.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the partition, or dataset.KEY=VALUE; may be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the partition: a run's seeds.partition.", min=0)] = 0,
    data_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="The run's seeds.data, for datasets that draw something; else that of a run with seed 0.",
        ),
    ] = None,
    data_dir: DataDir = None,
    download: Annotated[bool, typer.Option("--download", help="Get data that are missing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Scatter the training examples of a dataset over clients, and save who has what."""
    with reported(debug):
        from fedlens.experiment.datadir import data_directory
        from fedlens.experiment.make_partition import check_free, make_partition
        from fedlens.report.partition_statistics import describe, readable

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
        options = made.run_options(out)
        if as_json:
            print_json(describe(made.partition) | {"file": str(out), "run": options})
            return
        print_columns(readable(made.partition))
        typer.echo(f"saved: {out}")
        if options is None:
            typer.echo(f"there is no training for {made.kind} yet; 'fedlens partition plot {out}' draws it")
        else:
            typer.echo(f"train on it, with a recipe of the same data: fedlens run RECIPE {options}")
