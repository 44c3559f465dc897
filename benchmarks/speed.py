"""Measures fedlens, bare PyTorch and other libraries in turn, and holds them against the speed goals.

The options are those of `fedlens bench`, and those that name libraries:

    python -m benchmarks.speed --peers
    python -m benchmarks.speed linear --pairs 20 --peer flower
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.goals import goals_of
from benchmarks.peer import candidates, chosen, usual_directory
from fedlens.base.errors import ConfigError
from fedlens.cli.bench_speed import (
    Engines,
    JsonFile,
    Out,
    Pairs,
    Picture,
    Seconds,
    Workloads,
    compared,
    ended,
    plan,
)
from fedlens.cli.display.output import print_columns, reported
from fedlens.cli.options import Debug, DeviceName
from fedlens.cli.signals import stopped_by_signals

Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Measure other libraries too, each in an environment of its own (several gigabytes).",
    ),
]
PeerNames = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="NAME", help="Measure only this library; may be repeated."),
]
PeersDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the environments of other libraries; default $XDG_CACHE_HOME/fedlens/peers, else "
        "~/.cache/fedlens/peers.",
    ),
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    workloads: Workloads = None,
    engines: Engines = "default,inline,vectorized,processes",
    device: DeviceName = "auto",
    pairs: Pairs = 12,
    seconds: Seconds = None,
    peers: Peers = False,
    peer_names: PeerNames = None,
    peers_dir: PeersDir = None,
    out: Out = Path(),
    json_file: JsonFile = None,
    picture: Picture = None,
    debug: Debug = False,
) -> None:
    """Train the same rounds with bare PyTorch, fedlens and other libraries in turn, and compare them with the goals."""
    with reported(debug):
        asked, others = plan(engines, pairs, seconds), chosen(peer_names) if peers or peer_names else []
        if others:
            if device not in (None, "auto", "cpu"):
                hint = "take --device cpu, or leave out --peers"
                raise ConfigError(
                    "other libraries are measured on the processor", where="--device", hint=hint
                )
            device = "cpu"
            asked = replace(asked, others=candidates(others, peers_dir or usual_directory()))
        elif peers_dir is not None:
            hint = "add --peers or --peer NAME"
            raise ConfigError("no other library is measured", where="--peers-dir", hint=hint)
        command = ("python", "-m", "benchmarks.speed")
        rows = compared(workloads, asked, device, out, json_file, picture, command)
        goals = [
            (
                each.workload,
                f"{each.engine} to {each.reference}",
                f"{each.least:g}",
                str(each.measured),
                each.met,
            )
            for each in goals_of(rows)
        ]
        if goals:
            print()
            print_columns(goals, ("workload", "goal", "at least", "measured", "met"), numeric=(2,))
        ended(rows)


if __name__ == "__main__":
    with stopped_by_signals():
        app(prog_name="python -m benchmarks.speed")
