"""The commands on the page of a run: they resume it, repeat it, or repeat it with other settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlens.base.shell_command import shell_command
from fedlens.data.catalogue import data_directory
from fedlens.results.run import Run, subtable


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
