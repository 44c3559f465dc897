"""`fedlens replay`: repeat a run over sites in one place, and compare the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Debug, DeviceName, Json, Quiet, RunDataDir, RunDirectory


def replay(
    directory: RunDirectory,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="DIR",
            help="A folder with a copy of each site's folder, named as the site, with its site.toml.",
        ),
    ],
    data_dir: RunDataDir = None,
    device: DeviceName = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Repeat a run of 'fedlens serve' in one place, with its failures, and compare the bits.

    Exit code 1 if any bit differs. It computes on the kind of device that the server had; --device names another.
    """
    with reported(debug, as_json) as output:
        from fedlens.analyses.replay import data_of_sites
        from fedlens.analyses.replay import replay as repeat

        heard = (lambda sentence: None) if quiet or as_json else say
        found = repeat(directory, data_of_sites(directory, data), data_dir=data_dir, device=device, say=heard)
        if as_json:
            output.json({"same": found.difference is None, **vars(found)})
        else:
            say(str(found))
        if found.difference is not None:
            raise typer.Exit(1)
