"""The pages "Figures of five papers", and the records as the study files have them now.

    python -m tools.atlas_page            # the records and all pages that show them
    python -m tools.atlas_page --pages    # the pages alone, as `python -m benchmarks.atlas` does

The list of all records is in the repository. `mkdocs build` makes the page of each paper (tools/result_pages.py).

After a change of a title, a label or a claim, the files of a record and its entry in record.toml are written anew, and
its pictures are drawn again. After a change of a setting the record stays as it is, and is marked as stale; the next
`python -m benchmarks.atlas` replaces it. The other pages are docs/reproduce.md, docs/papers.md and README.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import indent

from benchmarks.atlas import plan_of
from benchmarks.atlas_record import COPY, current, draw, record_folder, record_of, stale_because, write_entry
from benchmarks.atlas_unfinished import UNFINISHED, number_kept
from fedlens.base.format import duration, many
from fedlens.pages.render import PageNotes
from fedlens.results.claims import claims_table
from fedlens.results.figures.study_figures import study_figures
from fedlens.results.rows import Results, write_data, write_info
from fedlens.results.study_table import StudyTable, TableCell, markdown
from fedlens.results.tables import study_tables
from fedlens.studies.reproduce import RECORD, ListedStudy, StudyRecord, listed_studies, records
from fedlens.studies.reproductions import FOLDER, PAPERS, reproduction
from tools import papers_page, reproduce_table
from tools.reproduce_table import record_link, subject

ROOT = Path(__file__).parents[1]
HOME = ROOT / "docs" / "atlas"
PAGE = ROOT / "docs" / "figures-of-five-papers.md"
NOWHERE = Path("/nonexistent")  # what is on a machine does not belong on the page
HEAD = """# Figures of five papers

Our runs of the [papers](papers.md): {recorded} of {all} studies have a record. The pages of the papers show its
pictures, our numbers beside those of the paper, a verdict on each claim, what ran instead of the paper's settings, the
command, the cost, and the files. [Reproduce a figure](reproduce.md#all-studies) lists the studies without a record.

A small scale neither proves nor refutes a paper: most of these runs have few rounds, and other data and models than the
title names.
"""
PAPER_HEAD = """# {about.authors}

[*{about.title}*]({about.link}). {recorded} of {all} studies have a record; [the list](../reproduce.md#all-studies) has
the others. A small scale neither proves nor refutes the paper: each section says what ran instead of its settings.
"""


def made(name: str, record: StudyRecord) -> tuple[Results, StudyRecord]:
    """The results of a record as the study file has them now, and its entry; of a stale one, those of then."""
    folder, plan = ROOT / record.folder, plan_of(name, record.scale)
    if stale := stale_because(folder, plan):
        return Results.read(folder), replace(record, stale=stale)
    results = current(folder, plan)
    return results, record_of(results, folder, name)


def index() -> str:
    """The list of all records, from record.toml."""
    studies = listed_studies(NOWHERE, NOWHERE)
    parts = [HEAD.format(recorded=sum(bool(study.records) for study in studies), all=len(studies))]
    for paper, about in PAPERS.items():
        parts.append(f"\n## [{about.authors}](figures/{paper}.md)\n\n")
        parts += [
            f"- `{study.name}`, {record_link(study.name, record)}: {subject(study)}. {_without_names(record.outcome)}\n"
            for study in studies
            if study.name.startswith(f"{paper}/")
            for record in study.records
        ]
    return "".join(parts)


def _without_names(outcome: str) -> str:
    """The outcome of a record without the methods, the cases and the seeds in brackets.

    >>> _without_names("Test accuracy from 18.4 % (FedAvg, E 5) to 42.5 % (FedProx, E 1), 3 seeds (0 to 2).")
    'Test accuracy from 18.4 % to 42.5 %, 3 seeds.'
    """
    return re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", outcome)


def paper_pages() -> Iterator[tuple[str, str]]:
    """The address and the text of each paper's page, from record.toml and docs/atlas."""
    studies = listed_studies(NOWHERE, NOWHERE)
    for paper, about in PAPERS.items():
        own, notes = [study for study in studies if study.name.startswith(f"{paper}/")], PageNotes()
        parts = [
            PAPER_HEAD.format(about=about, recorded=sum(bool(study.records) for study in own), all=len(own))
        ]
        parts += [part for study in own for record in study.records for part in _shown(study, record, notes)]
        parts += [part for study in own for part in unfinished(study)]
        listed = (
            f"- {markdown(note)} *{name}*\n" for name, told in notes.by_title().items() for note in told
        )
        yield f"figures/{paper}.md", "".join([*parts, "\n## Notes\n\n", *listed])


def _shown(study: ListedStudy, record: StudyRecord, notes: PageNotes) -> Iterator[str]:
    """The section of a record, whose notes are kept for the end of the page."""
    folder, link = ROOT / record.folder, record.folder.replace("docs", "..", 1)
    results = Results.read(folder)
    yield f"\n## `{study.name}`, {record.scale}\n\n{study.description} {record.outcome}\n"
    if record.stale:
        yield f'\n!!! warning "The study has changed since"\n\n    {record.stale}\n'
    pictures = [figure for figure in study_figures(results) if figure.figure is not None]
    if results.info.caveats:
        yield f"\n{' '.join(results.info.caveats)}\n"
    for figure in pictures:
        if (folder / f"{figure.name}.svg").is_file() and figure.figure is not None:
            notes.add(study.name, figure.figure.notes)
            yield f"\n![{figure.figure.title}]({link}/{figure.name}.svg)\n\n{figure.figure.caption}\n"
    if record.numbers:
        stated = any(number["paper"] for number in record.numbers)
        keys = ("of", "here", "paper") if stated else ("of", "here")
        rows = [[TableCell(number[key] or "–") for key in keys] for number in record.numbers]
        head = [record.metric, "here", "paper"][: len(keys)]
        yield f"\n{_table(StudyTable('numbers', 'Numbers', '', head, rows))}"
        yield "" if stated else "\nThe text of the paper states none of these numbers.\n"
    if not results.info.entries:
        tables = [table for table in study_tables(results) if table.name != "claims"]
        notes.add(study.name, [note for table in tables for note in table.notes])
        yield from (f"\n{_table(table)}" for table in tables)
    if results.info.document.get("claims"):
        claims = claims_table(results)
        notes.add(study.name, claims.notes)
        rows = [row[:-1] for row in claims.rows]  # the scale is that of the record
        yield f"\n{_table(replace(claims, head=claims.head[:-1], rows=rows, labels=3))}"
    if results.info.smaller:
        rows = [[*map(TableCell, row)] for row in results.info.smaller]
        table = _table(StudyTable("smaller", "Settings", "", ["setting", "paper", "here"], rows, labels=3))
        yield f'\n??? info "What ran instead of the paper\'s settings"\n\n{indent(table, "    ")}'
    else:
        yield "\nNo setting differs from the scale `paper`.\n"
    files = ", ".join(f"[{name}]({link}/{name})" for name in ("results.jsonl", "study.json", "cost.json"))
    cost = f"{duration(3600 * record.cpu_hours)} of one core" if record.cpu_hours else "less than a second"
    yield f"\n`{record.command(study.name)}`: {cost}, {record.date}, fedlens {record.version}; {files}.\n"


def _table(table: StudyTable) -> str:
    """The rows of a table, without its title and its notes."""
    return replace(table, notes=()).to_markdown().partition("\n\n")[2]


def unfinished(study: ListedStudy) -> Iterator[str]:
    """One line for each scale of which some runs are kept, but no record."""
    for scale, cost in study.costs.items():
        folder = record_folder(ROOT, study.name, scale)
        if (folder / UNFINISHED).is_file() and (number := number_kept(folder, plan_of(study.name, scale))):
            command = f"python -m benchmarks.atlas --only {study.name} --scale {scale}"
            yield (
                f"\n`{study.name}` at the scale `{scale}` is not finished: {number} of {many(cost.runs, 'run')} are "
                f"complete. `{command}` continues it.\n"
            )


def write_records() -> None:
    """Writes the records that have changed."""
    for name, found in records().items():
        for record in found:
            results, entry = made(name, record)
            folder = ROOT / record.folder
            if not entry.stale:
                write_info(folder, results.info)
                (folder / COPY).write_bytes(reproduction(name).read_bytes())
                if results.data:
                    write_data(folder, results.data)
                draw(folder)
            write_entry(FOLDER / RECORD, name, entry)


def write_pages() -> None:
    """Writes all pages in the repository that show records."""
    PAGE.write_text(index(), encoding="utf-8")
    table = reproduce_table.PAGE
    table.write_text(reproduce_table.rendered(table.read_text(encoding="utf-8")), encoding="utf-8")

    papers_page.write()


if __name__ == "__main__":
    if "--pages" not in sys.argv:
        write_records()
    write_pages()
