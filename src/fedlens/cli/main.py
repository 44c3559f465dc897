"""`fedlens`: the commands; slow imports wait until a command needs them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedlens import __version__
from fedlens.base.printable import printable
from fedlens.cli.analyze import analyze
from fedlens.cli.audit import audit
from fedlens.cli.bench import bench
from fedlens.cli.compare import compare
from fedlens.cli.cost import cost
from fedlens.cli.data import data
from fedlens.cli.display.output import (
    INTERRUPTED,
    OutputLost,
    complain,
    discard,
    error_object,
    flush_output,
    from_printing,
    open_standard_streams,
    print_json,
)
from fedlens.cli.export import export
from fedlens.cli.federation import federation
from fedlens.cli.list import list_names
from fedlens.cli.partition import partition
from fedlens.cli.predict import predict
from fedlens.cli.pretrain import pretrain
from fedlens.cli.privacy import privacy
from fedlens.cli.purge import purge
from fedlens.cli.replay import replay
from fedlens.cli.report import report
from fedlens.cli.reproduce import reproduce
from fedlens.cli.resume import resume
from fedlens.cli.run import RunCommand, run
from fedlens.cli.serve import serve
from fedlens.cli.show import show
from fedlens.cli.signals import ignore_signals, stopped_by_signals
from fedlens.cli.site import site
from fedlens.cli.sweep import sweep

# typer has no public name for the error of a wrong command line, which this is a kind of.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(TyperGroup):
    """The commands, with what holds for all of them: how wrong arguments are reported, and lost output."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command and exits with its code, or another if its output could not be written."""
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            with stopped_by_signals():
                return super().main(
                    arguments, prog_name, complete_var, standalone_mode, windows_expand_args, **extra
                )
        except OSError as error:  # of --help, say
            if not from_printing(error):
                raise
            discard(sys.stdout)
            lost = OutputLost(error)
            lost.report()
            raise SystemExit(lost.exit_code) from None
        except SystemExit as end:
            try:
                flush_output()
            except OutputLost as lost:
                lost.report()
                raise SystemExit(end.code or lost.exit_code) from None
            raise

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **more: Any) -> Any:
        """Reads the arguments of the group."""
        self._as_json = "--json" in args and ("bench" not in args or "-" in args)  # there it names a file
        try:
            return super().make_context(info_name, args, parent, **more)
        except _UsageError as error:
            raise self._explained(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Reads the arguments of the command, and calls it."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            raise self._explained(error) from None
        except KeyboardInterrupt:  # before the command has begun
            complain("interrupted", "nothing was started")
            raise typer.Exit(INTERRUPTED) from None

    def _explained(self, error: Any) -> Any:
        """The error, which typer prints; with --json an object on standard output too."""
        error.message = printable(error.message)
        if error.message.startswith("No such command 'plot'"):
            error.message = (
                "No such command 'plot'. 'fedlens partition plot' draws a partition; 'fedlens compare RUN --plot "
                "FILE' draws the curves of runs."
            )
        if self._as_json and error.exit_code:
            where = error.ctx.command_path if error.ctx else None
            what = error.format_message().rstrip(".")
            hint = f"Try '{where} --help'" if where else None
            print_json(error_object("error", error.exit_code, what, where, hint))
        return error


app = typer.Typer(
    name="fedlens",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=RunCommand)(run)
app.command("resume")(resume)
app.command("serve")(serve)
app.command("pretrain", cls=RunCommand)(pretrain)
app.command("list")(list_names)
app.command("show")(show)
app.command("compare")(compare)
app.command("cost")(cost)
app.command("privacy")(privacy)
app.command("audit")(audit)
app.command("sweep")(sweep)
app.command("reproduce")(reproduce)
app.command("report")(report)
app.command("replay")(replay)
app.command("purge")(purge)
app.command("analyze")(analyze)
app.command("predict")(predict)
app.command("export")(export)
app.add_typer(data)
app.add_typer(bench)
app.add_typer(partition)
app.add_typer(federation)
app.add_typer(site)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedlens {__version__}")
        raise typer.Exit


@app.callback(epilog="First steps: [bold]fedlens run digits[/bold], then open the page it names.")
def fedlens(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning experiments for computer vision: train on partitioned data, and measure what that costs."""
    # Of Pillow, which is not imported here. Images beyond its limit are refused with a sentence that names the file.
    warnings.filterwarnings("ignore", r"Image size \(\d+ pixels\) exceeds limit")


def main() -> None:
    """Runs the command of the command line."""
    open_standard_streams()
    with stopped_by_signals():
        try:
            app(prog_name="fedlens")
        finally:
            ignore_signals()
