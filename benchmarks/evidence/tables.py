"""The tables of docs/evidence.md, as Markdown, from the lines of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from benchmarks.evidence.statistics import (
    Spread,
    at_batches,
    at_edge,
    at_round,
    final,
    rounds_to,
    sign,
    spread,
)
from benchmarks.evidence.store import Line
from benchmarks.evidence.studies import (
    STUDIES,
    TUNING_SEED,
    Method,
    Study,
    chosen,
    final_cells,
    tuning_cells,
)

Store = Mapping[str, Line]
MISSING, DIVERGED, NEVER = "not run", "diverged", "never"
ROUNDS, BATCHES = (50, 100), (400, 800, 1200)  # FedVC's budgets
_SHORT = {
    "local.lr": "lr",
    "algorithm.lr": "server lr",
    "algorithm.momentum": "beta",
    "server.momentum": "beta",
}


def finals(study: Study, there: Store) -> dict[tuple[str, str], list[Line]]:
    """The lines of the seeds, by (case, method), in the order of the seeds; only where all of them are there."""
    found: dict[tuple[str, str], list[Line]] = {}
    for cell in final_cells(study, there):
        if cell.digest in there:
            found.setdefault((cell.case, cell.method), []).append(there[cell.digest])
    return {key: lines for key, lines in found.items() if len(lines) == len(_seeds(study, there, *key))}


def _seeds(study: Study, there: Store, case: str, method: str) -> list[int]:
    return [c.seed for c in final_cells(study, there) if (c.case, c.method) == (case, method)]


def accuracy(study: Study, there: Store) -> list[str]:
    """Final test accuracy: mean, least and largest of the seeds."""
    return _by_case(study, there, lambda lines: _shown([final(line["curve"]) for line in lines]))


def rounds(study: Study, there: Store) -> list[str]:
    """Rounds to the study's target, seed by seed."""

    def each(lines: Sequence[Line]) -> str:
        counts = [rounds_to(line["curve"], study.target) for line in lines]
        return ", ".join(NEVER if count is None else str(count) for count in counts)

    return _by_case(study, there, each)


def differences(study: Study, there: Store) -> list[str]:
    """Points of final accuracy above another method's with the same seed; bold where all seeds agree on the sign."""
    found = finals(study, there)

    def cell(case: str, method: Method) -> str:
        mine, theirs = found.get((case, method.label)), found.get((case, _beside(study, method)))
        if mine is None or theirs is None:
            return MISSING
        if _failed([*mine, *theirs]):
            return DIVERGED
        points = [100 * (final(m["curve"]) - final(t["curve"])) for m, t in zip(mine, theirs, strict=True)]
        mean, least, largest = spread(points)
        return _bold(f"{mean:+.2f} ({least:+.2f} to {largest:+.2f})", sign(points))

    body = [
        [f"{method.label} - {_beside(study, method)}", *(cell(case, method) for case in study.cases)]
        for method in study.methods
        if method.label != study.baseline
    ]
    return _table(["", *study.cases], body)


def _beside(study: Study, method: Method) -> str:
    return method.beside or study.baseline


def _bold(text: str, told: object) -> str:
    return f"**{text}**" if told else text


def budgets(study: Study, there: Store) -> list[str]:
    """Acc@round and Acc@batch (hsu2020 table 2), means of the seeds.

    Bold where it is above that of the method that it is set beside with every seed.
    """
    found = finals(study, there)
    measures: list[tuple[str, Callable[[Line], float | None]]] = [
        *((f"@round {n}", lambda line, n=n: at_round(line["curve"], n)) for n in ROUNDS),
        *((f"@batch {n}", lambda line, n=n: at_batches(line["curve"], n)) for n in BATCHES),
    ]
    body = []
    for case, method in product(study.cases, study.methods):
        lines, others = found.get((case, method.label)), found.get((case, _beside(study, method)), [])
        if lines is None or _failed(lines):
            body.append([case, method.label, *([MISSING if lines is None else DIVERGED] * len(measures))])
            continue
        shown = [
            _mean([measure(line) for line in lines], [measure(line) for line in others])
            for _, measure in measures
        ]
        body.append([case, method.label, *shown])
    return _table(["clients differ in", "", *(name for name, _ in measures)], body)


def _mean(values: Sequence[float | None], others: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not reached"
    gaps = [value - other for value, other in zip(known, others, strict=False) if other is not None]
    return _bold(f"{sum(known) / len(known):.3f}", len(gaps) == len(known) and sign(gaps) > 0)


def choices(study: Study, there: Store) -> list[str]:
    """What tuning chose, with a star at a learning rate that is the least or the largest that was tried."""

    def cell(case: str, method: Method) -> str:
        point = chosen(study, case, method, there)
        if point is None:
            return MISSING
        return ", ".join(
            f"{_SHORT.get(key, key.rpartition('.')[2])} {value:g}" + "\\*" * at_edge(value, method.grid[key])
            for key, value in point.items()
        )

    body = [[method.label, *(cell(case, method) for case in study.cases)] for method in study.methods]
    return _table(["", *study.cases], body)


def cost(study: Study, there: Store) -> str:
    """The command, the seeds and the CPU time of every number of a study."""
    tuning, last = list(tuning_cells(study)), list(final_cells(study, there))
    own = {cell.digest for cell in [*tuning, *last]} & set(there)
    shared = own & _before(study, there)
    seeds = ", ".join(str(seed) for seed in sorted({cell.seed for cell in last}))
    text = f"`python -m benchmarks.evidence {study.file}`; seeds {seeds}"
    if tuning:
        text += f", tuned on seed {TUNING_SEED}"
    text += f"; {len(own)} runs, {seconds(own, there):,.0f} CPU seconds"
    if shared:
        text += f" ({len(shared)} of them, {seconds(shared, there):,.0f} seconds, are those of a study above)"
    return f"{text}."


def _before(study: Study, there: Store) -> set[str]:
    """The runs of the studies that stand before this one on the page."""
    found: set[str] = set()
    for other in ordered():
        if other is study:
            break
        found |= digests(other, there)
    return found


def ordered() -> list[Study]:
    """Every study, in the order of the page."""
    return [study for studies in STUDIES.values() for study in studies]


def digests(study: Study, there: Store) -> set[str]:
    """The runs of a study that are there."""
    return {cell.digest for cell in [*tuning_cells(study), *final_cells(study, there)]} & set(there)


def seconds(digests: Iterable[str], there: Store) -> float:
    """CPU seconds of some runs."""
    return float(sum(there[digest]["cpu_seconds"] for digest in digests))


def total(there: Store) -> str:
    """What all of it cost."""
    used = set().union(*(digests(study, there) for study in ordered()))
    return f"All {len(used)} runs of this page together took {seconds(used, there) / 60:.0f} CPU minutes."


def _by_case(study: Study, there: Store, shown: Callable[[Sequence[Line]], str]) -> list[str]:
    found = finals(study, there)

    def cell(case: str, method: str) -> str:
        lines = found.get((case, method))
        if lines is None:
            return MISSING
        failed = _failed(lines)
        return f"{DIVERGED} ({failed} of {len(lines)})" if failed else shown(lines)

    body = [[method.label, *(cell(case, method.label) for case in study.cases)] for method in study.methods]
    return _table(["", *study.cases], body)


def _failed(lines: Sequence[Line]) -> int:
    return sum("failed" in line for line in lines)


def _shown(values: Sequence[float]) -> str:
    found: Spread = spread(values)
    return f"{found.mean:.3f} ({found.least:.3f} to {found.largest:.3f})"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(row)} |" for row in rows]
