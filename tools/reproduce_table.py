"""The table of docs/reproduce.md and costs.json, from the study files.

`python -m tools.reproduce_table` writes both anew; with names such as `hsu2019/fig5`, the costs of these
studies alone. tests/unit/house/test_reproductions.py says when that is needed.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from fedlens.base.format import duration
from fedlens.cli.reproduce import cost_words
from fedlens.studies.reproduce import (
    COSTS,
    SCALES,
    ListedStudy,
    costs,
    listed_studies,
    study_cost,
    study_scales,
)
from fedlens.studies.reproductions import FOLDER, reproductions
from fedlens.studies.study_plan import StudyPlan

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
TABLE = re.compile(r"(<!-- table: reproductions -->\n)(?:\n\|(?:.*\n\|)*.*\n)?")
NOWHERE = Path("/nonexistent")  # what is on a machine does not belong on the page


def rendered(page: str) -> str:
    """The page with its table written anew."""
    return TABLE.sub(lambda match: match[1] + "\n" + "".join(f"{row}\n" for row in rows()), page)


def rows() -> list[str]:
    """The lines of the table."""
    lines = [
        f"| study | what it is | data | {' | '.join(SCALES)} | run by us |",
        f"|---|---|---|{'---:|' * len(SCALES)}---|",
    ]
    return lines + [_row(study) for study in listed_studies(NOWHERE, NOWHERE)]


def _row(study: ListedStudy) -> str:
    data = dict.fromkeys(name for cost in study.costs.values() for name in cost.datasets)
    ours = "; ".join(
        f"[{record.scale}](figures-of-five-papers.md#{study.name.replace('/', '')}-{record.scale})"
        f" ({record.version}, {duration(3600 * record.cpu_hours)} of one core): {record.outcome}"
        for record in study.records
    )
    cells = [cost_words(study, scale) for scale in SCALES]
    listed = ", ".join(f"`{name}`" for name in data)
    return f"| `{study.name}` | {study.description} | {listed} | {' | '.join(cells)} | {ours or 'not yet'} |"


def write_costs(names: list[str]) -> None:
    """Writes costs.json, with the costs of `names` computed anew; of all studies without names."""
    path, known = FOLDER / COSTS, reproductions()
    tables = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names or known:
        plans = {scale: StudyPlan.load(known[name], scale, check=False) for scale in study_scales(name)}
        tables[name] = {scale: asdict(study_cost(plan)) for scale, plan in plans.items()}
    tables = {name: tables[name] for name in known if name in tables}
    lines = [f"{json.dumps(name)}: {json.dumps(table)}" for name, table in tables.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    costs.cache_clear()


if __name__ == "__main__":
    write_costs(sys.argv[1:])
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
