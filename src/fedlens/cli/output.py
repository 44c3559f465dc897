"""Prints errors as one sentence, tables, and JSON with nothing else on standard output."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer

from fedlens.core.errors import FedlensError

INTERRUPTED = 130
_ANY_WIDTH = 1_000_000  # characters of a line that is not fitted to a terminal


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, with a message for the user."""


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turns an exception into one sentence on standard error and the right exit code."""
    try:
        yield
    except FedlensError as error:
        if debug:
            traceback.print_exc()
        _complain("error", str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        _complain("interrupted", str(stop))
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}".removesuffix(": ").rstrip(".")
        hint = "" if debug else " Run it again with --debug to see the traceback."
        _complain("error", f"unexpected error: {text}.{hint}")
        raise typer.Exit(1) from None


def _complain(kind: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    style = "bold yellow" if kind == "interrupted" else "bold red"
    Console(stderr=True).print(
        Text(f"{kind}: " if text else kind, style).append(text, "not bold default"), soft_wrap=True
    )


def print_json(value: Any) -> None:
    """One JSON value on standard output; numbers that are not finite become null."""
    from fedlens.experiment.rundir import plain

    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False), flush=True)


@contextmanager
def stdout_kept_clean(wanted: bool) -> Iterator[None]:
    """Sends everything printed inside, by child processes too, to standard error."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
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
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None


def print_columns(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), numeric: Sequence[int] = ()
) -> None:
    """Prints rows in columns: fitted to a terminal, plain lines of any width elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows and not head:
        return
    console = Console(emoji=False, highlight=False)
    fitted = console.is_terminal
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(head), header_style="bold", pad_edge=False)
    for k in range(len(rows[0] if rows else head)):
        table.add_column(
            Text(head[k]) if head else "",
            justify="right" if k in numeric else "left",
            no_wrap=not fitted or k in numeric or (k == 0 and not head),
            style="cyan" if k == 0 else "",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    if fitted:
        console.print(table)
        return
    console.width = _ANY_WIDTH
    with console.capture() as drawn:
        console.print(table)
    print(*(line.rstrip() for line in drawn.get().splitlines()), sep="\n")
