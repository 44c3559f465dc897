"""The table of the results page, from the file that `fedlens bench` writes.

python -m benchmarks.table fedlens-bench.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def told(ratio: dict[str, float] | None) -> str:
    """A ratio with its interval."""
    if ratio is None:
        return ""
    digits = 3 if ratio["median"] < 10 else 1
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def line(row: dict[str, Any], first: bool) -> str:
    """One line of the table."""
    about = row["about"]
    way = f", {about['processes']} x {about['threads']}" if "processes" in about else ""
    name = f"`{row['workload']}`" if first else ""
    if row["reason"]:
        return f"| {name} | {row['name']} | did not run: {row['reason']} | | | | |"
    over = "" if row["overhead_ms"] is None else f"{row['overhead_ms']:.2f} ms"
    return (
        f"| {name} | {row['name']}{way} | {row['images_per_s']:,.0f} | {told(row['to_limit'])} | {over} "
        f"| {told(row['to_by_hand'])} | {told(row['fedlens_to_it'])} |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The table of the results page.")
    parser.add_argument("file", type=Path)
    record = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    head = (
        "workload",
        "what, processes x threads",
        "images/s",
        "to the limit",
        "overhead",
        "to bmm",
        "fedlens to it",
    )
    print(f"| {' | '.join(head)} |")
    print("|---|---|---|---|---|---|---|")
    before = None
    for row in record["rows"]:
        print(line(row, first=row["workload"] != before))
        before = row["workload"]
    environment = record["environment"]
    print()
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
