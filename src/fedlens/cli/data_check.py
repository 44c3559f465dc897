"""`fedlens data check`: reads a folder of your own data and lists every problem in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.options import Debug, Json
from fedlens.cli.output import print_columns, print_json, reported

if TYPE_CHECKING:
    from fedlens.data.formats.folder_check import Check

_MOST = 20  # classes, or clients, that a summary names; with --json it names all


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of your data.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="image-folder, csv, mask-folder, coco-json, voc-xml or yolo-txt.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the dataset, as client_level=1; may be repeated."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read all of your data, decode every image, and list what is broken; exit code 1 where anything is."""
    with reported(debug):
        from fedlens.data.formats.folder_check import check_folder
        from fedlens.experiment.config_source import Source, override

        settings = override(Source({}), changes or ()).values
        with _working(f"reading all of {folder}"):
            found = check_folder(folder, format, settings)
        if as_json:
            print_json(as_plain(found))
        else:
            _show(found)
        if found.findings:
            raise typer.Exit(1)


def as_plain(found: Check) -> dict[str, Any]:
    """The object that `--json` prints: the facts, and the findings as `where`, `what`, `hint` and `example`."""
    findings = [
        {"where": one.where, "what": one.what, "hint": one.hint, "example": one.example}
        for one in found.findings
    ]
    return {"ok": not findings, **found.facts, "findings": findings}


@contextmanager
def _working(sentence: str) -> Iterator[None]:
    """Shows a spinner on standard error during long work, if it is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield
        return
    from rich.markup import escape

    with console.status(escape(sentence)):
        yield


def _show(found: Check) -> None:
    for finding in found.findings:
        print(finding)
    if found.findings:
        print()
    facts = found.facts
    print_columns([(name, value) for name, value in _lines(facts) if value])
    for note in facts.get("notes", ()):
        print(f"note: {note}")
    print(_verdict(found))


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    images, bad = facts["images"], facts["left_out"]
    yield "images", f"{images:,}" + (f", and {bad:,} at fault" if bad else "")
    if "boxes" in facts:
        yield "boxes", f"{facts['boxes']:,}"
    yield "classes", _counted(facts["classes"])
    yield "splits", _counted(facts.get("splits", {})) or "none; a share is held out as test data"
    clients = facts.get("clients", {})
    yield "clients", f"{len(clients):,}: {_counted(clients)}" if clients else "none named"
    yield "columns", ", ".join(facts.get("columns", ()))


def _counted(counts: Mapping[str, int] | Sequence[str]) -> str:
    """The first names, with their numbers where they have any."""
    names = list(counts)[:_MOST]
    told = ", ".join(f"{name} {counts[name]:,}" if isinstance(counts, Mapping) else name for name in names)
    return told + (f" and {len(counts) - len(names):,} more" if len(counts) > len(names) else "")


def _verdict(found: Check) -> str:
    if not found.findings:
        return "nothing is wrong"
    count = len(found.findings)
    told = f"{count:,} things are wrong" if count > 1 else "1 thing is wrong"
    whole = sum(not finding.example for finding in found.findings)
    if not whole:
        return f'{told}; a run stops at that, unless data.dataset.on_error = "skip" leaves it out'
    every = "of the set as a whole" if whole == count else f"of which {whole:,} of the set as a whole"
    return f"{told}, {every}, which has to be mended before a run"
