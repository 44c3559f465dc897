"""`fedlens cost`: what federation costs, overall and for each client."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.base.format import metric_value, split_of
from fedlens.base.printable import printable
from fedlens.cli.display.output import Interrupted, console, print_columns, reported, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName, Jobs, Json, Quiet, Report

if TYPE_CHECKING:
    from fedlens.results.rows import Role, Row
    from fedlens.studies.cost_study import CostResult

CLIENTS_SHOWN = 10


def cost(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of seeds; each has four runs. Intervals need 3.")
    ] = 3,
    engine: EngineName = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory of all runs; default runs/<name>-cost.")
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    report: Report = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what federation costs, overall and for each client.

    Runs the experiment, its twin with IID clients, centralized training, and each client alone, over some seeds, and
    writes one page with the answer. The same command continues an interrupted series and adds seeds.
    """
    with reported(debug, as_json) as output:
        from fedlens.cli.display.runs_display import RunsDisplay
        from fedlens.studies.cost_study import cost as run_all

        overrides = [*(changes or ()), *([f"engine.name={engine}"] if engine else [])]
        display = RunsDisplay(console(stderr=as_json), quiet, _outcome)
        try:
            with stdout_kept_clean(as_json):
                result = run_all(
                    recipe,
                    overrides,
                    seeds=seeds,
                    out=out,
                    data_dir=data_dir,
                    download=download,
                    jobs=jobs,
                    progress=display,
                    report=report,
                )
        except KeyboardInterrupt:
            raise Interrupted("the same command continues with the runs that are left") from None
        finally:
            display.close()
        if as_json:
            output.json(result.answer)
        else:
            show(result, quiet)
        if any(run["status"] != "finished" for run in result.answer["runs"]):
            raise typer.Exit(1)


def _outcome(line: Row, role: Role) -> str:
    """The one measure that every run has when it ends, whatever its models and its data, or why it failed."""
    from fedlens.cli.display.runs_display import outcome
    from fedlens.pages.cost.measures import measure

    _, metric = split_of(line.main) or ("", "")
    value = line.final(f"clients_{metric}_mean")
    if line.status != "finished" or value is None:
        return outcome(line, role)
    return f"{measure(metric, 'clients')} {metric_value(metric, value)}"


def show(result: CostResult, quiet: bool) -> None:
    """Prints the answer; with --quiet only the path of the page."""
    from fedlens.pages.cost.labels import suspicious_lines
    from fedlens.pages.cost.measures import byte_rows, bytes_notes, measure_notes, side_by_side
    from fedlens.pages.cost.page import client_notes, client_table
    from fedlens.pages.data_notes import SHOWN

    answer = result.answer
    page = result.page if result.page.exists() else result.directory / "cost.json"
    if quiet:
        print(printable(str(page)))
        return
    if "parties" in answer:
        from fedlens.pages.cost.parties import HEAD, party_rows

        print("\n".join(map(printable, answer["sentences"])))
        print_columns(party_rows(answer), HEAD, range(1, 5))
        print(printable(f"\nresult page: {page}"))
        return
    print()
    for k, sentence in enumerate(answer["sentences"]):
        print(printable(sentence))
        if k == 0:
            for warning in answer["warnings"]:
                print(printable(f"Caution: {warning}"))
    head, measured = side_by_side(answer)
    if measured:
        print()
        print_columns([*measured, *byte_rows(answer)], head, range(1, len(head)))
        for note in filter(None, (*measure_notes(answer), " ".join(bytes_notes(answer)))):
            print(printable(note))
    head, rows = client_table(answer)
    if rows:
        print()
        print_columns(rows[:CLIENTS_SHOWN], head, range(1, len(head) - 1))
        if len(rows) > CLIENTS_SHOWN:
            print(f"and {len(rows) - CLIENTS_SHOWN} more clients, on the page")
        for note in client_notes(answer):
            print(printable(note))
    if lines := suspicious_lines(answer, result.directory):
        print()
        for line in lines:
            print(printable(line))
    if notes := answer["data_notes"]:
        print("\nNotes on the data and the runs:")
        for note in notes[:SHOWN]:
            print(printable(f"  {note}"))
        if len(notes) > SHOWN:
            print(f"  and {len(notes) - SHOWN} more, on the page")
    failed = [run for run in answer["runs"] if run["status"] != "finished"]
    if failed:
        print(
            f"\n{len(failed)} of {len(answer['runs'])} runs did not finish; the same command tries them again:"
        )
        for run in failed:
            print(printable(f"  {run['name']}: {run['error'] or run['status']}"))
    if answer["next_steps"]:
        print("\nWhat to try next:")
        for step in answer["next_steps"]:
            print(printable(f"  {step['why']}\n    $ {step['command']}"))
    print()
    print(printable(f"result page: {shlex.quote(str(page)) if ' ' in str(page) else page}"))
