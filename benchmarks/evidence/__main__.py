"""The command line: runs studies, or writes the page from what they left."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import store
from benchmarks.evidence.driver import carry_out
from benchmarks.evidence.studies import STUDIES, final_cells, tuning_cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing of the studies that are named; with --render, writes tables and figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("studies", nargs="*", help=", ".join(STUDIES))
    parser.add_argument("--out", type=Path, default=store.HOME, help="where the results are (docs/evidence)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--only", action="append", default=[], metavar="METHOD", help="run these methods alone"
    )
    parser.add_argument("--anew", action="append", default=[], metavar="METHOD", help="forget and run again")
    parser.add_argument("--render", action="store_true", help="write the page's tables and figures")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.studies) - set(STUDIES):
        parser.error(f"there is no study {sorted(unknown)[0]}: take {', '.join(STUDIES)}")
    for study in [study for name in asked.studies for study in STUDIES[name]]:
        if asked.anew:
            there = store.read(asked.out)
            cells = [*tuning_cells(study), *final_cells(study, there)]
            gone = store.forget(asked.out, [cell.digest for cell in cells if cell.method in asked.anew])
            print(f"{study.name}: {gone} results forgotten")
        carry_out(study, asked.out, asked.processes, asked.only)
    if asked.render:
        from benchmarks.evidence.page import write

        write(asked.out)


if __name__ == "__main__":
    main()
