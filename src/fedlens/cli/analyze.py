"""`fedlens analyze`: the analyses of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.base.errors import ConfigError
from fedlens.base.parse_text import parse_toml
from fedlens.cli.display.output import print_json, reported, say
from fedlens.cli.options import AcceptEdits, Debug, DeviceName, Json, Quiet, RunDataDir, RunDirectory


class EvaluatedOn(StrEnum):
    """The data that models are evaluated on."""

    TEST = "test"
    VALIDATION = "validation"


_NAMES = (
    "The analyses (fedlens list analyses), or FILE.py:function; by default all that the recordings allow."
)
Names = Annotated[list[str] | None, typer.Argument(metavar="[ANALYSIS]...", help=_NAMES)]


def analyze(
    directory: RunDirectory,
    names: Names = None,
    rounds: Annotated[
        str | None, typer.Option(metavar="LIST", help="The recorded rounds: 1,5 or 1-10; all by default.")
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="First repeat the run up to the last of these rounds, and record the local models and updates.",
        ),
    ] = None,
    on: Annotated[
        EvaluatedOn, typer.Option(help="The data that models are evaluated on.")
    ] = EvaluatedOn.TEST,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="ANALYSIS.KEY=VALUE",
            help="A setting of an analysis, for example loss-surface.count=200; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="The output folder; default DIR/analysis.")
    ] = None,
    device: DeviceName = None,
    data_dir: RunDataDir = None,
    accept_changes: AcceptEdits = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain a run: training dynamics, drift, loss surface and more, from its recordings.

    Models are evaluated on the kind of device that the run trained on, unless --device names another.
    """
    with reported(debug, as_json):
        from fedlens.analyses.analyze import analyze as make
        from fedlens.analyses.analyze import check_request
        from fedlens.run.rundir import plain

        heard = (lambda sentence: None) if quiet or as_json else say
        settings = analysis_settings(changes or [])
        chosen = None if rounds is None else round_list(rounds)
        check_request(names or (), settings)
        if record is not None:
            _repeat(directory, round_list(record), names or (), data_dir, accept_changes, heard)
        made = make(
            directory,
            names or (),
            rounds=chosen,
            on="test" if on is EvaluatedOn.TEST else "validation",
            settings=settings,
            out=out,
            data_dir=data_dir,
            accept_changes=accept_changes,
            say=heard,
            device=device,
        )
        if as_json:
            # A loss that is not a number is null in JSON.
            print_json(plain({"page": made.page, "rows": made.rows, "left_out": made.left_out}))
            return
        for name, reason in made.left_out.items():
            heard(f"{name}: left out, because {reason}")
        say(made.page if quiet else f"page: {made.page}")


def _repeat(
    directory: Path,
    rounds: Sequence[int],
    names: Sequence[str],
    data_dir: Path | None,
    accept_changes: bool,
    heard: Callable[[str], None],
) -> None:
    """Repeats a run up to the last of the rounds, and records what the analyses need."""
    from fedlens.analyses.registry import needs_of
    from fedlens.analyses.repeat_rounds import repeat_rounds

    models = any(needs_of(name) == "local models" for name in names)
    repeat_rounds(
        directory, rounds, data_dir=data_dir, needs_models=models, accept_changes=accept_changes, say=heard
    )


def round_list(text: str) -> list[int]:
    """The rounds in a list such as 1,5-7. Raises `ConfigError` for another text.

    >>> round_list("1,5-7")
    [1, 5, 6, 7]
    """
    rounds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1:
            raise ConfigError(f"the list of rounds is '{text}'", where="rounds", hint="write 1,5 or 1-10")
        if int(last or first) < int(first):
            raise ConfigError(
                f"the list of rounds has {part.strip()}, whose end is before its start",
                where="rounds",
                hint=f"write {last}-{first}",
            )
        rounds += range(int(first), int(last or first) + 1)
    return sorted(set(rounds))


def analysis_settings(changes: list[str]) -> dict[str, dict[str, Any]]:
    """The settings by analysis from texts such as `loss-surface.count=200`. Raises `ConfigError` for another text.

    >>> analysis_settings(["loss-surface.count=200"])
    {'loss-surface': {'count': 200}}
    """
    settings: dict[str, dict[str, Any]] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        analysis, dot, name = key.rpartition(".")
        if not (equals and dot and analysis and name):
            raise ConfigError(
                f"'{change}' is no setting of an analysis",
                where="--set",
                hint="write --set loss-surface.count=200",
            )
        try:
            parsed: Any = parse_toml(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        except ValueError as error:
            raise ConfigError(f"invalid value: {error}", where=f"--set {key}") from None
        settings.setdefault(analysis, {})[name] = parsed
    return settings
