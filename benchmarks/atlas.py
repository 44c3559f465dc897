"""Runs the studies that have no record, one after the other in the background, and records each.

    python -m benchmarks.atlas                      # until it is stopped, or all studies are recorded
    python -m benchmarks.atlas --hours 2            # for two hours
    python -m benchmarks.atlas --only ghaemi2022/algorithms --scale paper
    python -m benchmarks.atlas --list               # what is recorded, what is next, and what is skipped

It takes the scale `minutes` before `laptop`, the papers in turn, and of each its cheapest study. `paper` runs only
where it is asked for. The runs are those of `fedlens reproduce`: one at a time, with one thread, at nice 19, on the
last core. They stand in `atlas/PAPER/NAME/SCALE` until the study is complete; `benchmarks/atlas_record.py` says what is
recorded then. After each record it writes the pages that show records. Finished runs of a long study are kept in
`docs/atlas` at once, so that another machine trains only the others (`benchmarks/atlas_unfinished.py`).

Stop it at any time with `kill PID`: the running run saves its last round, and the next call continues it. A study with
a run that fails is written to `atlas/failed.jsonl`, and is tried again when its file changes, or with --only. A run
that diverges is a result.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import torch
import typer

from benchmarks.atlas_record import Cost, record_folder, stale_because, write_record
from benchmarks.atlas_unfinished import SPENT, KeepingProgress, KeptRuns
from fedlens.base.errors import FedlensError, RunFailed
from fedlens.base.format import count, duration, many
from fedlens.cli.display.output import console, print_columns, reported, say
from fedlens.cli.display.runs_display import RunsDisplay
from fedlens.cli.signals import stopped_by_signals
from fedlens.files import jsonl
from fedlens.files.atomic_files import write_atomically
from fedlens.files.lock import locked
from fedlens.results.rows import Results, Row
from fedlens.studies.carry_out import StudyStopped
from fedlens.studies.progress import StudyProgress
from fedlens.studies.reproduce import RECORD, SCALES, StudyCost, StudyRecord, absent_data, costs, records
from fedlens.studies.reproductions import FOLDER, reproduction, reproductions
from fedlens.studies.study import Study
from fedlens.studies.study_plan import StudyPlan
from fedlens.studies.tuning import DIVERGED

ROOT = Path(__file__).resolve().parents[1]
USUAL = ("minutes", "laptop")
FAILED = "failed.jsonl"
_NOT_FINITE = ("NaN or Inf", "not finite", DIVERGED)  # in the reason of a run that diverged


@dataclass(frozen=True)
class Next:
    """A study at a scale that is to be recorded."""

    name: str
    scale: str
    cost: StudyCost

    @property
    def paper(self) -> str:
        """The paper that it belongs to."""
        return self.name.partition("/")[0]

    @property
    def images(self) -> int:
        """Trained on, also before the runs."""
        return self.cost.images + self.cost.pretraining_images

    @property
    def words(self) -> str:
        """The cost in words."""
        if not self.cost.runs:
            return "nothing is trained"
        return f"{many(self.cost.runs, 'run')}, {count(self.images)} images"


@dataclass(frozen=True)
class Atlas:
    """The places of the queue: the checkout with docs/atlas, record.toml, and the folder of unfinished studies.

    Attributes:
        write_pages: called after each change of docs/atlas.
    """

    root: Path = ROOT
    toml: Path = FOLDER / RECORD
    scratch: Path = Path("atlas")
    write_pages: Callable[[], None] = lambda: None

    def stale(self, name: str, record: StudyRecord) -> str:
        """What changed since the record was made; "" for nothing."""
        return stale_because(self.root / record.folder, plan_of(name, record.scale))

    @cached_property
    def recorded(self) -> Mapping[tuple[str, str], str]:
        """What changed since, by study and scale of each record."""
        return {
            (name, one.scale): self.stale(name, one)
            for name, found in records(self.toml).items()
            for one in found
        }

    def failed(self) -> dict[tuple[str, str], str]:
        """The reasons of the studies that failed, whose files are the same as then."""
        return {
            (row["name"], row["scale"]): row["reason"]
            for row in jsonl.stream(self.scratch / FAILED)
            if row["name"] in reproductions() and row["file"] == _sha256(reproduction(row["name"]))
        }


def plan_of(name: str, scale: str) -> StudyPlan:
    """The plan of a study."""
    return StudyPlan.load(reproduction(name), scale, check=False)


def write_pages() -> None:
    """Writes the pages that show records, in another process, since their module imports this one."""
    module = "tools.atlas_page"
    done = subprocess.run(
        [sys.executable, "-m", module, "--pages"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        say(f"the pages are as before; run: python -m {module}", done.stderr[-2000:])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def queue(
    atlas: Atlas, only: str | None = None, scale: str | None = None
) -> tuple[list[Next], dict[tuple[str, str], str]]:
    """The studies to record, in order, and by study and scale why others are skipped.

    Args:
        only: a study, or a paper; what failed before is tried again.
        scale: a scale; by default `minutes`, then `laptop`.
    """
    names = [name for name in reproductions() if only in (None, name, name.partition("/")[0])]
    if not names and only is not None:
        reproduction(only)  # raises, with the nearest name
    failed = {} if only else atlas.failed()
    wanted, skipped = list[Next](), dict[tuple[str, str], str]()
    for name in names:
        for each in [scale] if scale else USUAL:
            cost = costs()[name].get(each)
            if cost is None or atlas.recorded.get((name, each)) == "":
                continue
            if not cost.runs and not scale and _other(atlas, name, each):
                continue
            if absent := absent_data(cost.datasets, None):
                skipped[name, each] = f"missing data: {', '.join(absent)}"
            elif (name, each) in failed:
                skipped[name, each] = f"failed: {failed[name, each]}"
            else:
                wanted.append(Next(name, each, cost))
    return in_turn(wanted, Counter(name.partition("/")[0] for name, _ in atlas.recorded)), skipped


def _other(atlas: Atlas, name: str, scale: str) -> bool:
    """Whether another scale of a study that trains nothing is recorded, or is before this one: it shows the same."""
    scales = [each for each in USUAL if each in costs()[name]]
    return any(atlas.recorded.get((name, each)) == "" for each in scales) or scale != scales[0]


def in_turn(wanted: Sequence[Next], recorded: Mapping[str, int]) -> list[Next]:
    """The studies by scale; in a scale the paper with the fewest records is next, with its cheapest study.

    >>> images = {"b/x": 10, "a/y": 90, "b/z": 1, "a/w": 20}
    >>> wanted = [Next(name, "minutes", StudyCost(1, number, ())) for name, number in images.items()]
    >>> [each.name for each in in_turn(wanted, {"a": 1})]
    ['b/z', 'a/w', 'b/x', 'a/y']
    """
    number, order = Counter(recorded), list[Next]()
    for scale in SCALES:
        left = sorted(
            (each for each in wanted if each.scale == scale), key=lambda each: (each.images, each.name)
        )
        while left:
            paper = min({each.paper for each in left}, key=lambda name: (number[name], name))
            order.append(next(each for each in left if each.paper == paper))
            left.remove(order[-1])
            number[paper] += 1
    return order


def work(
    atlas: Atlas,
    only: str | None = None,
    scale: str | None = None,
    *,
    jobs: int = 1,
    progress: StudyProgress | None = None,
) -> int:
    """Records one study after the other; returns the number of those that failed.

    Args:
        jobs: 1 for a worker process, 0 for this process; the results are the same.

    Raises `RunDirectoryError` if another queue works in the same folder, and passes `KeyboardInterrupt` after the
    running run is saved.
    """
    atlas.scratch.mkdir(parents=True, exist_ok=True)
    with locked(atlas.scratch / ".lock", "the queue of the atlas"):
        say(f"stop it with: kill {os.getpid()}")
        order, skipped = queue(atlas, only, scale)
        failures = 0
        if skipped:
            say(f"{many(len(skipped), 'study', 'studies')} skipped; --list says why")
        for each in order:
            say(f"{each.name} at scale {each.scale}: {each.words}")
            try:
                record = carry_out(atlas, each, jobs, progress)
            except StudyStopped:
                raise  # such as a full disk, which stops the others too
            except FedlensError as error:
                failures += 1
                row = {
                    "name": each.name,
                    "scale": each.scale,
                    "date": datetime.now(UTC).isoformat("T", "seconds"),
                }
                row |= {"file": _sha256(reproduction(each.name)), "reason": str(error)}
                jsonl.append(atlas.scratch / FAILED, [row])
                say(f"{each.name} at scale {each.scale} failed: {error}")
            else:
                atlas.write_pages()
                say(f"recorded in {record.folder}: {record.outcome}")
        return failures


def carry_out(atlas: Atlas, each: Next, jobs: int, progress: StudyProgress | None) -> StudyRecord:
    """Runs what is left of a study, and records it. Raises `RunFailed` if a run failed without diverging."""
    folder = atlas.scratch / each.name / each.scale
    study = Study.load(reproduction(each.name), each.scale)
    folder.mkdir(parents=True, exist_ok=True)
    kept = KeptRuns(record_folder(atlas.root, each.name, each.scale), folder, study.plan())
    kept.restore()

    def keep() -> None:
        say(kept.keep())
        atlas.write_pages()

    display = KeepingProgress(progress or RunsDisplay(console()), keep)
    with measured(folder / SPENT, atlas.root):
        study.run(folder, jobs=jobs, progress=display, report=False, accept_changes=True)
    kept.complete()
    results = Results.read(folder)
    planned = dict.fromkeys(entry.digest for entry in (*results.info.pretrained, *results.info.entries))
    lines = [results.lines[digest] for digest in planned]
    if failed := [line for line in lines if line.status == "failed" and not diverged(line)]:
        first = f"{failed[0].run}: {failed[0].reason}"
        raise RunFailed(f"{len(failed)} of {many(len(lines), 'run')} failed; the first is {first}")
    spent = Cost(**json.loads((folder / SPENT).read_bytes()))
    seconds, cores = (sum(line.facts.get(key) or 0.0 for line in lines) for key in ("seconds", "cpu_seconds"))
    cost = replace(
        spent,
        seconds=max(spent.seconds, seconds),  # a queue that was killed could not write what it spent
        cpu_seconds=spent.cpu_seconds + (cores if jobs else 0.0),
    )
    return write_record(folder, atlas.root, atlas.toml, each.name, study.plan(), cost)


def diverged(line: Row) -> bool:
    """Whether a run failed because its numbers are not finite any more, which is a result of its method."""
    return any(words in (line.reason or "") for words in _NOT_FINITE)


@contextmanager
def measured(path: Path, root: Path) -> Iterator[None]:
    """Adds the time of the block, and the commit that it ran at, to a file, however the block ends."""
    before = Cost(**json.loads(path.read_bytes())) if path.is_file() else Cost()
    clock, core = time.monotonic(), _own_seconds()
    commits = [*dict.fromkeys(filter(None, [*before.commits, revision(root)]))]

    def write() -> None:
        seconds = round(before.seconds + time.monotonic() - clock, 3)
        spent = Cost(seconds, round(before.cpu_seconds + _own_seconds() - core, 3), commits)
        write_atomically(path, json.dumps(asdict(spent)).encode())

    write()  # so that the commit is kept with the first finished runs
    try:
        yield
    finally:
        write()


def _own_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def revision(root: Path) -> str:
    """The commit of a checkout, with "+" after it if its sources are edited; "" if there is none."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)

    try:
        commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        edited = git("diff", "--quiet", "HEAD", "--", "src", f":!src/**/{RECORD}").returncode == 1
    except OSError:
        return ""
    return f"{commit}+" if commit and edited else commit


def show(atlas: Atlas, only: str | None, scale: str | None) -> None:
    """Prints what is recorded, what is next, and what is skipped."""
    rows = [
        (
            name,
            one.scale,
            one.date,
            duration(3600 * one.cpu_hours),
            atlas.recorded[name, one.scale] or one.outcome,
        )
        for name, found in records(atlas.toml).items()
        for one in found
    ]
    stale = {key for key, words in atlas.recorded.items() if words}
    rows = [(*row[:4], f"stale: {row[4]}" if row[:2] in stale else row[4]) for row in rows]
    say(f"{many(len(rows), 'record')}, {len(stale)} stale")
    print_columns(rows, ("study", "scale", "date", "core time", "outcome") if rows else ())
    order, skipped = queue(atlas, only, scale)
    say("", f"{many(len(order), 'study', 'studies')} next")
    print_columns([(each.name, each.scale, each.words) for each in order])
    if skipped:
        say("", f"{many(len(skipped), 'study', 'studies')} skipped")
        print_columns([(*key, why) for key, why in skipped.items()])


def pin_to_one_core() -> None:
    """Leaves all cores but the last to others, for this process and its workers; Linux alone can."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextmanager
def at_most(hours: float | None) -> Iterator[None]:
    """Stops this process after some hours, as `kill` would."""
    if hours is None:
        yield
        return
    timer = threading.Timer(3600 * hours, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, and lists or works."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.atlas", description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, help="stop after so many hours")
    parser.add_argument("--only", metavar="STUDY", help="a study such as hsu2019/fig5, or a paper")
    parser.add_argument("--scale", choices=SCALES, help="by default minutes, then laptop")
    parser.add_argument("--out", type=Path, default=Path("atlas"), help="the folder of unfinished studies")
    parser.add_argument("--list", action="store_true", help="list records and studies, and run nothing")
    options = parser.parse_args(arguments)
    atlas = Atlas(scratch=options.out, write_pages=write_pages)
    failures = 0
    try:
        with reported(debug=False), stopped_by_signals():
            if options.list:
                show(atlas, options.only, options.scale)
                return 0
            os.nice(19)
            pin_to_one_core()
            torch.set_num_threads(1)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)  # into a file too
            try:
                with at_most(options.hours):
                    failures = work(atlas, options.only, options.scale)
            except KeyboardInterrupt:
                say("stopped; the same command continues")
    except typer.Exit as error:
        return error.exit_code
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
