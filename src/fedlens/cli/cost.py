"""`fedlens cost`: what federation costs, overall and for each client."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.base.printable import printable
from fedlens.cli.display.output import Interrupted, print_columns, reported, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName, Json, Quiet, Report
from fedlens.run.progress import Forecast, Silent

if TYPE_CHECKING:
    from rich.console import Console

    from fedlens.cost_runs import CostResult

CLIENTS_SHOWN = 10
_EVERY = 15.0  # seconds between two lines of one run, where the output is no terminal


def cost(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of seeds; each has four runs. Intervals need 3.")
    ] = 3,
    engine: EngineName = None,
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
        from fedlens.cost_runs import cost as run_all

        overrides = [*(changes or ()), *([f"engine.name={engine}"] if engine else [])]
        display = CostDisplay(quiet=quiet, stderr=as_json)
        try:
            with stdout_kept_clean(as_json):
                result = run_all(
                    recipe,
                    overrides,
                    seeds=seeds,
                    out=out,
                    data_dir=data_dir,
                    download=download,
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


class CostDisplay:
    """Shows which run of how many is training: a line that changes on a terminal, a line a run elsewhere."""

    def __init__(self, *, quiet: bool, stderr: bool) -> None:
        from rich.console import Console

        self._console: Console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        self._quiet = quiet
        self._live = self._console.status("preparing the data") if self._console.is_terminal else None
        self._run: RunTitle | None = None
        self._started, self._trained, self._seconds = 0.0, 0, 0.0  # the runs that trained in this process
        if self._live is not None and not quiet:
            self._live.start()

    def note(self, text: str) -> None:
        """Prints a sentence about the settings."""
        self._print(text)

    def run_started(self, name: str, position: int, total: int) -> RunTitle:
        """Starts the line of a run."""
        self._run = RunTitle(f"[{position:>{len(str(total))}}/{total}] {name}", self._show)
        self._show(self._run.title, now=True)
        self._started = time.monotonic()
        return self._run

    def run_ended(self, name: str, position: int, total: int, error: str | None) -> None:
        """Prints the outcome of a run."""
        assert self._run is not None
        left = ""
        if self._run.trained and not error:
            self._trained, self._seconds = self._trained + 1, self._seconds + time.monotonic() - self._started
            left = time_left(self._seconds / self._trained, total - position)
        self._print(f"{self._run.title}: {f'failed: {error}' if error else self._run.outcome}{left}")

    def close(self) -> None:
        """Removes the changing line; may be called twice."""
        if self._live is not None:
            self._live.stop()

    def _show(self, text: str, now: bool = False) -> None:
        if self._live is not None:
            self._live.update(text)
        elif not now:
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(printable(text), soft_wrap=True)


def time_left(seconds: float, runs: int) -> str:
    """The time for `runs` more runs of so many seconds each, after a comma; empty for none.

    >>> time_left(24.2, 15), time_left(24.2, 0)
    ('; about 6 min left for 15 runs', '')
    """
    from fedlens.base.format import duration, many

    whole = seconds * runs
    rounded = 60 * round(whole / 60) if whole >= 90 else max(1, round(whole))
    return f"; about {duration(rounded).replace('.0 s', ' s')} left for {many(runs, 'run')}" if runs else ""


class RunTitle(Silent):
    """The progress of one run as one line; a listener of the run."""

    def __init__(self, title: str, show: Any) -> None:
        self.title, self.outcome = title, "finished before"
        self.trained = False
        self._show, self._rounds, self._shown = show, 0, time.monotonic()
        self._forecast = Forecast()

    def started(self, plan: dict[str, Any]) -> None:
        """Called before the first round."""
        self._rounds = int(plan["rounds"])
        self._forecast = Forecast(self._rounds)

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Shows the round, at most every 15 seconds."""
        from fedlens.base.format import duration

        now = time.monotonic()
        self.trained = True
        self._forecast.round_done(metrics["round"], metrics.get("elapsed"), metrics.get("seconds"), now)
        left = self._forecast.run_left(now)
        if now - self._shown >= _EVERY:
            self._shown = now
            after = f", {duration(left)} left in this run" if left is not None else ""
            self._show(f"{self.title}: round {metrics['round']} of {self._rounds}{after}")

    def note(self, text: str) -> None:
        """Nothing: what concerns one run is in its summary."""

    def finished(self, summary: dict[str, Any]) -> None:
        """Keeps the outcome."""
        from fedlens.base.format import duration, finite, many, metric_value
        from fedlens.report.cost_measures import measure

        # The one measure that every run has when it ends, whatever its models and its data.
        at_clients = summary.get("clients") or {}
        seconds = duration(finite((summary.get("totals") or {}).get("seconds")))
        metric, value = str(at_clients.get("metric")), finite(at_clients.get("mean"))
        result = "" if value is None else f"{measure(metric, 'clients')} {metric_value(metric, value)}, "
        warnings = len(summary.get("warnings") or ())
        self.outcome = f"{result}{seconds}" + (f", {many(warnings, 'warning')}" if warnings else "")


def show(result: CostResult, quiet: bool) -> None:
    """Prints the answer; with --quiet only the path of the page."""
    from fedlens.report.cost_labels import suspicious_lines
    from fedlens.report.cost_measures import byte_rows, bytes_note, measure_notes, side_by_side
    from fedlens.report.cost_page import below_note, client_head, client_texts, images_note
    from fedlens.report.cost_sentences import wide_note
    from fedlens.report.data_notes import SHOWN

    answer = result.answer
    page = result.page if result.page.exists() else result.directory / "cost.json"
    if quiet:
        print(printable(str(page)))
        return
    if "parties" in answer:
        from fedlens.report.party_cost import HEAD, party_rows

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
        for note in filter(None, (*measure_notes(answer), bytes_note(answer))):
            print(printable(note))
    rows = client_texts(answer)
    if rows:
        print()
        head = client_head(answer)
        print_columns(rows[:CLIENTS_SHOWN], head, range(1, len(head) - 1))
        if len(rows) > CLIENTS_SHOWN:
            print(f"and {len(rows) - CLIENTS_SHOWN} more clients, on the page")
        for note in filter(None, (below_note(answer), wide_note(answer), images_note(answer))):
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
