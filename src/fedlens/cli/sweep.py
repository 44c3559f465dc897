"""`fedlens sweep`: carry out a study."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.base.shell_command import shell_command
from fedlens.cli.display.output import CommandOutput, Interrupted, console, reported, say, stdout_kept_clean
from fedlens.cli.options import AcceptChanges, Changes, DataDir, Debug, Download, Jobs, Json, Quiet, Report

if TYPE_CHECKING:
    from fedlens.studies.estimate import StudyEstimate
    from fedlens.studies.study import Study, StudyResult

_SEEDS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
FAILED_SHOWN = 10
Engine = Annotated[
    str | None, typer.Option(metavar="NAME", help="ray: carry out the runs on a Ray cluster, see --address.")
]
_ADDRESS = "The Ray cluster, host:port or auto; by default Ray starts on this machine."
Address = Annotated[str | None, typer.Option(metavar="ADDRESS", help=_ADDRESS)]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="STUDY_FILE", help="The TOML file of a study.")],
    scale: Annotated[
        str | None, typer.Option(help="One of the scales in the file, such as smoke, laptop or paper.")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder of the study; default studies/<name>, with a subfolder for the scale.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print runs, images, hours and disk space, and run nothing.")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="Seeds that replace those of the file: 0,1,2 or 0-4.")
    ] = None,
    changes: Changes = None,
    accept_changes: AcceptChanges = False,
    report: Report = True,
    run_reports: Annotated[
        bool, typer.Option("--reports", help="Also write the report.html of each run.")
    ] = False,
    render: Annotated[
        bool,
        typer.Option(
            "--render", help="Write tables, figures and the page from the results, and run nothing."
        ),
    ] = False,
    engine: Engine = None,
    address: Address = None,
    data_dir: DataDir = None,
    download: Download = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Carry out a study: its runs, tables, figures and page.

    The same command continues an interrupted study and repeats failed runs.
    """
    with reported(debug, as_json) as output:
        from fedlens.studies.study import Study

        study = Study.load(file, scale, overrides=changes or (), seeds=parsed_seeds(seeds))
        folder = out or study.folder
        if render:
            result = study_result(folder)
            result.write()
            show(result, output, quiet)
            return
        cluster = cluster_address(engine, address)
        run_study(
            study,
            output,
            quiet=quiet,
            dry_run=dry_run,
            out=folder,
            jobs=jobs,
            data_dir=data_dir,
            download=download,
            report=report,
            accept_changes=accept_changes,
            run_reports=run_reports,
            address=cluster,
        )


def study_result(folder: Path) -> StudyResult:
    """The results in the folder of a study."""
    from fedlens.studies.study import StudyResult

    return StudyResult(folder)


def run_study(study: Study, output: CommandOutput, *, quiet: bool, dry_run: bool, **how: Any) -> None:
    """Prints the cost of the study, carries it out with progress, and prints its results.

    Raises `Interrupted` with the command that continues it, and `typer.Exit` with code 1 if runs failed.
    """
    from fedlens.cli.display.runs_display import RunsDisplay
    from fedlens.studies.changed_study import refuse_changed

    change = refuse_changed(Path(how["out"]).expanduser(), study.plan(), dry_run or how["accept_changes"])
    if dry_run or not quiet or how["jobs"] is None:
        estimated = _estimated(study, output, how)
        if dry_run and output.as_json:
            output.json(vars(estimated))
        elif (dry_run or not quiet) and not output.as_json:
            say(*estimated.sentences)
        if dry_run:
            if change and not output.as_json:
                say("The study has changed since the runs were made; --accept-changes continues the study.")
                say(*change.sentences())
            return
        how["jobs"] = estimated.jobs if how["jobs"] is None else how["jobs"]
    display = RunsDisplay(console(stderr=output.as_json), quiet)
    try:
        with stdout_kept_clean(output.as_json):
            result = study.run(progress=display, **how)
    except KeyboardInterrupt:
        again = shell_command(*sys.argv[1:])
        raise Interrupted(f"all running runs are saved; continue with: {again}") from None
    finally:
        display.close()
    show(result, output, quiet, how["report"])


def _estimated(study: Study, output: CommandOutput, how: Mapping[str, Any]) -> StudyEstimate:
    try:
        with stdout_kept_clean(output.as_json):
            return study.estimate(
                how["out"], jobs=how["jobs"], data_dir=how["data_dir"], download=how["download"]
            )
    except KeyboardInterrupt:
        raise Interrupted("nothing was started") from None


def show(result: StudyResult, output: CommandOutput, quiet: bool, page: bool = True) -> None:
    """Prints the outcome of a study. Raises `typer.Exit` with code 1 if runs failed.

    Args:
        page: whether the page was written; else the folder is named.
    """
    failed, place = result.failed, result.page if page else result.directory
    if output.as_json:
        runs = {"runs": list(result.runs), "cells": list(result.cells)}
        output.json({"directory": str(result.directory), **runs, "verdicts": [*map(asdict, result.verdicts)]})
    elif quiet:
        say(place)
    else:
        for line in failed[:FAILED_SHOWN]:
            say(f"{line.run} failed: {line.reason}")
        if len(failed) > FAILED_SHOWN:
            say(f"and {len(failed) - FAILED_SHOWN} more, in {result.directory / 'results.jsonl'}")
        if failed:
            info = result.results.info
            planned = {entry.digest for entry in (*info.pretrained, *info.entries)}
            ended = planned & result.results.lines.keys()
            say(f"{len(failed)} of {len(ended)} runs failed; the same command repeats them")
        for each in result.verdicts:
            say(f"{each.words}: {each.text}{f' ({each.numbers})' if each.numbers else ''}")
        say(*result.results.info.caveats, f"results: {place}")
    if failed:
        raise typer.Exit(1)


def parsed_seeds(text: str | None) -> list[int] | None:
    """The seeds of a list such as 0,1,5-7. Raises `ConfigError` if it is something else.

    >>> parsed_seeds("0,1,5-7"), parsed_seeds(None)
    ([0, 1, 5, 6, 7], None)
    """
    from fedlens.base.errors import ConfigError

    if text is None:
        return None
    if not _SEEDS.fullmatch(text):
        raise ConfigError(
            f"invalid value for --seeds: {text!r}", hint="write numbers and ranges, such as 0,1,2 or 0-4"
        )
    ranges = [part.partition("-")[::2] for part in text.split(",")]
    return [seed for first, last in ranges for seed in range(int(first), int(last or first) + 1)]


def cluster_address(engine: str | None, address: str | None) -> str | None:
    """Returns the address of the Ray cluster, "local" for Ray on this machine; None without Ray.

    >>> cluster_address("ray", None), cluster_address(None, None)
    ('local', None)
    """
    from fedlens.base.errors import ConfigError

    if engine not in (None, "ray"):
        raise ConfigError(
            f"invalid value for --engine: {engine!r} (must be 'ray')",
            hint='set the engine of the runs in the study: set = { "engine.name" = ... }',
        )
    if address is not None and engine is None:
        raise ConfigError("--address needs --engine ray", hint="add --engine ray, or remove --address")
    return None if engine is None else address or "local"
