"""Makes the analyses of a run and writes their numbers, figures and page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens import __version__
from fedlens.analyses.opened_run import On, OpenedRun, open_run
from fedlens.analyses.registry import ANALYSES, Rows, needs_of
from fedlens.base.errors import ConfigError, FedlensError, HookError, RunDirectoryError, told
from fedlens.base.shell_command import setting, shell_command
from fedlens.base.signatures import place_of
from fedlens.files.atomic_files import make_folder, refused, write_atomically
from fedlens.files.text_files import read_json
from fedlens.pages.analysis_page import INDEX, write_analysis_page
from fedlens.results.figures.analysis_figures import analysis_figures
from fedlens.results.figures.picture import draw_chart
from fedlens.run.rundir import plain
from fedlens.settings.config_source import Source
from fedlens.settings.resolve import Resolved, resolve

if TYPE_CHECKING:
    from torch import nn

FOLDER = "analysis"


@dataclass(frozen=True)
class Analyses:
    """The analyses of a run.

    Attributes:
        folder: `NAME.jsonl`, `NAME.svg`, `NAME.pdf` and the page.
        rows: the rows of each analysis made, by name.
        page: the page.
        left_out: why analyses were not made, by name.
    """

    folder: Path
    rows: Mapping[str, Rows]
    page: Path
    left_out: Mapping[str, str]


def analyze(
    directory: Path | str,
    names: Sequence[str] = (),
    *,
    rounds: Sequence[int] | None = None,
    on: On = "test",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    model: nn.Module | None = None,
    accept_changes: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    device: str | None = None,
) -> Analyses:
    """Analyzes a run, and writes `analysis/` in its directory.

    Args:
        directory: a run directory, also of a run in progress.
        names: the analyses (`fedlens list analyses`), or `FILE.py:function`; by default all that the recordings allow.
        rounds: the recorded rounds to analyze; all by default.
        on: the data that models are evaluated on.
        settings: of each analysis by name, such as `{"loss-surface": {"count": 200}}`.
        out: another folder than `analysis` in the run directory.
        model: an object equal to the run's model, if the run was given one.
        accept_changes: execute Python files of your own although they were edited since the run trained.
        say: is told what is done.
        device: see `fedlens.analyses.opened_run.open_run`.

    Raises `RunDirectoryError` if a named analysis misses its recordings, with the command that makes them;
    `ConfigError` for a wrong name or setting.
    """
    chosen = check_request(names, settings)
    how: dict[str, Any] = {"data_dir": data_dir, "model": model, "accept_changes": accept_changes, "say": say}
    run = open_run(directory, rounds=rounds, on=on, device=device, **how)
    folder = make_folder(run.directory.path / FOLDER) if out is None else _named_folder(out)
    changes = [
        setting(f"{name}.{key}", value)
        for name, table in (settings or {}).items()
        for key, value in table.items()
    ]
    given = {"on": None if on == "test" else on, "out": out, "data_dir": data_dir, "device": device}
    command = shell_command("analyze", run.directory.path, *names, changes=changes, rounds=rounds, **given)
    made: dict[str, Rows] = {}
    left_out: dict[str, str] = {}
    for name, analysis in chosen.items():
        missing = _missing(run, name)
        if missing is not None:
            if names:
                raise missing
            left_out[name] = missing.what
            continue
        began = time.perf_counter()
        try:
            with run.built.engine.applied(run.built.program).computing():
                made[analysis.name] = _rows_of(analysis, run)
        except ConfigError as error:
            if names:
                raise
            left_out[name] = error.what  # such as class probabilities, which this task does not have
            continue
        seconds = time.perf_counter() - began
        _write(folder, run, analysis, made[analysis.name], seconds, command)
        say(f"{name}: {len(made[analysis.name])} rows in {seconds:.1f} s")
    if not made:
        raise run.missing("local models or updates", "record.local_models")
    return Analyses(folder, made, write_analysis_page(folder, run.directory), left_out)


def _named_folder(out: Path | str) -> Path:
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(error, folder.name, folder) from error
    return folder


def check_request(
    names: Sequence[str] = (), settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Resolved]:
    """The analyses by name with their settings; all without names. Raises `ConfigError` for a wrong name or setting."""
    wanted = {name: dict((settings or {}).get(name, {})) for name in names or ANALYSES}
    for name in settings or {}:
        if name not in wanted:
            own = [each for each in wanted if each.endswith(f":{name}")]
            if own:
                hint = f"write --set {own[0]}.KEY=VALUE"
            elif name in ANALYSES.entries:
                hint = f"name it: {name}"
            else:
                hint = f"write the name of an analysis that is made: {', '.join(wanted)}"
            raise ConfigError(f"settings are given for '{name}', which is not made", where=name, hint=hint)
    return {name: _resolved(name, table) for name, table in wanted.items()}


def _rows_of(analysis: Resolved, run: OpenedRun) -> Rows:
    """The rows of an analysis. Raises `HookError` if a user's own fails or returns something else."""
    if analysis.name in ANALYSES.entries:
        rows: Rows = analysis.factory(run, **analysis.settings)
        return rows
    try:
        returned: Any = analysis.factory(run, **analysis.settings)
    except FedlensError:
        raise
    except Exception as error:
        raise HookError(
            f"the analysis '{analysis.name}' failed: {told(error)}",
            where=place_of(analysis.factory),
            hint="--debug shows the traceback",
        ) from error
    if not isinstance(returned, list) or not all(isinstance(row, Mapping) for row in returned):
        raise HookError(
            f"the analysis '{analysis.name}' returned a {type(returned).__name__}",
            where=place_of(analysis.factory),
            hint="return a list of rows, each a dictionary",
        )
    return returned


def _resolved(name: str, table: Mapping[str, Any]) -> Resolved:
    source = Source({"analysis": {"name": name, **table}})
    return resolve(ANALYSES, {"name": name, **table}, name, source, locate=_place)


def _place(key: str) -> str:
    """Where a setting was given: an analysis' own name is no setting."""
    return key.removesuffix(".name") if key.endswith(".name") else f"--set {key}"


def _missing(run: OpenedRun, name: str) -> RunDirectoryError | None:
    """The error for an analysis whose recordings are missing; None if they are there."""
    needs = needs_of(name)
    models = any(each.trained for each in run.recorded)
    if needs == "local models" and not models:
        return run.missing("local models", "record.local_models")
    if needs == "local models or updates" and not models and not any(each.updates for each in run.recorded):
        return run.missing("local models or updates", "record.updates")
    return None


def _write(
    folder: Path, run: OpenedRun, analysis: Resolved, rows: Rows, seconds: float, command: str
) -> None:
    """Writes the rows and the pictures of an analysis, and enters it in the index of the folder."""
    name = file_name(analysis.name)
    index = read_index(folder)
    if any(entry["rows"] == f"{name}.jsonl" for other, entry in index.items() if other != analysis.name):
        raise ConfigError(
            f"{folder} has another analysis with the file {name}.jsonl",
            where=analysis.name,
            hint="rename the function, or choose another folder with --out",
        )
    try:
        lines = [json.dumps(plain(row), allow_nan=False) + "\n" for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:  # only of a user's own; the last: of a tensor
        raise HookError(
            f"the analysis '{analysis.name}' returned a row that is no JSON: {told(error)}",
            where=place_of(analysis.factory),
            hint="return numbers, texts, and lists and dictionaries of them: array.tolist() makes a list",
        ) from error
    write_atomically(folder / f"{name}.jsonl", "".join(lines).encode())
    files = []
    # The extra `plot` draws pictures for papers; the page has its own.
    figures = analysis_figures(analysis.name, rows) if find_spec("matplotlib") is not None else []
    for number, figure in enumerate(figures):
        place = f"-{number + 1}" if len(figures) > 1 else ""
        files.append([draw_chart(figure, folder / f"{name}{place}{kind}").name for kind in (".svg", ".pdf")])
    index[analysis.name] = {
        "rows": f"{name}.jsonl",
        "figures": files,
        "settings": plain(analysis.settings),
        "on": run.on,
        "seconds": round(seconds, 3),
        "command": command,
        "fedlens": __version__,
    }
    write_atomically(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def read_index(folder: Path) -> dict[str, Any]:
    """What the folder has of each analysis, by name; empty without an index. Raises `RunDirectoryError`."""
    return read_json(folder / INDEX) or {}


def file_name(analysis: str) -> str:
    """The name of an analysis's files; of a user's own, those of its file and its function.

    >>> file_name("loss-surface"), file_name("/home/me/my.py:norms")
    ('loss-surface', 'my-norms')
    """
    file, _, function = analysis.rpartition(":")
    return f"{Path(file).stem}-{function}" if file else function
