"""Makes the record of a study: the files in docs/atlas/PAPER/NAME/SCALE, and the entry in record.toml.

    python -m benchmarks.atlas_record      # the size of each record, and of all

    study.json, study.toml      the plan as the study file has it now, and a copy of that file
    results.jsonl, data.json    the runs, and the clients' data and costs of models where the study shows them
    environment.json            versions and hardware, without names of the machine
    cost.json                   seconds of the clock and of one core, and what was left out of the curves
    *.svg                       the figures of the study

The first five kinds take at most 200 kB a record, pictures 300 kB, and all records 10 MB. A record that is larger
loses evaluations of its curves, step by step (`STEPS`), as long as every table stays the same to the last digit.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import socket
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedlens.base.errors import DataError, FedlensError
from fedlens.base.format import count, many, size
from fedlens.files.atomic_files import write_atomically
from fedlens.results.cells import better
from fedlens.results.claims import ClaimVerdict, claim_verdicts
from fedlens.results.data_json import read_costs, read_populations
from fedlens.results.data_tables import population_facts
from fedlens.results.figures.picture import draw_chart
from fedlens.results.figures.study_figures import study_figures
from fedlens.results.rows import (
    DATA,
    INFO,
    LINES,
    Results,
    Row,
    read_data,
    write_data,
    write_info,
    write_lines,
)
from fedlens.results.stated import stated_values
from fedlens.results.study_table import TableView
from fedlens.results.tables import study_tables
from fedlens.results.words import case_name, metric_name, seeds_text, shown_in_percent, unit
from fedlens.run.environment import machine
from fedlens.studies.changed_study import changed_study
from fedlens.studies.reproduce import SCALES, StudyRecord
from fedlens.studies.reproductions import COPY
from fedlens.studies.study_data import make_data
from fedlens.studies.study_plan import StudyPlan

ENVIRONMENT, COST = "environment.json", "cost.json"
FILES = (INFO, COPY, LINES, DATA, ENVIRONMENT, COST)
MOST, MOST_PICTURES, MOST_IN_ALL = 200_000, 300_000, 10_000_000  # bytes
NUMBERS = 16  # of a record in record.toml
NUMBERED = {"shows": "shown", "does not show": "not shown", "cannot tell": "undecided"}
VERDICTS = tuple(NUMBERED)  # of claims that the runs can be compared with
_FREE = ("elapsed", "bytes_client_up")  # columns that a table shows rarely
_PATH = re.compile(r"(?<![\w.<:/~)-])/[A-Za-z][\w.+-]*(?:/[\w.+-]+)+")


class RecordRefused(FedlensError):
    """A record that is too large, or names the machine."""


@dataclass(frozen=True)
class Cost:
    """What a study took: seconds of the clock and of one core, and the commits that it ran at."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    commits: Sequence[str] = field(default_factory=tuple)


Step = Callable[[Row, bool, int], Row]  # of a line, whether its run is one of tuning, and `last`


def _evaluations(line: Row, kept: Sequence[int], without: Sequence[str] = ()) -> Row:
    """The run with some evaluations of its curve, by index, and without some columns."""
    columns = {name: values for name, values in line.curve.items() if name not in without}
    return replace(line, curve={name: [values[k] for k in kept] for name, values in columns.items()})


def _spaced(most: int) -> Step:
    def step(line: Row, tuning: bool, last: int) -> Row:
        number = len(line.curve.get("round", ()))
        if number <= most:
            return line
        even = {round(k * (number - 1) / (most - 1)) for k in range(most)}
        return _evaluations(line, sorted(even | set(range(number - last, number))))

    return step


def _all_of(line: Row) -> range:
    return range(len(line.curve.get("round", ())))


STEPS: Sequence[tuple[str, Step]] = (
    (
        "curves have no time and no bytes that a client sends",
        lambda line, tuning, last: _evaluations(line, _all_of(line), _FREE),
    ),
    (
        "curves of tuning runs are their last evaluations alone",
        lambda line, tuning, last: _evaluations(line, _all_of(line)[-last:]) if tuning else line,
    ),
    *(
        (f"curves are {n} evaluations at equal distances and the last ones", _spaced(n))
        for n in (100, 50, 25, 12)
    ),
)


def thinned(results: Results, room: int) -> tuple[Results, str]:
    """The results with lines of at most `room` bytes, and a sentence on what they lost; "" for nothing.

    Raises `RecordRefused` if they are larger after all steps that leave every table as it is.
    """
    tuning = {entry.digest for entry in results.info.entries if entry.role == "tune"}
    tuning -= {entry.digest for entry in results.info.entries if entry.role != "tune"}
    whole, lost = _tables(results), dict[int, str]()
    for k, (words, step) in enumerate(STEPS):
        if _bytes(results) <= room:
            break
        lines = {
            digest: step(line, digest in tuning, results.info.last) for digest, line in results.lines.items()
        }
        tried = replace(results, lines=lines)
        if _tables(tried) == whole and _bytes(tried) < _bytes(results):
            results, lost[min(k, 2)] = tried, words
    if _bytes(results) > room:
        raise RecordRefused(
            f"the lines of the runs take {size(_bytes(results))} (must be at most {size(room)})",
            hint="evaluate less often: evaluation.every of the scale",
        )
    return results, "; ".join(lost.values())


def _tables(results: Results) -> list[str]:
    return [table.to_csv() for table in study_tables(results)]


def _bytes(results: Results) -> int:
    return sum(len(json.dumps(line.line, separators=(",", ":"))) + 1 for line in results.lines.values())


def environment(commits: Sequence[str]) -> dict[str, Any]:
    """The content of environment.json: versions and hardware of this machine, without its name and paths."""
    kept = ("fedlens", "python", "torch", "cuda", "libraries", "cpu", "memory", "gpus", "driver")
    here = machine()
    return {**{key: here[key] for key in kept}, "os": platform.system(), "commits": list(commits)}


def refuse_machine(text: str, where: str) -> None:
    """Raises `RecordRefused` if a text has an absolute path, or the name of this machine."""
    host = socket.gethostname()
    named = re.search(rf"\b{re.escape(host)}\b", text) if host != "localhost" else None
    if found := _PATH.search(text) or named:
        raise RecordRefused(f"a record names this machine: {found[0]!r}", where=where)


def headline(results: Results) -> tuple[str, list[dict[str, str]]]:
    """The metric of a record, and its first numbers with the paper's beside; those with one come first."""
    info, view = results.info, TableView(results, "record")
    if not info.entries:
        return _numbers_of_data(results)
    rows = []
    for cell in view.cells:
        label = view.document_label(cell.method)
        paper = view.stated_text(cell.method, cell.case)
        rows.append(
            {
                "of": ", ".join(filter(None, [view.label(cell.method), case_name(info, cell.case)])),
                "here": view.mean([*cell.values.values()]) if cell.complete else view.status(cell),
                "paper": f"{paper} ({label})" if paper and label else paper,
            }
        )
    return f"{metric_name(results.metric)}{unit(results.metric)}", _first(rows)


def _first(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    chosen = sorted(range(len(rows)), key=lambda k: (not rows[k]["paper"], k))[:NUMBERS]
    return [rows[k] for k in sorted(chosen)]


def _numbers_of_data(results: Results) -> tuple[str, list[dict[str, str]]]:
    """The numbers of a study that trains nothing: distances of clients, or parameters of models."""
    info, rows = results.info, list[dict[str, str]]()
    populations = read_populations(results.data.get("populations", ()))
    for one in populations:
        of = ", ".join(filter(None, [case_name(info, one.case) or one.dataset, one.method]))
        rows.append({"of": of, "here": f"{population_facts(one)['emd']:.3g}", "paper": ""})
    if rows:
        return "Mean EMD of the clients", _first(rows)
    values = stated_values(info.document, "parameters")
    for cost in read_costs(results.data.get("costs", ())):
        found = (v for v in values if v.method == cost.method and v.holds_for(cost.case))
        paper = next((f"{v.text.removesuffix(f'{v.number:g}')}{count(v.number)}" for v in found), "")
        of = ", ".join(filter(None, [info.methods.get(cost.method, cost.method), case_name(info, cost.case)]))
        rows.append({"of": of, "here": count(cost.parameters), "paper": paper})
    return "Parameters", _first(rows)


def outcome(results: Results) -> str:
    """A sentence on the results of a study, and one on the claims of its paper, computed."""
    info, view = results.info, TableView(results, "record")
    if not info.entries:
        metric, rows = _numbers_of_data(results)
        values = [float(row["here"].replace(",", "")) for row in rows]
        low, high = rows[values.index(min(values))], rows[values.index(max(values))]
        ends = " to ".join(f"{row['here']} ({row['of']})" for row in (low, high))
        return f"Nothing is trained: {metric[0].lower()}{metric[1:]} from {ends}."
    lost = sum(bool(cell.failed) for cell in view.cells)
    without = f"; {many(lost, 'cell')} without a value, because runs diverged" if lost else ""
    known = [(cell, mean.mean) for cell in view.cells if (mean := cell.interval) is not None]
    if not known:
        return f"No cell has a value of {metric_name(results.metric).lower()}{without}."
    known.sort(key=lambda pair: better(results.metric, pair[1]))

    def words(k: int) -> str:
        cell, mean = known[k]
        of = ", ".join(filter(None, [view.label(cell.method), case_name(info, cell.case)]))
        return f"{view.value(mean)}{' %' if shown_in_percent(results.metric) else ''} ({of})"

    between = f" from {words(0)} to {words(-1)}" if len(known) > 1 else f" {words(0)}"
    answers = Counter(one.answer for one in _known(results))
    told = [f"{answers[answer]} {NUMBERED[answer]}" for answer in VERDICTS if answers[answer]]
    claims = f" Claims: {', '.join(told)}." if told else ""
    return f"{metric_name(results.metric)}{between}, {seeds_text(info.seeds)}{without}.{claims}"


def stale_because(folder: Path, plan: StudyPlan) -> str:
    """What changed in a study since its record in `folder` was made; "" for nothing that changes results."""
    if not (folder / INFO).is_file():
        return "its files are missing."
    lines = Results.read(folder).lines
    change = changed_study(folder, plan)
    if change or plan.due(lines):
        return (
            " ".join(f"{sentence.rstrip('.')}." for sentence in change.sentences()) or "it has further runs."
        )
    try:
        current(folder, plan)
    except RecordRefused as missing:
        return f"it needs data that the record does not have: {missing.what}."
    return ""


def current(folder: Path, plan: StudyPlan) -> Results:
    """The results of a record with the titles, labels and claims that the study has now.

    Raises `RecordRefused` if the clients' data, or the costs of models, are others.
    """
    results = Results.read(folder)

    def refuse(sentence: str) -> None:
        raise RecordRefused(sentence)

    with tempfile.TemporaryDirectory() as copy:
        if results.data:
            write_data(Path(copy), results.data)
        make_data(plan, Path(copy), say=refuse)
        return replace(results, info=plan.info(results.lines), data=read_data(Path(copy)))


def record_of(results: Results, folder: Path, name: str) -> StudyRecord:
    """The entry of record.toml of results whose other files are in `folder`."""
    cost = json.loads((folder / COST).read_bytes())
    made_in = json.loads((folder / ENVIRONMENT).read_bytes())
    metric, numbers = headline(results)
    versions = sorted({line.version for line in results.lines.values() if line.version})
    return StudyRecord(
        scale=results.info.scale,
        version=", ".join(versions) or made_in["fedlens"],
        cpu_hours=round(cost["cpu_seconds"] / 3600, 4),
        outcome=outcome(results),
        commit=made_in["commits"][-1] if made_in["commits"] else "",
        date=cost["date"],
        hours=round(cost["seconds"] / 3600, 4),
        folder=record_folder(Path(), name, results.info.scale).as_posix(),
        metric=metric,
        numbers=numbers,
        verdicts=[{"claim": one.text, "where": one.where, "verdict": one.answer} for one in _known(results)],
    )


def _known(results: Results) -> list[ClaimVerdict]:
    """The verdicts on the claims that the runs of the results can be compared with."""
    return [one for one in claim_verdicts(results) if one.answer in VERDICTS]


def record_folder(root: Path, name: str, scale: str) -> Path:
    """The folder of a record in the checkout `root`."""
    return root / "docs" / "atlas" / name / scale


def write_record(source: Path, root: Path, toml: Path, name: str, plan: StudyPlan, cost: Cost) -> StudyRecord:
    """Writes the record of the complete study in `source` into the checkout `root`, all of it or nothing.

    Raises `RecordRefused` if it is too large, or names the machine.
    """
    target = record_folder(root, name, plan.scale)
    part = target.with_name(f".{plan.scale}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        lost = _write_files(source, part, plan)
        now = datetime.now(UTC).strftime("%Y-%m-%d")
        rounded = {"seconds": round(cost.seconds, 1), "cpu_seconds": round(cost.cpu_seconds, 1), "date": now}
        runs = len(Results.read(part).lines)
        _write_json(part / COST, {**rounded, "runs": runs, "left_out": lost})
        _write_json(part / ENVIRONMENT, environment(cost.commits))
        refuse_large(part, root, target)
        for path in part.iterdir():
            refuse_machine(path.read_text(encoding="utf-8"), f"{name} at {plan.scale}, {path.name}")
        draw(part)
        refuse_large(part, root, target)
        record = record_of(Results.read(part), part, name)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    write_entry(toml, name, record)
    return record


def _write_files(source: Path, part: Path, plan: StudyPlan) -> str:
    """Writes the files of results into `part`; returns what their curves lost."""
    info = plan.info(Results.read(source).lines)
    results = replace(Results.read(source), info=info)
    planned = dict.fromkeys(entry.digest for entry in (*info.pretrained, *info.entries))
    results = replace(results, lines={d: results.lines[d] for d in planned if d in results.lines})
    write_info(part, info)
    (part / COPY).write_bytes((source / COPY).read_bytes())
    if results.data:
        write_data(part, results.data)
    room = (
        MOST - 10_000 - sum(path.stat().st_size for path in part.iterdir())
    )  # of the environment and the cost
    results, lost = thinned(results, max(0, room))
    if due := plan.due(results.lines):
        raise DataError(f"the study is not complete: {many(len(due), 'run')} due", where=str(source))
    write_lines(part / LINES, results.lines.values())
    return lost


def draw(folder: Path) -> None:
    """Draws the figures of a record anew, as many as fit."""
    for path in folder.glob("*.svg"):
        path.unlink()
    taken = 0
    for figure in study_figures(Results.read(folder)):
        if figure.figure is not None:
            path = draw_chart(figure.figure, folder / f"{figure.name}.svg")
            taken += path.stat().st_size
            if taken > MOST_PICTURES:
                taken -= path.stat().st_size
                path.unlink()


def refuse_large(folder: Path, root: Path, replaced: Path) -> None:
    """Raises `RecordRefused` if the record in `folder` is too large, or all records with it."""
    own = {path: path.stat().st_size for path in folder.iterdir()}
    files = sum(taken for path, taken in own.items() if path.suffix != ".svg")
    if files > MOST:
        parts = ", ".join(f"{path.name} {size(taken)}" for path, taken in own.items() if taken > MOST // 10)
        raise RecordRefused(f"the record takes {size(files)} (must be at most {size(MOST)}): {parts}")
    others = (
        path.stat().st_size
        for path in (root / "docs" / "atlas").rglob("*")
        if path.is_file() and not path.is_relative_to(folder) and not path.is_relative_to(replaced)
    )
    if (total := sum(others) + sum(own.values())) > MOST_IN_ALL:
        raise RecordRefused(f"all records take {size(total)} (must be at most {size(MOST_IN_ALL)})")


def write_entry(toml: Path, name: str, record: StudyRecord) -> None:
    """Writes the entry of a record in place of that of the same study and scale; the rest of record.toml stays."""
    text = toml.read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    tables: dict[str, list[dict[str, Any]]] = tomllib.loads(text)
    defaults = {one.name: one.default for one in fields(StudyRecord)}
    entry = {key: value for key, value in asdict(record).items() if value != defaults[key] and value != []}
    others = [other for other in tables.get(name, []) if other["scale"] != record.scale]
    tables[name] = sorted([*others, entry], key=lambda one: SCALES.index(one["scale"]))
    written = "\n".join(tomli_w.dumps({key: tables[key]}) for key in sorted(tables))
    write_atomically(toml, f"{head}\n{written}".encode())


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Prints the size of each record, and of all together."""
    home = Path(__file__).resolve().parents[1] / "docs" / "atlas"
    taken = Counter[str]()
    for path in sorted(home.rglob("*")):
        if path.is_file():
            taken[path.parent.relative_to(home).as_posix()] += path.stat().st_size
    for name, number in taken.items():
        print(f"{name}: {size(number)}")
    print(f"{many(len(taken), 'record')}: {size(taken.total())} of {size(MOST_IN_ALL)}")


if __name__ == "__main__":
    main()
