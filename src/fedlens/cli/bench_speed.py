"""`fedlens bench speed`: the engines of fedlens beside bare PyTorch and, on request, beside other libraries."""

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
Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Measure other libraries too, each in an environment of its own (several gigabytes).",
    ),
]
PeerNames = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="NAME", help="Measure only this library; may be repeated."),
]
PeersDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the environments of other libraries; default $XDG_CACHE_HOME/fedlens/peers, else "
        "~/.cache/fedlens/peers.",
    ),
]
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
    peers: Peers = False,
    peer_names: PeerNames = None,
    peers_dir: PeersDir = None,
    out: Out = Path(),
    json_file: JsonFile = None,
    picture: Picture = None,
    debug: Debug = False,
) -> None:
    """Train the same rounds with bare PyTorch and with fedlens in turn, and compare them with the goals.

    Each ratio is the median over pairs of turns, with a 95 % interval. Close other programs first.
    """
    with reported(debug):
        from fedlens.base.errors import ConfigError
        from fedlens.benchmark.picture import draw
        from fedlens.benchmark.results_file import writable
        from fedlens.benchmark.speed import workload
        from fedlens.use.device_here import device_here

        names = dict.fromkeys(workloads or ("cifar-cnn", "mnist-cnn", "linear"))
        loads = [workload(name) for name in names]
        beside = bool(peers or peer_names)  # of other libraries, which are measured on the processor
        here, said = device_here("cpu" if beside and device == "auto" else device or "auto")
        if beside and here != "cpu":
            hint = "take --device cpu, or leave out --peers"
            raise ConfigError("other libraries are measured on the processor", where="--device", hint=hint)
        for sentence in said:
            _say(sentence)
        loads = [replace(load, device=here) for load in loads]
        plan = _plan(engines, peers, peer_names, peers_dir, pairs, seconds)
        file, drawing = json_file or out / f"{_NAME}.json", picture or out / f"{_NAME}.png"
        writable(file)
        drawn = _drawable(drawing, picture is not None)
        rows = _measured(loads, plan, file)
        _print(rows)
        print(f"results: {file}")
        if drawn:
            draw(rows, drawing)
            print(f"picture: {drawing}")
        if any(row.kind == "fedlens" and row.reason is not None for row in rows):
            raise typer.Exit(1)


def _plan(
    engines: str,
    peers: bool,
    peer_names: Sequence[str] | None,
    peers_dir: Path | None,
    pairs: int,
    seconds: float | None,
) -> BenchmarkPlan:
    """What the options ask for. Raises `ConfigError` where nothing is to be measured, or an option has no effect."""
    from fedlens.base.errors import ConfigError
    from fedlens.benchmark import peer
    from fedlens.benchmark.arrangements import engine_table
    from fedlens.benchmark.speed import BenchmarkPlan

    tables = [engine_table(text.strip()) for text in engines.split(",") if text.strip()]
    if not tables:
        raise ConfigError("no engine to measure", where="--engines", hint="name one, such as inline")
    chosen = peer.chosen(peer_names) if peers or peer_names else []
    if peers_dir is not None and not chosen:
        raise ConfigError(
            "no other library is measured", where="--peers-dir", hint="add --peers or --peer NAME"
        )
    return BenchmarkPlan(tables, chosen, peers_dir or peer.usual_directory(), pairs, seconds)


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


def _measured(loads: Sequence[Workload], plan: BenchmarkPlan, file: Path) -> list[ComparisonRow]:
    """The rows of all workloads. The file is written after each workload, in case a later one is interrupted."""
    from fedlens.base.errors import FedlensError
    from fedlens.benchmark.results_file import as_record, write
    from fedlens.benchmark.speed import measure

    rows: list[ComparisonRow] = []
    for load in loads:
        rows += measure(load, plan, _say)
        try:
            write(as_record(rows, loads, ["fedlens", *sys.argv[1:]]), file)
        except FedlensError:
            _print(rows)  # else the measurements would be lost
            raise
    return rows


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _print(rows: Sequence[ComparisonRow]) -> None:
    """Prints the table, without columns that are empty, and the goals."""
    from fedlens.benchmark.goals import goals_of

    table = [_cells(row) for row in rows]
    head = [name for name in _COLUMNS if any(cells.get(name) for cells in table)]
    numeric = [] if any(row.reason for row in rows) else [head.index("images/s")]
    print_columns([[cells.get(name, "") for name in head] for cells in table], head, numeric)
    turns = {row.workload: len(row.seconds) for row in rows if row.seconds}
    counts = ", ".join(f"{count} of {name}" for name, count in turns.items())
    few = " (of fewer than six pairs, their range)" if min(turns.values(), default=6) < 6 else ""
    print(f"medians of pairs taken in turn, with 95 % intervals{few}; pairs: {counts}")
    print("the first round fills caches and is not among the pairs")
    goals = [
        (goal.workload, f"{goal.engine} to {goal.reference}", f"{goal.least:g}", str(goal.measured), goal.met)
        for goal in goals_of(rows)
    ]
    if goals:
        print()
        print_columns(goals, ("workload", "goal", "at least", "measured", "met"), numeric=(2,))


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
