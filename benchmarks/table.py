"""Prints the table of the results page from the file that `fedlens bench` or `python -m benchmarks.speed` writes.

python -m benchmarks.table fedlens-bench.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import goals_of
from fedlens.benchmark.comparison import ComparisonRow, Ratio


def told(ratio: dict[str, float] | None) -> str:
    """A ratio with its interval."""
    return "" if ratio is None else str(Ratio(**ratio))


def line(row: dict[str, Any], first: bool) -> str:
    """One line of the table."""
    about = row["about"]
    way = f", {about['processes']}x{about['threads']}" if "processes" in about else ""
    way += f", {about['layout']}" if row["name"] == "limit" else ""
    name = f"`{row['workload']}`: {row['name']}" if first else row["name"]
    if row["reason"]:
        return f"| {name} | did not run: {row['reason']} | | |"
    cells = (name + way, f"{row['images_per_s']:,.0f}", told(row["to_limit"]), told(row["fedlens_to_it"]))
    return " ".join(f"| {' | '.join(cells)} |".split())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The table of the results page.")
    parser.add_argument("file", type=Path)
    record = json.loads(parser.parse_args(arguments).file.read_text(encoding="utf-8"))
    best = sorted({row["engine"] for row in record["rows"] if row["engine"]})
    print("| what, processes x threads | images/s | to the limit | fedlens to it |")
    print("|---|---|---|---|")
    before = None
    for row in record["rows"]:
        print(line(row, first=row["workload"] != before))
        before = row["workload"]
    print()
    goals = goals_of([ComparisonRow(**row) for row in record["rows"]])
    for goal in (goal for goal in goals if goal.met != "yes"):
        pair = f"{goal.engine} to {goal.reference}"
        print(f"- `{goal.workload}`, {pair}: {goal.measured}, goal {goal.least:g}, {goal.met}")
    environment = record["environment"]
    print()
    for name in best:
        of = sorted({row["workload"] for row in record["rows"] if row["engine"] == name})
        print(f"fedlens to it: {name} on {', '.join(of)}")
    print(
        f"fedlens {environment['fedlens']}, PyTorch {environment['torch']}, Python {environment['python']},"
    )
    print(f"{environment['cpu']['model']}, {environment['cpu']['usable']} cores; {environment['command']}")
    for name in record["workloads"]:
        print(
            f"{name}: {max(len(row['seconds']) for row in record['rows'] if row['workload'] == name)} pairs"
        )


if __name__ == "__main__":
    main()
