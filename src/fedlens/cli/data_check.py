"""`fedlens data check`: reads a folder of your own data and lists every problem in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.options import Debug, Json
from fedlens.cli.output import print_columns, print_json, reported
from fedlens.report.format import many

if TYPE_CHECKING:
    from fedlens.data.formats.folder_check import Check

_MOST = 20  # classes or clients named in a summary; --json names all


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
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the dataset, such as client_level=1; may be repeated.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read all of your data, decode every image, and list every problem; exit code 1 if there is one."""
    with reported(debug, as_json):
        from fedlens.data.formats.folder_check import check_folder
        from fedlens.experiment.config_source import Source, override

        settings = override(Source({}), changes or ()).values
        with _working(f"reading all of {folder}"):
            checked = check_folder(folder, format, settings)
        if as_json:
            print_json(as_plain(checked))
        else:
            _show(checked)
        if checked.findings:
            raise typer.Exit(1)


def as_plain(checked: Check) -> dict[str, Any]:
    """The object that `--json` prints: the facts, and the findings as `where`, `what`, `hint` and `example`."""
    findings = [
        {"where": finding.where, "what": finding.what, "hint": finding.hint, "example": finding.example}
        for finding in checked.findings
    ]
    return {"ok": not findings, **checked.facts, "findings": findings}


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


def _show(checked: Check) -> None:
    for finding in checked.findings:
        print(finding)
    if checked.findings:
        print()
    facts = checked.facts
    print_columns([(name, value) for name, value in _lines(facts) if value])
    for note in facts.get("notes", ()):
        print(f"note: {note}")
    print(_verdict(checked))


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    images, bad = facts["images"], facts["left_out"]
    yield "images", f"{images:,}" + (f", and {bad:,} with problems" if bad else "")
    if "boxes" in facts:
        yield "boxes", f"{facts['boxes']:,}"
    yield "classes", _counted(facts["classes"])
    yield "splits", _counted(facts.get("splits", {})) or "none; a share is held out as test data"
    clients = facts.get("clients", {})
    yield "clients", f"{len(clients):,}: {_counted(clients)}" if clients else "none named"
    yield "columns", ", ".join(facts.get("columns", ()))


def _counted(counts: Mapping[str, int] | Sequence[str]) -> str:
    """The first names, with their counts where they have any."""
    names = list(counts)[:_MOST]
    listed = ", ".join(f"{name} {counts[name]:,}" if isinstance(counts, Mapping) else name for name in names)
    return listed + (f" and {len(counts) - len(names):,} more" if len(counts) > len(names) else "")


def _verdict(checked: Check) -> str:
    if not checked.findings:
        return "no problems found"
    count = len(checked.findings)
    problems = many(count, "problem")
    whole = sum(not finding.example for finding in checked.findings)
    if not whole:
        return f'{problems}; a run stops at them, unless data.dataset.on_error = "skip" leaves them out'
    which = "of the dataset as a whole" if whole == count else f"of which {whole:,} of the dataset as a whole"
    return f"{problems}, {which}: fix those before a run"
