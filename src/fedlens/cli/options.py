"""The options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="The engine that trains the clients.")
]
Download = Annotated[bool, typer.Option("--download", help="Download missing data.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path of the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else.")]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The data directory; default $FEDLENS_DATA, else ~/.cache/fedlens."),
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
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory: runs/<name>/<run-id>.")]
