"""`fedlens bench`: how fast this machine is, and where the time goes."""

from __future__ import annotations

import typer

from fedlens.cli.bench_profile import profile

bench = typer.Typer(
    name="bench",
    help="Measure this machine: where a round's time goes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
bench.command("profile")(profile)
