"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting, for example local.lr=0.1; may be repeated."
    ),
]
DatasetChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the dataset, such as client_level=1; may be repeated.",
    ),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="The execution backend (fedlens list engines).")
]
Download = Annotated[bool, typer.Option("--download", help="Download the dataset if it is missing.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path of the result.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print only JSON on standard output; an error is JSON too.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The data directory; default $FEDLENS_DATA, else ~/.cache/fedlens."),
]
RunDataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The data directory; default: that of the run.")
]
Report = Annotated[
    bool, typer.Option("--report/--no-report", help="Write the result page when the run ends.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with code 1 if the run ends with a warning, such as a loss that diverges."
    ),
]
Federation = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The folder of the federation.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory: runs/<name>/<run-id>.")]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="auto (a GPU if there is one), cpu, cuda or cuda:1.",
    ),
]
ModelRound = Annotated[
    str | None,
    typer.Option(
        "--round",
        metavar="best|last|N",
        help="The model of the best round, of the last one, or of round N if the run keeps it; by default best.",
    ),
]
ModelClient = Annotated[
    str | None,
    typer.Option(
        "--client",
        metavar="ID",
        help="Where parts of the model stay at the clients: whose, from the last checkpoint.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=0, help="Runs at once; by default as many as cores and memory allow. 0: in this process."
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="Continue a study whose settings have changed since it started."),
]
AcceptEdits = Annotated[
    bool,
    typer.Option("--accept-changes", help="Continue although files of the run were edited since it trained."),
]
