"""`fedlens federation dossier`: what a data protection officer needs of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Changes, Debug, Federation
from fedlens.cli.serve import Agreement, Until


def dossier(
    folder: Federation,
    experiment: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The experiment: a TOML file (or the name of a recipe)."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="In its place: the directory of a run of 'fedlens serve'."),
    ] = None,
    purpose: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is for, as a sentence.")
    ] = None,
    changes: Changes = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="How many clients the sites have together; by default one each."),
    ] = None,
    until: Until = None,
    agreement: Agreement = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the two files.")] = Path("dossier"),
    debug: Debug = False,
) -> None:
    """Write what a data protection impact assessment needs: dossier.md and dossier.html.

    It says what leaves a site, to whom, what protects it, and which risks stay, from the settings alone. What they do
    not say, such as the legal basis, is marked to be filled in. No site is asked. Write it again when all sites are
    accepted.
    """
    with reported(debug):
        from fedlens.base.errors import ConfigError
        from fedlens.identity.federation_folder import FederationFolder
        from fedlens.server.dossier import write_dossier
        from fedlens.server.serve import read_terms
        from fedlens.settings.config_source import read_source

        if (experiment is None) == (run is None):
            raise ConfigError(
                "name one of the two", where="--experiment, --run", hint="add one, or leave out one"
            )
        if run is not None and (changes or clients or until or agreement):
            what = "a run has its settings, clients, last day and agreement"
            raise ConfigError(what, hint="leave out --set, --clients, --until and --agreement")
        source = read_source(experiment, changes or ()) if experiment is not None else run
        assert source is not None
        for path in write_dossier(
            out, FederationFolder(folder), source, purpose, clients, read_terms(until, agreement)
        ):
            say(f"wrote: {path}")
