"""`fedlens site log` and `fedlens site show`: what a site was asked, and what left it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import complain, console, print_columns, reported, say
from fedlens.cli.options import Debug, Json
from fedlens.cli.site_review import SITE_FOLDER, SiteFolder, joined_folder

_UNSHOWN = ("listed", "attempt", "exchange", "slot", "server_lines")  # of an ask: its place among others
_WIDE = 150  # characters of a terminal that the table of a log fits


def log(
    verify: Annotated[
        bool, typer.Option("--verify", help="Only say whether the chain of lines holds; exit code 1 if not.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the log as FILE.csv and as the page FILE.html."),
    ] = None,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="Show the last N lines.")] = 20,
    folder: SiteFolder = SITE_FOLDER,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what the server asked, what this site decided, told and deleted, and what left it; asks nobody.

    "answered" was written to be sent: what a stop kept here stands in no line of the server's answers.jsonl.

    Each reading verifies the chain. A tail that was cut off shows only to the server, at the next message.
    """
    with reported(debug, as_json) as output:
        from fedlens.base.errors import DataError
        from fedlens.identity.site_keys import SiteKeys
        from fedlens.site.log_export import HEAD, AskedLog, export_log

        if not (folder / "log").is_dir():
            joined_folder(folder)
        try:
            read = AskedLog.read(folder)
        except DataError as damaged:
            if not verify:
                raise
            say(str(damaged))
            raise typer.Exit(1) from None
        for sentence in read.server_went_back():
            complain("warning", sentence)
        chain = f"the chain of {read.lines:,} lines holds; its head is {read.head}"
        if export is not None:
            names = read.site, "whose keys are deleted here"
            if (folder / "keys").is_dir():
                keys = SiteKeys(folder / "keys")
                names = keys.name, keys.federation
            written = export_log(read, export, *names)
            say(*(f"written: {path}" for path in written))
        elif as_json:
            output.json(
                {"lines": read.lines, "head": read.head, "asks": read.asks[-last:], "told": read.told[-last:]}
            )
        elif verify:
            say(
                chain,
                "compare with heads.json of the operator: its head must stand in the column 'head' of --export, a few "
                "lines behind at most, or a tail was cut off",
            )
        else:
            if (screen := console()).is_terminal and screen.width < _WIDE:
                say(*_short(read.rows(last)))
            else:
                print_columns(read.rows(last), HEAD, numeric=(2, 7))
            shown = f"shown are the last {last} of its {len(read.told)} events; --last shows more"
            say(chain, *([shown] if len(read.told) > last else ()))


def _short(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a log as one line each, below a line for each run and who approved it."""
    above = "", ""
    for when, run, round, operation, client, *rest, approved in rows:
        if run and (run != above[0] or approved not in ("", above[1])):
            yield f"run {run}" + (f", approved by {approved}" if approved else "")
            above = run, approved
        asked = " ".join(each for each in (round, operation, client) if each)
        yield f"  {when.removesuffix(' UTC')}  {', '.join(each for each in (asked, *rest) if each)}"


def show(
    id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The first digits of ask, answer, payload or head, which are digests."
        ),
    ],
    folder: SiteFolder = SITE_FOLDER,
    debug: Debug = False,
) -> None:
    """Show one answer: its line, and norm and histogram of each value of its body if keep.sent is set."""
    with reported(debug):
        from fedlens.identity.authority import day
        from fedlens.site.log_export import AskedLog, body_rows

        line = AskedLog.read(folder).found(id)
        print_columns([(name, day(value) if name == "time" else str(value))
                       for name, value in line.items() if name not in _UNSHOWN and value])  # fmt: skip
        say("", *line["listed"])
        if rows := body_rows(folder, line):
            say("")
            print_columns(rows, ("value", "shape", "norm", "least", "mean", "most", "histogram"))
        elif line["bytes"]:
            complain("note", "no values are shown: bodies are kept with [keep] sent = true in site.toml, until they "
                     "are purged, and never those of secure sums")  # fmt: skip
