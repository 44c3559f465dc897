"""`fedlens bench speed`: fedlens's engines beside bare PyTorch and, if asked, beside other libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import reported


def speed(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD ...]", help="cifar-cnn, mnist-cnn, linear; else all."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train the same rounds with bare PyTorch and with fedlens in turn, and say how they compare."""
    with reported(debug):
        from fedlens.benchmark.limit import WORKLOADS

        for name in workloads or WORKLOADS:
            print(WORKLOADS[name])
