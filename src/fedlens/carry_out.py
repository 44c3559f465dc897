"""Carries out a run that is built, round by round, and writes down how it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fedlens.base.errors import FedlensError, told
from fedlens.base.interrupts import watched
from fedlens.pages.run_page import write_report
from fedlens.result import Result
from fedlens.run.build import Built
from fedlens.run.call_observers import Observers
from fedlens.run.progress import Listener
from fedlens.run.run_description import describe
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.run.runner import CompleteRound, Runner
from fedlens.run.session import Session
from fedlens.use.results import exported, outline, summarize, write_final

_NOTES = 5  # sentences on the data that are said aloud


def carry_out(
    built: Built,
    directory: RunDir,
    observers: Observers,
    run_state: RunState | None,
    root: Path | None,
    report: bool,
    changes: Sequence[dict[str, Any]] = (),
    *,
    until: int | None,
    session: Session | None,
) -> Generator[CompleteRound, None, Result]:
    """Runs round by round, and writes the end down whatever it is: summary, model, report.

    `root` is where the data are, if the directory still has to be told what is run.
    """
    observers.started(outline(built, directory))
    for sentence in built.notes[:_NOTES]:
        observers.note(sentence)
    if len(built.notes) > _NOTES:
        observers.note(f"and {len(built.notes) - _NOTES} more such notes, in summary.json")
    runner = Runner(built, directory, observers, run_state, changes)
    status, error = "failed", None
    try:
        if root is not None:
            describe(directory, built, root, session)
        with closing(runner.rounds(until)) as rounds:
            while (round := _next(rounds)) is not None:
                yield round
        if runner.done < built.config.rounds:
            status = "paused"
        else:
            write_final(built, directory, observers, runner.run_state)
            status = "finished"
    except (KeyboardInterrupt, GeneratorExit) as end:  # Ctrl-C, or a loop that ends early
        status = "interrupted" if isinstance(end, KeyboardInterrupt) else "paused"
        raise
    except FedlensError as failure:
        error = str(failure)
        raise
    except BaseException as failure:
        error = told(failure)
        raise
    finally:
        summary = summarize(built, directory, runner, status, error)
        try:
            directory.write_summary(summary)
        except FedlensError as failure:
            if status in ("finished", "paused"):
                raise
            observers.note(str(failure))  # what went wrong first says more
        problem = _report(directory.path, observers) if report else _remove_page(directory, observers)
        if problem:
            summary["notes"].append(problem)
            with suppress(FedlensError):  # the disk is full, say, and the summary without it is there
                directory.write_summary(summary)
        observers.finished(summary)
    assert runner.run_state is not None
    return Result(directory.path, exported(built, runner.run_state.state)[0])


def _next(rounds: Iterator[CompleteRound]) -> CompleteRound | None:
    """The next round. Signals are watched while fedlens works, and not in the loop of a user."""
    with watched():
        return next(rounds, None)


def _report(directory: Path, progress: Listener) -> str | None:
    """Writes the result page. If it cannot be written, the run goes on to its end: a sentence says why."""
    try:
        write_report(directory)
    except Exception as error:
        reason = str(error) if isinstance(error, FedlensError) else told(error)
        sentence = f"the result page could not be written: {reason}"
        progress.problem(sentence)
        return sentence
    return None


def _remove_page(directory: RunDir, progress: Listener) -> str | None:
    """Removes the page of before `resume`, which shows an old state. A sentence says why if it cannot be removed."""
    try:
        directory.report_path.unlink(missing_ok=True)
    except OSError as error:
        sentence = f"the earlier result page could not be removed: {error.strerror} ({directory.report_path})"
        progress.problem(sentence)
        return sentence
    return None
