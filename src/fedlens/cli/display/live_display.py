"""What a command shows while it works: lines, and on a terminal a bar below them that moves in the background.

Workers are forked by a process of their own (`fedlens.engines.forkserver`), so no fork copies the locks of the
background thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fedlens.base.printable import printable
from fedlens.cli.display.forecast import fitting
from fedlens.cli.display.output import complain, discard, unwritten

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress

_BAR = 24  # columns, at most a sixth of the terminal
_BEAT, _TERMINAL_BEAT = 1.0, 0.25  # seconds


class LiveDisplay:
    """Prints lines, and moves a bar on a terminal. An output that is lost ends nothing: it is said once.

    Args:
        console: where it is printed.
        quiet: print only problems.
        clock: seconds, for the estimates.
        beating: move the display in the background too, from `begin` to `close`; else only what arrives moves it.
    """

    work = "run"  # what continues if nothing can be printed

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        beating: bool = True,
    ) -> None:
        self.lost: OSError | None = None  # why nothing more can be printed
        self._console, self._quiet, self._clock = console, quiet, clock
        self._bar: Progress | None = None
        self._column: BarColumn
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fedlens-display", daemon=True)
        self._beating = beating

    def begin(self, head: str, total: int | None) -> None:
        """Shows the bar, if this is a terminal, and starts to move the display."""
        if self._bar is None and self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            above = self._above

            class Bar(Progress):
                def get_renderables(self) -> Iterable[RenderableType]:
                    yield from above()
                    yield from super().get_renderables()

            self._column = BarColumn(bar_width=_BAR)
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                self._column,
                TextColumn("{task.fields[more]}", markup=False),
                console=self._console,
                transient=True,
                auto_refresh=False,  # what cannot be printed is handled here
            )
            self._bar.add_task(head, total=total, more="")
            self._guarded(self._bar.start)
        if self._beating and self._thread.ident is None:
            self._thread.start()

    def _above(self) -> Iterable[RenderableType]:
        """What is shown above the bar."""
        return ()

    def tick(self) -> None:
        """Updates the display, however long nothing has arrived; called by another thread."""
        # Never waits: the other thread is printing already.
        if self._busy.acquire(blocking=False):
            try:
                self._update(self._clock())
            finally:
                self._busy.release()

    def _update(self, now: float) -> None:
        """Moves the bar, or says after a long silence how far it is."""

    def _move(self, head: str, done: float, total: int | None, parts: Iterable[str]) -> None:
        """Moves the bar, with `head` before it and as many of `parts` after it as there is room for."""
        assert self._bar is not None
        first, *others = parts
        width = self._console.width
        room = width - len(f"* {head}   ")
        self._column.bar_width = max(1, min(_BAR, width // 6, room - len(first)))
        more = fitting([first, *others], room - self._column.bar_width)
        self._bar.update(
            self._bar.task_ids[0],
            completed=done,
            total=total,
            description=printable(head),
            more=printable(more),
        )
        self._guarded(self._bar.refresh)

    def note(self, text: str) -> None:
        """Prints a sentence that the user should read, for example that a damaged checkpoint was skipped."""
        if not self._quiet:
            self._print(f"note: {text}", style="yellow", soft_wrap=True)

    def problem(self, text: str) -> None:
        """Prints on standard error what went wrong and did not end the work, also with --quiet."""
        complain("warning", text)

    def close(self) -> None:
        """Removes the bar; may be called twice."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._bar is not None:
            self._guarded(self._bar.stop)

    def _print(self, text: str, **how: Any) -> None:
        self._guarded(lambda: self._console.print(printable(text), **how))

    def _guarded(self, show: Callable[[], None]) -> None:
        """Calls `show`, unless the output is lost."""
        if self.lost is not None:
            return
        try:
            show()
        except OSError as error:
            self.lost = error
            self._quiet = True
            discard(self._console.file)
            if not self._console.stderr:
                complain("warning", f"{unwritten(error)}; the {self.work} continues without output")

    def _beat(self) -> None:
        while not self._closed.wait(_TERMINAL_BEAT if self._bar else _BEAT):
            # A display that fails once is no reason to stand still for the rest of the work.
            with suppress(Exception):
                self.tick()
