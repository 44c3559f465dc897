"""Reads commands that fedlens has printed as the command line reads them."""

from __future__ import annotations

import shlex
from typing import Any

import typer
from typer.core import TyperGroup

from fedlens.cli.main import app


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The verbs of a command, and the parameters that its function gets. Raises what wrong words raise.

    >>> parsed("fedlens resume 'my run' --accept-changes")[1]["accept_changes"]
    True
    """
    program, *words = shlex.split(command)
    assert program == "fedlens", command
    verbs: list[str] = []
    parser: Any = typer.main.get_command(app)
    while isinstance(parser, TyperGroup):
        with parser.make_context("fedlens", words) as context:
            # As the groups themselves find the command: `bench` alone is `bench speed`.
            name, parser, words = parser.resolve_command(context, [*context._protected_args, *context.args])
        verbs.append(str(name))
    with parser.make_context(verbs[-1], list(words)) as context:
        return " ".join(verbs), context.params
