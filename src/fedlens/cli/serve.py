"""`fedlens serve`: run an experiment at the sites of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.base.shell_command import shell_command
from fedlens.cli.display.output import reported
from fedlens.cli.options import Changes, DataDir, Debug, Download, Json, Quiet, Report, Strict
from fedlens.cli.passphrases import PassphraseFile, key_passphrase
from fedlens.cli.run_with_progress import train

if TYPE_CHECKING:
    from fedlens.api import Result
    from fedlens.cli.display.serve_display import ServeDisplay


Bind = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen; default 127.0.0.1 and the port of the federation, or the socket that systemd "
        "hands over.",
    ),
]
Enough = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Start once N sites have answered; by default once all accepted sites have, or after "
        "engine.patience if they are engine.min_sites.",
    ),
]
LogToStderr = Annotated[
    bool,
    typer.Option(
        "--log-to-stderr",
        help="Write the log to standard error, not to serve.log.jsonl in the run directory.",
    ),
]
Without = Annotated[
    str | None,
    typer.Option(
        metavar="SITES",
        help="Begin again without these sites (ward-a,ward-b), from the last checkpoint before their first answer.",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="DATE", help="The last day of the run, in UTC, as 2027-01-31; sites approve it."),
]
Agreement = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The data use agreement; the sites see and approve its SHA-256."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The run directory; default runs/<name>/<run-id>, or that of the unfinished run.",
    ),
]


def serve(
    experiment: Annotated[
        str, typer.Argument(metavar="FILE", help="The experiment: a TOML file (or the name of a recipe).")
    ],
    federation: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the federation, made by 'federation create'.")
    ],
    changes: Changes = None,
    bind: Bind = None,
    sites: Enough = None,
    until: Until = None,
    agreement: Agreement = None,
    out: Out = None,
    without: Without = None,
    passphrase_file: PassphraseFile = None,
    log_to_stderr: LogToStderr = False,
    data_dir: DataDir = None,
    download: Download = False,
    report: Report = True,
    quiet: Quiet = False,
    as_json: Json = False,
    strict: Strict = False,
    debug: Debug = False,
) -> None:
    """Run an experiment at the sites of a federation, or resume its unfinished run.

    The roster of the run is frozen when all accepted sites have approved the experiment. The same command resumes the
    run after an interruption.
    """

    def start(progress: ServeDisplay) -> Result:
        from fedlens.identity.federation_folder import FederationFolder
        from fedlens.server.serve import Served, serve

        number, _ = FederationFolder(federation).issuer()
        # Without an issuer there are no keys yet, which `serve` says.
        passphrase = key_passphrase(federation / "identity.pem", passphrase_file) if number else None
        served = Served(
            experiment,
            federation,
            changes or (),
            passphrase,
            bind,
            out,
            data_dir,
            download,
            sites,
            log_to_stderr,
            report,
            without.split(",") if without else (),
            until,
            agreement,
        )
        return serve(served, progress)

    with reported(debug, as_json) as output:
        from fedlens.cli.display.serve_display import ServeDisplay

        again = shell_command(
            "serve",
            experiment,
            changes=changes or (),
            federation=federation,
            bind=bind,
            sites=sites,
            until=until,
            agreement=agreement,
            out=out,
            without=without,
        )
        train(start, quiet=quiet, output=output, strict=strict, again=again, shown=ServeDisplay)
