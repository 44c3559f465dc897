"""`fedlens data check`: reads a folder of your own data and lists every problem in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.base.format import many
from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DatasetChanges, Debug, Json
from fedlens.data.diagnostics import shortened, summarized

if TYPE_CHECKING:
    from fedlens.data.formats.folder_check import Check

_OF_A_PARTY = ("images", "sizes", "training")
_MOST = 20  # classes or clients named in a summary; --json names all


def check(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="The folder of your data, or the CSV file of each party (data.parties.files)."
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="image-folder, csv, parquet, mask-folder, coco-json, voc-xml or yolo-txt; by default guessed.",
        ),
    ] = None,
    changes: DatasetChanges = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml", help="Write an experiment on the data, ready to run. The file must be new."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read all of your data, decode every image, and list problems (exit code 1) and warnings (exit code 0)."""
    with reported(debug, as_json):
        from fedlens.base.errors import ConfigError
        from fedlens.data.formats.folder_check import check_folder
        from fedlens.data.vertical.party_files import check_parties
        from fedlens.settings.config_source import Source, override
        from fedlens.settings.own_data_recipe import check_writable, write_recipe

        if write is not None:
            check_writable(write)
        # Messages name settings as an experiment's file does: data.dataset.label_column.
        settings = override(Source({}), [c.removeprefix("data.dataset.") for c in changes or ()]).values
        parties = len(data) > 1
        if parties and (format or write or changes):
            raise ConfigError(
                "--format, --set and --write are for one folder, and several files are the tables of parties",
                hint="name the tables alone; data.parties.files of an experiment takes them",
            )
        with _working(f"reading all of {', '.join(map(str, data))}"):
            if parties:
                checked = check_parties([str(table) for table in data])
            else:
                checked = check_folder(data[0], format, settings)
        written = write if checked.ready is not None else None
        if written is not None and checked.ready is not None:
            write_recipe(checked.ready, checked.facts, written)
        if as_json:
            print_json(as_plain(checked) | {"written": None if written is None else str(written)})
        else:
            _show(checked)
            _show_use(checked, write)
        if checked.findings:
            raise typer.Exit(1)


def as_plain(checked: Check) -> dict[str, Any]:
    """The object that `--json` prints: the facts, and the findings as `where`, `what`, `hint` and `example`.

    `warnings` are such objects without `example`; `dataset` is the table of an experiment that reads the same data.
    """
    findings = [
        {"where": finding.where, "what": finding.what, "hint": finding.hint, "example": finding.example}
        for finding in checked.findings
    ]
    warnings = [{"where": w.where, "what": w.what, "hint": w.hint} for w in checked.warnings]
    plain = {"ok": not findings, **checked.facts, "findings": findings, "warnings": warnings}
    return {**plain, "guessed": checked.guessed or None, "dataset": dict(checked.dataset)}


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
    if checked.guessed:
        say(f"format: {checked.facts['format']}, because {checked.guessed} (--format sets another)", "")
    problems, warnings = summarized(checked.findings), summarized(checked.warnings)
    if problems:
        say(*(line for line, _ in problems), "")
    facts = checked.facts
    print_columns([(name, value) for name, value in _lines(facts) if value])
    for note in facts.get("notes", ()):
        say(f"note: {note}")
    for line, _ in warnings:
        say(f"warning: {line}")
    hidden = any(count > 1 for _, count in (*problems, *warnings))
    say(_verdict(checked) + ("; --json lists each" if hidden else ""))


def _show_use(checked: Check, write: Path | None) -> None:
    """Says how to train on the data: the table of an experiment, and the command if one was written."""
    from fedlens.base.shell_command import shell_command
    from fedlens.settings.own_data_recipe import dataset_table

    key = "parties" if "parties" in checked.facts else "dataset"
    if checked.ready is None or (write is None and checked.hardly_any_left):
        if write is not None:
            say(f"{write} is not written, because no run could start: fix the problems first")
        return
    which = "it without these problems" if checked.findings else "it"
    say(f"to train on {which}, write in an experiment: [data] {key} = {dataset_table(checked.ready)}")
    if write is not None:
        say(f"or run the experiment that was written: {shell_command('run', write)}")


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    images, bad = facts["images"], facts["left_out"]
    yield "images", f"{images:,}" + (f", and {bad:,} with problems" if bad else "")
    if "boxes" in facts:
        yield "boxes", f"{facts['boxes']:,}"
    if "sizes" in facts:
        yield "sizes", _sizes(facts["sizes"], images)
        yield "colours", _counted(facts["sizes"]["colours"])
        training = facts["training"]
        why = (
            f"{training['why']}; size=N changes it"
            if training["why"] != "data.dataset.size"
            else "as set by size"
        )
        if training["enlarged"]:
            why += f"; {many(training['enlarged'], 'smaller image')} enlarged"
        if training["channels"] == 3 and not any("RGB" in c or "(P)" in c for c in facts["sizes"]["colours"]):
            why += "; channels=1 suits grey images"
        channels = many(training["channels"], "channel")
        yield "training", f"{training['width']}x{training['height']} pixels, {channels} ({why})"
    yield "classes", _counted(facts["classes"])
    if "pixels" in facts:
        total = sum(facts["pixels"].values())
        yield (
            "pixels",
            _counted({name: f"{100 * n / total:.3g} %" for name, n in facts["pixels"].items() if n}),
        )
    if "labels" in facts:
        each = f"{facts['labels'] / images:.2f} an image" if images else ""
        without = f"{many(facts['without_label'], 'image')} without any"
        yield "labels", ", ".join(filter(None, [f"{facts['labels']:,}", each, without]))
    if "parties" in facts:
        for name, each in facts["parties"].items():
            told = "; ".join(f"{key} {value}" for key, value in _lines(each) if key in _OF_A_PARTY)
            yield name, told.replace("; size=N changes it", "")  # there is no such setting
        counts = [f"{count:,} {split} images" for split, count in facts["shared"].items() if count]
        yield "at all parties", " and ".join(counts)
        return
    yield "splits", _counted(facts.get("splits", {})) or "none; a share is held out as test data"
    clients = facts.get("clients", {})
    yield "clients", f"{len(clients):,}: {_counted(clients)}" if clients else "none named"
    yield "columns", ", ".join(facts.get("columns", ()))


def _sizes(sizes: Mapping[str, Any], images: int) -> str:
    """The most frequent size with its share, and the range."""
    frequent, smallest, largest = (_pixels(sizes[name]) for name in ("most_frequent", "smallest", "largest"))
    if sizes["different"] == 1:
        return f"{frequent} (all)"
    share = f"{100 * sizes['most_frequent_images'] / images:.1f} %"
    return f"{smallest} to {largest}, {many(sizes['different'], 'size')}; most frequent {frequent} ({share})"


def _pixels(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"


def _counted(counts: Mapping[str, int | str] | Sequence[str]) -> str:
    """The first names, with their counts or shares where they have any."""
    names = list(counts)[:_MOST]
    listed = ", ".join(
        f"{shortened(name, 60)} {_number(counts[name])}"
        if isinstance(counts, Mapping)
        else shortened(name, 60)
        for name in names
    )
    return listed + (f" and {len(counts) - len(names):,} more" if len(counts) > len(names) else "")


def _number(count: int | str) -> str:
    return count if isinstance(count, str) else f"{count:,}"


def _verdict(checked: Check) -> str:
    warnings = many(len(checked.warnings), "warning")
    if not checked.findings:
        return f"no errors, {warnings}" if checked.warnings else "no problems found"
    count = len(checked.findings)
    problems = many(count, "problem") + (f" and {warnings}" if checked.warnings else "")
    if checked.hardly_any_left and all(finding.example for finding in checked.findings):
        return f"{problems}; hardly any image is without one, so correct what they have in common first"
    whole = sum(not finding.example for finding in checked.findings)
    if "parties" in checked.facts:
        return f"{problems}; a run stops at problems"
    if not whole:
        return f'{problems}; a run stops at problems, or leaves them out with data.dataset.on_error = "skip"'
    affects = "affects" if whole == 1 else "affect"
    return f"{problems}; {whole:,} {affects} the whole dataset and must be fixed first"
