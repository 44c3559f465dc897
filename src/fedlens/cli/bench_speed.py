"""`fedlens bench speed`: fedlens's engines beside bare PyTorch and, if asked, beside other libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import print_columns, reported
from fedlens.cli.training import terminated_like_interrupted

if TYPE_CHECKING:
    from fedlens.benchmark.comparison import ComparisonRow
    from fedlens.benchmark.limit import Workload
    from fedlens.benchmark.pairs import Ratio
    from fedlens.benchmark.speed import BenchmarkPlan

_NAME = "fedlens-bench"


def speed(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD", help="cifar-cnn, mnist-cnn, linear; all three if none is named."),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Engines to measure, each with its own settings if needed: processes:workers=2:threads=1. "
            "'default' is fedlens with nothing set about the engine. "
            "Workers and threads that are not set are those that a short trial finds the fastest.",
        ),
    ] = "default,inline,vectorized,processes",
    pairs: Annotated[
        int, typer.Option(min=1, help="Turns of each: a round, or as many as take half a second.")
    ] = 12,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Begin no turn of a workload after so long, counted from its first; one is always taken.",
        ),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Measure other libraries too: each is installed into an environment of its own, gigabytes in all.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME", help="Of the others measure this one; may be repeated."),
    ] = None,
    peers_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the environments of others are; else $XDG_CACHE_HOME/fedlens/peers or ~/.cache/fedlens/peers.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory of the two files.")] = Path(),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help=f"The figures; else {_NAME}.json in --out.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"The picture; else {_NAME}.png in --out.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train the same rounds with bare PyTorch and with fedlens in turn, and compare them with the goals.

    The ratio is the median over pairs of turns, with a 95 % interval. Close what else runs on the machine.
    """
    with reported(debug):
        from fedlens.benchmark import peer
        from fedlens.benchmark.arrangements import engine_table
        from fedlens.benchmark.picture import draw
        from fedlens.benchmark.results_file import writable
        from fedlens.benchmark.speed import BenchmarkPlan, workload

        loads = [workload(name) for name in dict.fromkeys(workloads or ("cifar-cnn", "mnist-cnn", "linear"))]
        tables = [engine_table(text.strip()) for text in engines.split(",") if text.strip()]
        _refuse(tables, peers_dir, peers or bool(only))
        plan = BenchmarkPlan(
            tables,
            peer.chosen(only) if peers or only else [],
            peers_dir or peer.usual_directory(),
            pairs,
            seconds,
        )
        file, drawing = json_file or out / f"{_NAME}.json", picture or out / f"{_NAME}.png"
        writable(file)
        drawn = _drawable(drawing, picture is not None)
        rows = _measured(loads, plan, file)
        _show(rows, plan)
        print(f"figures: {file}")
        if drawn:
            draw(rows, drawing)
            print(f"picture: {drawing}")
        if any(row.kind == "fedlens" and row.reason is not None for row in rows):
            raise typer.Exit(1)


def _measured(loads: Sequence[Workload], plan: BenchmarkPlan, file: Path) -> list[ComparisonRow]:
    """The rows of all workloads; after each, the file has what there is, should a later one be stopped."""
    from fedlens.benchmark.speed import measure
    from fedlens.core.errors import FedlensError

    rows: list[ComparisonRow] = []
    for load in loads:
        with terminated_like_interrupted():
            rows += measure(load, plan, _say)
        try:
            _write(rows, loads, file)
        except FedlensError:
            _show(rows, plan)  # else it would have been for nothing
            raise
    return rows


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _write(rows: Sequence[ComparisonRow], loads: Sequence[Workload], file: Path) -> None:
    from fedlens.benchmark.results_file import as_record, write

    names = {row.workload for row in rows}
    done = [load for load in loads if load.name in names]
    write(as_record(rows, done, ["fedlens", *sys.argv[1:]]), file)


def _refuse(tables: Sequence[object], peers_dir: Path | None, peers: bool) -> None:
    """Raises `ConfigError` where there is nothing to measure, or something is said that nothing asks for."""
    from fedlens.core.errors import ConfigError

    if not tables:
        raise ConfigError("there is no engine to measure", where="--engines", hint="name one, say inline")
    if peers_dir is not None and not peers:
        raise ConfigError(
            "no other library is measured", where="--peers-dir", hint="add --peers, or --peer NAME"
        )


def _drawable(file: Path, wanted: bool) -> bool:
    """Whether the picture can be drawn; without matplotlib that is an error only if the user asked for one."""
    from fedlens.benchmark.picture import check
    from fedlens.benchmark.results_file import writable
    from fedlens.core.errors import ConfigError

    writable(file)
    try:
        check(file)
    except ConfigError as error:
        if wanted:
            raise
        _say(f"no picture: {error}")
        return False
    return True


def _arrangement(row: ComparisonRow) -> str:
    """Processes, threads and memory layout, such as `2 x 1, channels last`."""
    about = row.about
    ways = [f"{about['processes']} x {about['threads']}"] if "processes" in about else []
    return ", ".join([*ways, *([about["layout"]] if row.kind == "limit" and "layout" in about else [])])


def _show(rows: Sequence[ComparisonRow], plan: BenchmarkPlan) -> None:
    by_hand = any(row.to_by_hand for row in rows)
    head = [
        "workload", "what", "processes x threads", "images/s", "to the limit", "overhead a client", "first round",
    ]  # fmt: skip
    head += ["to bmm"] * by_hand + ["fedlens is"] * bool(plan.peers)
    lines = []
    for row in rows:
        line = [row.workload, row.name, _arrangement(row)]
        if row.reason is not None:
            lines.append([*line, f"did not run: {row.reason}", *[""] * (len(head) - 4)])
            continue
        line += [f"{row.images_per_s:,.0f}", _formatted(row.to_limit), _overhead(row)]
        line += [f"{row.first_round * 1e3:,.1f} ms" if row.first_round is not None else ""]
        line += [_formatted(row.to_by_hand)] * by_hand
        ahead = f"{_formatted(row.fedlens_to_it)} x as fast" if row.fedlens_to_it else ""
        lines.append(line + [ahead] * bool(plan.peers))
    print_columns(lines, head, numeric=() if any(row.reason for row in rows) else (3,))
    turns = {row.workload: len(row.seconds) for row in rows if row.seconds}
    counts = ", ".join(f"{count} of {name}" for name, count in turns.items())
    few = " (of fewer than six pairs, their range)" if min(turns.values(), default=6) < 6 else ""
    print(f"medians of pairs taken in turn, with 95 % intervals{few}; pairs: {counts}")
    print("the first round fills caches; it is not among the pairs")
    _show_goals(rows)


def _show_goals(rows: Sequence[ComparisonRow]) -> None:
    from fedlens.benchmark.goals import goals_of

    lines = [
        (goal.workload, f"{goal.engine} to {goal.reference}", f"{goal.least:g}", str(goal.measured), goal.met)
        for goal in goals_of(rows)
    ]
    if lines:
        print()
        print_columns(lines, ("workload", "goal", "at least", "measured", "met"), numeric=(2,))


def _formatted(ratio: Ratio | None) -> str:
    return "" if ratio is None else str(ratio)


def _overhead(row: ComparisonRow) -> str:
    if row.overhead_ms is None or row.kind == "by hand":
        return ""
    return f"{row.overhead_ms:.2f} ms" + ("" if row.within_target or row.kind == "peer" else ", too much")
