"""Prints errors as one sentence, tables, and JSON with nothing else on standard output."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import typer

from fedlens.base.errors import FedlensError, one_line, own_place
from fedlens.base.printable import UNPRINTABLE, printable

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
BROKEN_PIPE = 141  # as of a process that SIGPIPE ended
_PRINTS = __name__.rpartition(".")[0] + "."  # modules that print
_NETWORK = "Install it: pip install 'fedlens[network]'"
_OF_A_FEDERATION = {  # modules that its server and its sites need, and what to do without one
    "aiohttp": _NETWORK,
    "cryptography": _NETWORK,
    "fcntl": "The server and the sites of a federation run on Linux only",
}
_ANY_WIDTH = 1_000_000  # characters of a line that is not fitted to a terminal


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, with a message for the user."""


class OutputLost(Exception):
    """Standard output cannot be written."""

    def __init__(self, error: OSError, more: str = "") -> None:
        super().__init__(unwritten(error) + more)
        self.broken_pipe = error.errno == errno.EPIPE
        self.exit_code = BROKEN_PIPE if self.broken_pipe else 1

    def report(self) -> None:
        """Says so on standard error; nothing if the reader has just closed the pipe, as `head` does."""
        if not self.broken_pipe:
            complain("error", f"{self}.")


@dataclass
class CommandOutput:
    """The output of one command: whether it is JSON, whether the JSON has been printed, --debug, and `more` keys."""

    as_json: bool = False
    printed: bool = False
    debug: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def json(self, value: Any) -> None:
        """Prints the command's JSON value, with the keys of `more` if it is an object."""
        self.printed = True
        print_json({**value, **self.more} if self.more else value)

    def failed(self, status: str, exit_code: int, what: str, where: str | None, hint: str | None) -> None:
        """With --json, prints the error as an object, unless the command has printed its JSON before."""
        if self.as_json and not self.printed:
            with suppress(OSError, OutputLost):  # the error was printed on standard error before
                self.json(error_object(status, exit_code, what, where, hint))


def error_parts(error: Exception, debug: bool) -> tuple[int, str, str | None, str | None]:
    """The exit code of an exception, what is wrong, where, and a hint."""
    if isinstance(error, FedlensError):
        return error.exit_code, error.what, error.where, error.hint
    if isinstance(error, ModuleNotFoundError) and error.name in _OF_A_FEDERATION:
        return 2, f"this command needs {error.name}, which is not here", None, _OF_A_FEDERATION[error.name]
    text = f"{type(error).__name__}: {error}".removesuffix(": ").rstrip(".")
    hint = None if debug else "Run it again with --debug to see the traceback"
    place = own_place(error)
    return 1, f"unexpected error: {text}", place and one_line(place), hint


def error_object(
    status: str, exit_code: int, what: str, where: str | None = None, hint: str | None = None
) -> dict[str, Any]:
    """The object that `--json` prints for an error."""
    error = {"what": what, "where": where, "hint": hint}
    return {"status": status, "error": error, "exit_code": exit_code}


@contextmanager
def reported(debug: bool, as_json: bool = False) -> Iterator[CommandOutput]:
    """Turns an exception into one sentence on standard error and the right exit code.

    With `as_json`, the error is an object on standard output too.
    """
    output = CommandOutput(as_json, debug=debug)
    try:
        with _sentences(output), _lengths_of_paths():
            yield output
    except OutputLost as lost:
        lost.report()
        raise typer.Exit(lost.exit_code) from None


@contextmanager
def _lengths_of_paths() -> Iterator[None]:
    """Says of any path that was given, wherever it is opened first, that it is too long."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        what, hint = "the path is longer than the file system allows", "use a shorter one"
        raise FedlensError(what, where=one_line(str(error.filename)), hint=hint) from error


@contextmanager
def _sentences(output: CommandOutput) -> Iterator[None]:
    try:
        yield
    except FedlensError as error:
        _trace(output.debug)
        complain("error", str(error))
        output.failed("error", *error_parts(error, output.debug))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        what = str(stop) or "the command had not ended; run it again"
        complain("interrupted", what)
        output.failed("interrupted", INTERRUPTED, what, None, None)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, OutputLost):
        raise
    except Exception as error:
        if isinstance(error, OSError) and from_printing(error):
            discard(sys.stdout)
            raise OutputLost(error) from None
        _trace(output.debug)
        exit_code, what, where, hint = error_parts(error, output.debug)
        sentence = f"{what} ({where})." if where else f"{what}."
        complain("error", f"{sentence} {hint}." if hint else sentence)
        output.failed("error", exit_code, what, where, hint)
        raise typer.Exit(exit_code) from None


def _trace(debug: bool) -> None:
    if debug and sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(printable(traceback.format_exc().replace("\t", "    ")))


def complain(kind: str, text: str) -> None:
    """Prints a sentence on standard error, after `error`, `warning` or `interrupted`."""
    from rich.text import Text

    style = "bold red" if kind == "error" else "bold yellow"
    sentence = Text(f"{kind}: " if text else kind, style).append(printable(text), "not bold default")
    with suppress(OSError):  # there is no other place to say it
        console(stderr=True).print(sentence, soft_wrap=True)


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is, and raises `BrokenPipeError` instead of ending the process."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(*lines: object) -> None:
    """Prints lines of text on standard output."""
    print(*(printable(str(line)) for line in lines), sep="\n", file=_stdout())


def print_json(value: Any) -> None:
    """One JSON value on standard output; numbers that are not finite become null."""
    from fedlens.run.rundir import plain

    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    text = UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    print(text, file=_stdout())
    flush_output()


def _stdout() -> TextIO:
    """Standard output. Raises `OutputLost` if it is closed: Python would print nowhere, without a word."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OutputLost(OSError(errno.EBADF, "it is closed"))
    return stream


def unwritten(error: OSError) -> str:
    """Why standard output cannot be written, as a sentence without a full stop."""
    return f"standard output cannot be written: {error.strerror or error}"


def from_printing(error: OSError) -> bool:
    """Whether the error comes from printing, not from a file: a `print` of a command, of rich or of typer raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return error.filename is None and module.startswith(("rich.", "typer.", _PRINTS))


def flush_output() -> None:
    """Writes what is waiting. Raises `OutputLost` if it cannot be written; it is discarded then."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        return
    try:
        stream.flush()
    except OSError as error:
        discard(stream)
        raise OutputLost(error) from None


def discard(stream: Any) -> None:
    """Lets a stream that cannot be written lead nowhere, so that no later write or flush fails."""
    if (descriptor := _descriptor(stream)) is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_standard_streams() -> None:
    """Opens what is closed of the three standard descriptors, so that no file of a run gets the number of one.

    Characters that a stream's encoding lacks are printed as escapes.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def stdout_kept_clean(wanted: bool) -> Iterator[None]:
    """Sends everything printed inside, by child processes too, to standard error."""
    if not wanted:
        yield
        return
    flush_output()
    saved = os.dup(1) if _descriptor(sys.stdout) == 1 else None
    try:
        if saved is not None:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return None


def print_columns(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), numeric: Sequence[int] = ()
) -> None:
    """Prints rows in columns: fitted to a terminal, plain lines of any width elsewhere."""
    from rich.table import Table
    from rich.text import Text

    if not rows and not head:
        return
    stream = _stdout()
    screen = console()
    fitted = screen.is_terminal
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(head), header_style="bold", pad_edge=False)
    for k in range(len(rows[0] if rows else head)):
        table.add_column(
            Text(printable(head[k], line_feeds=False)) if head else "",
            justify="right" if k in numeric else "left",
            no_wrap=not fitted or k in numeric or (k == 0 and not head),
            style="cyan" if k == 0 else "",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, line_feeds=False)) for cell in row))
    if fitted:
        screen.print(table)
        return
    screen.width = _ANY_WIDTH
    with screen.capture() as drawn:
        screen.print(table)
    print(*(line.rstrip() for line in drawn.get().splitlines()), sep="\n", file=stream)
