"""report.html: one run as a page that opens offline."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlens.base.format import (
    POOLED,
    count,
    duration,
    finite,
    many,
    millions,
    rounds_of,
    setting,
    size,
)
from fedlens.base.shell_command import shell_command
from fedlens.base.summary_text import listed
from fedlens.core.types import forbidden
from fedlens.data.catalogue import data_directory
from fedlens.pages.architecture import cells_of
from fedlens.pages.client_section import client_section
from fedlens.pages.data_notes import notes_card, notes_of
from fedlens.pages.example_section import example_section
from fedlens.pages.left_clients import left_clients
from fedlens.pages.parties_section import parties_section
from fedlens.pages.partition_page import partition_section
from fedlens.pages.render import write_page
from fedlens.pages.run_charts import graphs_of, run_charts
from fedlens.pages.shown_images import may_get_images
from fedlens.pages.suspicious_labels import label_section
from fedlens.pages.test_section import section_of_test
from fedlens.results.bound import bound_beside, bound_sentence
from fedlens.results.pseudonyms import PseudonymRun
from fedlens.results.run import Run, read_run, subtable
from fedlens.settings.keys import flat

_MACHINE = {
    "os": "operating system",
    "cpu": "processor",
    "memory": "memory",
    "gpus": "GPUs",
    "libraries": "versions of the software",
    "git": "revision of the source",
}


def write_report(run_dir: Path, pseudonyms: bool = False) -> Path:
    """Writes report.html into a run directory and returns its path.

    Works on runs of any status; parts without data are left out. With `pseudonyms` the page is another file, without
    the names of sites and clients; see `PseudonymRun`.

    Raises `RunDirectoryError` if `run_dir` is not a run directory.
    """
    run = PseudonymRun.open(run_dir) if pseudonyms else read_run(run_dir)
    command = run.environment.get("command")
    bound = bound_beside(run)
    curves = run_charts(run, bound)
    clients = run.partition.ids if run.partition else ()
    context = {
        "pooled": POOLED,
        "title": f"{run.name} · {run.status} · fedlens",
        "aside": " · ".join(filter(None, [run.run_id, _start_time(run.environment)])),
        "run": run,
        "curves": curves,
        "bound": bound_sentence(run, bound) if bound and curves else "",
        "warnings": [(rounds_of(w), str(w.get("sentence")), str(w.get("try"))) for w in run.warnings],
        "privacy": subtable(run.summary, "privacy"),
        "graphs": graphs_of(run),
        "cells": cells_of(run),
        "details": section_of_test(run),
        "examples": example_section(run),
        "clients": client_section(run),
        "measuring": measuring_command(run),
        "resuming": resuming_command(run),
        "repeating": repeating_command(run),
        "labels": label_section(run),
        "partition": partition_section(run.partition),
        "parties": parties_section(run),
        "left": left_clients(run),
        "client_names": clients,
        "notes": notes_card(notes_of([run]), clients),
        "images_command": images_command(run) if may_get_images(run) else "",
        "skipped": _skipped(run),
        "failures": _failures(run),
        "unmeasured": _unmeasured(run),
        "changes": _changes(run),
        "efficiency": efficiency(run),
        "settings": _settings(run),
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "environment": _shown({key: each for key, each in run.environment.items() if key != "shown"}),
        "machine": [words for key, words in _MACHINE.items() if run.environment.get(key)],
    }
    return write_page(run.shared_path if pseudonyms else run.report_path, "run.html.j2", context)


def _start_time(environment: Mapping[str, Any]) -> str:
    """When the run started: 2026-11-20 10:15 UTC."""
    times = (v for key, v in environment.items() if key.startswith("start") and isinstance(v, str))
    started = next(times, "")
    try:
        return datetime.fromisoformat(started).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return started


def _skipped(run: Run) -> list[str]:
    """Sentences on the rounds that were skipped (`max_skipped`); none if there is none."""
    rounds = [str(line["round"]) for line in run.metrics if "skipped" in line]
    if not rounds:
        return []
    counted = "1 round was" if len(rounds) == 1 else f"{len(rounds):,} rounds were"
    return [
        f"{counted} skipped ({listed(rounds, 20)}): no reply was accepted, or the aggregate made no update.",
        "The model stayed as it was in a skipped round; metrics.jsonl has the reasons.",
    ]


def _failures(run: Run) -> list[tuple[str, str, int]]:
    """Client, reason and number of the lost and rejected replies, the most frequent first."""
    table = subtable(run.summary, "failures")
    rows = [
        (str(client), str(reason), int(finite(times) or 0))
        for client, reasons in table.items()
        if isinstance(reasons, Mapping)
        for reason, times in reasons.items()
    ]
    return sorted(rows, key=lambda row: (-row[2], row[0], row[1]))


def _unmeasured(run: Run) -> str:
    """A sentence on the clients whose sites do not allow that they are evaluated; empty if there is none."""
    clients = {client for client, reason, _ in _failures(run) if reason == forbidden("evaluate-own")}
    if not clients:
        return ""
    return (
        f"{many(len(clients), 'client was', 'clients were')} not evaluated: the policy of the site does not allow it "
        "([allow] in site.toml)."
    )


def _changes(run: Run) -> list[tuple[str, str, str, str]]:
    """What was edited while the run was stopped: round, setting, value before and after."""
    changes = run.summary.get("changes")
    rows = [row for row in changes if isinstance(row, Mapping)] if isinstance(changes, list) else []
    return [
        (
            str(row.get("after_round")),
            str(row.get("key")),
            setting(row.get("before")),
            setting(row.get("after")),
        )
        for row in rows
    ]


def _settings(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each table of config.toml with its settings; settings outside of tables come first."""
    tables = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    scalars = {key: value for key, value in run.config.items() if key not in tables}
    groups = [("run", _shown(scalars))] if scalars else []
    return groups + [(key, _shown(value) or [("defaults", "")]) for key, value in tables.items()]


def _shown(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of every setting."""
    settings = flat(table, whole=lambda value: not value, numbered=True).items()
    return [
        (key, size(value) if key.split(".")[-1] == "memory" and finite(value) else setting(value))
        for key, value in settings
    ]


def resuming_command(run: Run) -> str:
    """The command that resumes a run."""
    return shell_command("resume", Path(run.start_directory))


def repeating_command(run: Run, changes: Sequence[str] = ()) -> str:
    """The command of the same run, with changed settings if there are any."""
    data_dir, usual = run.environment.get("data_dir"), str(data_directory(None).resolve())
    return shell_command(
        "run",
        Path(run.start_directory, "config.toml"),
        changes=changes,
        data_dir=None if data_dir in (None, usual) else str(data_dir),
    )


def measuring_command(run: Run) -> str:
    """The command of the same run with its clients measured, for a run that measured none."""
    data = subtable(run.config, "data")
    changes = [] if data.get("validation") else ["data.validation=0.2"]
    changes += [] if data.get("validation_from") == "client" else ["data.validation_from=client"]
    return repeating_command(run, [*changes, "evaluation.clients=all"])


def images_command(run: Run) -> str:
    """The command of the same run with test images."""
    return repeating_command(run, ["record.images=true"])


def efficiency(run: Run) -> list[tuple[str, str]]:
    """Name and value of each row: parameters, multiply-adds, rounds, bytes and time.

    Multiply-adds are those of a forward pass for one example. Bytes are those of all clients of a round together.
    """
    rounds = run.rounds_done
    down, up, seconds = run.total("bytes_down"), run.total("bytes_up"), run.seconds()
    peer = run.total("bytes_peer") or 0.0
    parameters, trainable = (finite(run.recorded("model", key)) for key in ("parameters", "trainable"))

    def a_round(total: float | None) -> float | None:
        return total / rounds if total is not None and rounds else None

    sent = None if down is None and up is None else (down or 0.0) + (up or 0.0) + peer
    return [
        ("Parameters", count(parameters)),
        ("Trainable parameters", count(trainable)),
        (_multiply_adds_of(run), millions(finite(run.recorded("model", "multiply_adds")))),
        ("Communication rounds", count(rounds)),
        ("Sent down a round, to all clients", size(a_round(down))),
        ("Sent up a round, by all clients", size(a_round(up))),
        *([("Sent a round between clients", size(a_round(peer)))] if peer else []),
        ("Sent in all rounds, down and up" + (", and between clients" if peer else ""), size(sent)),
        ("Time a round", duration(a_round(seconds))),
        ("Total time", duration(seconds)),
    ]


def _multiply_adds_of(run: Run) -> str:
    shape = run.recorded("model", "input_shape")
    if not isinstance(shape, list) or not shape:
        return "Multiply-adds, one forward pass"
    if len(shape) == 1:
        return f"Multiply-adds, one input of {shape[0]}"
    return f"Multiply-adds, one {'×'.join(map(str, shape))} input"
