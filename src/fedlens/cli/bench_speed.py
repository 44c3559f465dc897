"""`fedlens bench speed`: the engines of fedlens beside bare PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.display.output import print_columns, reported
from fedlens.cli.options import Debug, DeviceName

if TYPE_CHECKING:
    from fedlens.benchmark.comparison import ComparisonRow
    from fedlens.benchmark.limit import Workload
    from fedlens.benchmark.speed import BenchmarkPlan

_NAME = "fedlens-bench"
_COLUMNS = (
    "workload", "what", "processes x threads", "images/s", "to the limit", "overhead a client", "first round",
    "to bmm", "fedlens is",
)  # fmt: skip

Workloads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORKLOAD", help="cifar-cnn, mnist-cnn or linear; may be repeated; by default all three."
    ),
]
Engines = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Engines to measure, each with its own settings if needed: processes:workers=2:threads=1. "
        "'default' is fedlens with nothing set about the engine. "
        "A short trial finds the fastest workers and threads where they are not set.",
    ),
]
Pairs = Annotated[
    int, typer.Option(min=1, help="Number of paired measurements; each takes at least half a second.")
]
Seconds = Annotated[
    float | None,
    typer.Option(metavar="S", min=0, help="Time limit per workload; one measurement is always taken."),
]
Others = Annotated[bool, typer.Option("--peers", "--peer", hidden=True)]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory of the results file and the picture.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help=f"Results file; default {_NAME}.json in --out.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help=f"Picture; default {_NAME}.png in --out.")]


def speed(
    workloads: Workloads = None,
    engines: Engines = "default,inline,vectorized,processes",
    device: DeviceName = "auto",
    pairs: Pairs = 12,
    seconds: Seconds = None,
    others: Others = False,
    out: Out = Path(),
    json_file: JsonFile = None,
    picture: Picture = None,
    debug: Debug = False,
) -> None:
    """Train the same rounds with bare PyTorch and with fedlens in turn, and compare their speed.

    Each ratio is the median over pairs of turns, with a 95 % interval. Close other programs first.
    """
    with reported(debug):
        if others:
            from fedlens.base.errors import ConfigError

            hint = "run python -m benchmarks.speed, which has this option, in a checkout of fedlens"
            raise ConfigError("other libraries are measured from a checkout", where="--peers", hint=hint)
        ended(compared(workloads, plan(engines, pairs, seconds), device, out, json_file, picture))


def plan(engines: str, pairs: int, seconds: float | None) -> BenchmarkPlan:
    """What the options ask for. Raises `ConfigError` where no engine is to be measured."""
    from fedlens.base.errors import ConfigError
    from fedlens.benchmark.arrangements import engine_table
    from fedlens.benchmark.speed import BenchmarkPlan

    tables = [engine_table(text.strip()) for text in engines.split(",") if text.strip()]
    if not tables:
        raise ConfigError("no engine to measure", where="--engines", hint="name one, such as inline")
    return BenchmarkPlan(tables, pairs, seconds)


def compared(
    workloads: Sequence[str] | None,
    plan: BenchmarkPlan,
    device: str | None,
    out: Path,
    json_file: Path | None,
    picture: Path | None,
    command: Sequence[str] = ("fedlens",),
) -> list[ComparisonRow]:
    """Measures, prints, writes and draws the rows of the workloads, by default of all.

    `command` comes before the arguments in the results file.
    """
    from fedlens.benchmark.picture import draw
    from fedlens.benchmark.results_file import writable
    from fedlens.benchmark.speed import workload
    from fedlens.use.device_here import device_here

    loads = [workload(name) for name in dict.fromkeys(workloads or ("cifar-cnn", "mnist-cnn", "linear"))]
    here, said = device_here(device or "auto")
    for sentence in said:
        _say(sentence)
    loads = [replace(load, device=here) for load in loads]
    file, drawing = json_file or out / f"{_NAME}.json", picture or out / f"{_NAME}.png"
    writable(file)
    drawn = _drawable(drawing, picture is not None)
    rows = _measured(loads, plan, file, command)
    _print(rows)
    print(f"results: {file}")
    if drawn:
        draw(rows, drawing)
        print(f"picture: {drawing}")
    return rows


def ended(rows: Sequence[ComparisonRow]) -> None:
    """Exits with 1 where an engine of fedlens did not run."""
    if any(row.kind == "fedlens" and row.reason is not None for row in rows):
        raise typer.Exit(1)


def _drawable(file: Path, required: bool) -> bool:
    """Whether the picture can be drawn; without matplotlib that is an error only if the user asked for one."""
    from fedlens.base.errors import ConfigError
    from fedlens.benchmark.picture import check
    from fedlens.benchmark.results_file import writable

    writable(file)
    try:
        check(file)
    except ConfigError as error:
        if required:
            raise
        _say(f"no picture: {error}")
        return False
    return True


def _measured(
    loads: Sequence[Workload], plan: BenchmarkPlan, file: Path, command: Sequence[str]
) -> list[ComparisonRow]:
    """The rows of all workloads. The file is written after each workload, in case a later one is interrupted."""
    from fedlens.base.errors import FedlensError
    from fedlens.benchmark.results_file import as_record, write
    from fedlens.benchmark.speed import measure

    rows: list[ComparisonRow] = []
    for load in loads:
        rows += measure(load, plan, _say)
        try:
            write(as_record(rows, loads, [*command, *sys.argv[1:]]), file)
        except FedlensError:
            _print(rows)  # else the measurements would be lost
            raise
    return rows


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _print(rows: Sequence[ComparisonRow]) -> None:
    """Prints the table, without columns that are empty."""
    table = [_cells(row) for row in rows]
    head = [name for name in _COLUMNS if any(cells.get(name) for cells in table)]
    numeric = [] if any(row.reason for row in rows) else [head.index("images/s")]
    print_columns([[cells.get(name, "") for name in head] for cells in table], head, numeric)
    turns = {row.workload: len(row.seconds) for row in rows if row.seconds}
    counts = ", ".join(f"{count} of {name}" for name, count in turns.items())
    few = " (of fewer than six pairs, their range)" if min(turns.values(), default=6) < 6 else ""
    print(f"medians of pairs taken in turn, with 95 % intervals{few}; pairs: {counts}")
    print("the first round fills caches and is not among the pairs")


def _cells(row: ComparisonRow) -> dict[str, str]:
    """The cells of a row, by column."""
    about = row.about
    ways = [f"{about['processes']} x {about['threads']}"] if "processes" in about else []
    ways += [about["layout"]] if row.kind == "limit" and "layout" in about else []
    cells = {"workload": row.workload, "what": row.name, "processes x threads": ", ".join(ways)}
    if row.reason is not None:
        return {**cells, "images/s": f"did not run: {row.reason}"}
    too_much = "" if row.within_target or row.kind == "peer" else ", too much"
    overhead = None if row.kind == "by hand" else row.overhead_ms
    return {
        **cells,
        "images/s": f"{row.images_per_s:,.0f}",
        "to the limit": str(row.to_limit or ""),
        "overhead a client": "" if overhead is None else f"{overhead:.2f} ms{too_much}",
        "first round": "" if row.first_round is None else f"{row.first_round * 1e3:,.1f} ms",
        "to bmm": str(row.to_by_hand or ""),
        "fedlens is": f"{row.fedlens_to_it} x as fast" if row.fedlens_to_it else "",
    }
