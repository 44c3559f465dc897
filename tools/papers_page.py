"""The lists of docs/papers.md and the counts of README.md, from papers.csv, the records and the registries.

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
from tools.reproduce_table import record_link

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "papers.md", ROOT / "README.md"
LISTS = re.compile(r"(<!-- lists: papers -->\n)(?:.*\n)*?(<!-- end of lists -->\n)")
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
STUDIES = "Beside those of [All studies](reproduce.md#all-studies):"
Records = Mapping[str, Sequence[StudyRecord]]


def rendered(page: str, recorded: Records) -> str:
    """The page with its lists and counts written anew."""
    lists = "\n".join(_lists(recorded))
    for words, number in NUMBERS.items():
        page = re.sub(rf"\b\d+(?={words})", str(number), page)
    page = LIST.sub(lambda match: f"{match[1]}\n{listed()}\n\n{match[2]}", page)
    page = LISTS.sub(lambda match: f"{match[1]}\n{lists}\n\n{match[2]}", page)
    return COUNTS.sub(lambda match: f"{match[1]}{counts(recorded)}\n{match[2]}", page)


def listed() -> str:
    """The papers with their short names."""
    return "\n".join(f"- `{key}`: {one.authors}, [*{one.title}*]({one.link})" for key, one in PAPERS.items())


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


def _lists(recorded: Records) -> list[str]:
    lines: list[str] = []
    for kind, title in KINDS.items():
        rows = [row for row in paper_rows() if row.kind == kind]
        lines += ["", f"## {title}", ""]
        if kind in ("figure", "table"):  # whose studies have a table of their own
            lines += [STUDIES, ""]
            rows = [row for row in rows if row.why or not row.studies]
        lines += [_line(row, recorded) for row in rows]
    return lines[1:]


def _line(row: PaperRow, recorded: Records) -> str:
    if row.kind in ("figure", "table") and row.studies:
        return _drawn(row, recorded)
    remarks = {"works": "", "partly": f"**Partly**: {row.why}", "not there": f"**Not there**: {row.why}"}
    pointers = [pointer for pointer in row.pointers if f"`{pointer.partition(':')[2]}" not in row.where]
    shown = [row.where, *(_pointer(pointer) for pointer in pointers if not pointer.startswith("study:"))]
    papers = "all" if len(row.papers) == len(PAPERS) else ", ".join(row.papers)
    text = f"{row.what} ({papers}): {', '.join(filter(None, shown))}"
    return "- " + ". ".join(filter(None, [text, remarks[row.state]]))


def _drawn(row: PaperRow, recorded: Records) -> str:
    """The line of a figure or table with studies, whose names say the paper."""
    links = [record_link(name, record) for name in row.studies for record in recorded.get(name, ())]
    text = f"{row.what}: {', '.join([*(f'`{name}`' for name in row.studies), *links])}"
    missing = "**No record**" if state(row, recorded) == "partly" else ""
    return "- " + ". ".join(filter(None, [text, missing, row.why]))


def _pointer(pointer: str) -> str:
    kind, _, value = pointer.partition(":")
    if kind == "page":
        target, _, anchor = value.partition("#")
        title = re.search(r"^# (.+)$", (ROOT / "docs" / target).read_text(encoding="utf-8"), re.MULTILINE)
        assert title, value
        return f"[{title[1].replace('`', '')}]({target}{'#' + anchor if anchor else ''})"
    if kind == "test":
        return f"`{value.removeprefix('tests/').partition('::')[0]}`"
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
