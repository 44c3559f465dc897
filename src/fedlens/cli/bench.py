"""`fedlens bench`: how fast this machine trains, where a round's time goes, and how much memory it takes."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from fedlens.cli.bench_memory import memory
from fedlens.cli.bench_profile import profile
from fedlens.cli.bench_speed import speed


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
    help="Measure the speed of fedlens on this machine, compared with plain PyTorch and other libraries.",
    epilog="Without a command, [bold]speed[/bold]: fedlens bench linear --pairs 20",
    rich_markup_mode="rich",
)
bench.command("speed")(speed)
bench.command("profile")(profile)
bench.command("memory")(memory)
