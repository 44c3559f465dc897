"""The tables of docs/papers.md and the counts of README.md, from papers.csv, the records and the registries.

`python -m tools.papers_page` writes them anew; test_papers.py says when that is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlens.data.catalogue import CATALOGUE
from fedlens.data.partition.registry import PARTITIONS
from fedlens.models.registry import MODELS, ModelEntry
from fedlens.settings.config_source import recipes
from fedlens.studies.reproduce import StudyRecord, records
from fedlens.studies.reproductions import PAPERS, PaperRow, paper_rows

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "papers.md", ROOT / "README.md"
TABLES = re.compile(r"(<!-- tables: papers -->\n)(?:.*\n)*?(<!-- end of tables -->\n)")
LIST = re.compile(r"(<!-- list: papers -->\n)(?:.*\n)*?(<!-- end of list -->\n)")
COUNTS = re.compile(r"(<!-- counts: papers -->\n)(?:.*\n)*?(<!-- end of counts -->\n)")
KINDS = {
    "system": "Systems and functions",
    "algorithm": "Algorithms",
    "training": "Details of training",
    "dataset": "Datasets",
    "model": "Models",
    "partition": "Partitions",
    "metric": "Metrics and analyses",
    "figure": "Figures",
    "table": "Tables",
}
HEAD = "| papers | what | where | state | what is missing, and why |"
NUMBERS = {  # of what the registries hold, by the words that follow in README.md
    r" ways to distribute a dataset": len(PARTITIONS.entries),
    r" published datasets": sum(
        not facts.own and facts.licence != "none needed" for facts in CATALOGUE.values()
    ),
    r" models\]\(docs/models.md\)": len(MODELS.entries),
    r" need\s+`pip install 'fedlens\[vision\]'`": sum(
        isinstance(model, ModelEntry) and model.extra == "vision" for model in MODELS.entries.values()
    ),
}
Records = Mapping[str, Sequence[StudyRecord]]


def rendered(page: str, recorded: Records) -> str:
    """The page with its tables and counts written anew."""
    tables = "\n".join(_tables(recorded))
    for words, number in NUMBERS.items():
        page = re.sub(rf"\b\d+(?={words})", str(number), page)
    page = LIST.sub(lambda match: f"{match[1]}\n{listed()}\n\n{match[2]}", page)
    page = TABLES.sub(lambda match: f"{match[1]}\n{tables}\n\n{match[2]}", page)
    return COUNTS.sub(lambda match: f"{match[1]}{counts(recorded)}\n{match[2]}", page)


def listed() -> str:
    """The table of the papers with their short names."""
    rows = [f"| `{key}` | {one.authors}, [*{one.title}*]({one.link}) |" for key, one in PAPERS.items()]
    return "\n".join(["| in the code | paper |", "|---|---|", *rows])


def state(row: PaperRow, recorded: Records) -> str:
    """The state of a row: that of the file, or "recorded" once each of its studies has a record, else "partly"."""
    if row.state:
        return row.state
    return "recorded" if all(recorded.get(name) for name in row.studies) else "partly"


def counts(recorded: Records) -> str:
    """The sentence with the three counts."""
    found = Counter(state(row, recorded) for row in paper_rows())
    return (
        f"Of the {len(paper_rows())} systems, algorithms, datasets, models, partitions, metrics, figures and tables "
        f"that the papers describe,\n{found['works'] + found['recorded']} are there ({found['recorded']} of them are "
        f"figures and tables with a recorded run), {found['partly']} are there in part, and {found['not there']} are "
        "not."
    )


def _tables(recorded: Records) -> list[str]:
    lines: list[str] = []
    for kind, title in KINDS.items():
        rows = [row for row in paper_rows() if row.kind == kind]
        lines += [
            "",
            f"## {title}",
            "",
            HEAD,
            "|---|---|---|---|---|",
            *(_line(row, recorded) for row in rows),
        ]
    return lines[1:]


def _line(row: PaperRow, recorded: Records) -> str:
    found, why = state(row, recorded), row.why
    if not row.state:
        scales = dict.fromkeys(record.scale for name in row.studies for record in recorded.get(name, ()))
        if found == "recorded":
            found = f"recorded: {', '.join(f'`{scale}`' for scale in scales)}"
        else:
            why = "; ".join(filter(None, ["no run of it is recorded yet", why]))
    shown = [row.where, *(_pointer(pointer) for pointer in row.pointers if not pointer.startswith("study:"))]
    return f"| {', '.join(row.papers)} | {row.what} | {', '.join(filter(None, shown))} | {found} | {why} |"


def _pointer(pointer: str) -> str:
    kind, _, value = pointer.partition(":")
    if kind == "page":
        target, _, anchor = value.partition("#")
        title = re.search(r"^# (.+)$", (ROOT / "docs" / target).read_text(encoding="utf-8"), re.MULTILINE)
        assert title, value
        return f"[{title[1].replace('`', '')}]({target}{'#' + anchor if anchor else ''})"
    if kind == "test":
        return f"test `{value.removeprefix('tests/').partition('::')[0]}`"
    if kind == "recipe":
        assert value in recipes()
        return f"recipe `{value}`"
    return f"`{value}`"


def write() -> None:
    """Writes the page, and the counts of README.md."""
    for path in (PAGE, README):
        path.write_text(rendered(path.read_text(encoding="utf-8"), records()), encoding="utf-8")


if __name__ == "__main__":
    write()
