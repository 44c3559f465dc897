"""A user's own data of several parties: a table of ids and images each, one of them with labels and splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedlens.base.errors import nearest
from fedlens.base.shell_command import shell_command
from fedlens.data.dataset import Dataset
from fedlens.data.diagnostics import Findings, unique
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.cell_labels import classes_in_cells, labels_of_cells
from fedlens.data.formats.clients import describe
from fedlens.data.formats.csv_table import inner_path, missing, read_csv
from fedlens.data.formats.folder_check import Check, natural
from fedlens.data.formats.probe import probe_all
from fedlens.data.formats.reader import assemble, examine
from fedlens.data.formats.scan import Scan
from fedlens.data.partition.settings import PartyPaths

_GREY = {"1", "L", "LA"}  # Pillow's modes of images that one channel is enough for


@dataclass
class PartyScans:
    """What the tables of the parties list.

    Args:
        scans: of each party; the column `id` has the id of each image.
        findings: all problems, of single parties and of what they have in common.
        labels_at: the party with the labels, once it is known.
        trained, tested: the ids that all parties have, sorted, of the splits of the party with the labels.
    """

    scans: list[Scan]
    findings: Findings
    labels_at: int = 0
    trained: list[str] = field(default_factory=list)
    tested: list[str] = field(default_factory=list)


def scan_parties(files: Sequence[str], classes: list[str] | None = None, *, full: bool = False) -> PartyScans:
    """Reads the tables of the parties and the headers of their images, with `full` all of each image.

    Problems are in the findings: those that `fedlens.data.formats.reader.examine` finds in each table; ids that a
    table has twice or lacks; no labels, or labels or splits in several tables; no training or test id that all have.
    """
    shared: dict[str, Any] = {"size": None, "fit": "crop", "on_error": None, "classes": classes}
    tables = [Path(file).expanduser() for file in files]
    scans = [
        examine(_fill, {"path": table.parent, "table": str(table), **shared}, full=full) for table in tables
    ]
    found = [finding for scan in scans for finding in scan.findings]
    warned = [warning for scan in scans for warning in scan.findings.warnings]
    parties = PartyScans(scans, Findings(found, warned))
    if all(finding.example for finding in found):
        _compare(parties, tables)
    return parties


def party_files(
    root: Path,
    download: bool,
    seed: int,
    *,
    files: Annotated[
        PartyPaths,
        Field(description="the table of each party: id,path; by default those of data.parties.files"),
    ],
    classes: common.Classes = None,
) -> Dataset:
    """The images of several parties that have the same ids: a table `id,path` each, one with `label,split` too.

    | what | source |
    |---|---|
    | id | column `id`, compared as text: "007" is not "7" |
    | image | column `path`, below the folder of the table |
    | class | column `label` of one table, names or whole numbers from 0 on |
    | split | column `split` of the same table: train or test |

    Test images are those of the split test that all parties have; others of that split are left out, at every party.
    Each party has images of one size of its own, the most frequent one (see `image_folder`), in grey if all of its
    files are grey, and the mean and deviation of its own training images.

    Returns:
        The dataset of the party with the labels, with those of the others in `parties`.

    Raises `DataError` with all problems of the tables and images; see `fedlens data check`.
    """
    parties = scan_parties(files, classes)
    parties.findings.settle(None, advice=f"this lists all: {shell_command('data', 'check', *files)}")
    labelled = parties.scans[parties.labels_at]
    assert labelled.splits is not None
    ids = labelled.columns["id"].tolist()
    held_out = {name for name, split in zip(ids, labelled.splits, strict=True) if split != "train"}
    tested, datasets, notes = set(parties.tested), [], []
    for k, scan in enumerate(parties.scans):
        names = scan.columns["id"].tolist()
        scan.splits = ["test" if name in tested else "train" for name in names]
        scan.bad.update(row for row, name in enumerate(names) if name in held_out - tested)
        if k != parties.labels_at:
            scan.label_sets = [()] * len(names)
        read = assemble(scan, seed)
        notes += [
            f"{Path(files[k]).name}: {note.partition('; set data.dataset.size')[0]}" for note in read.notes
        ]
        datasets.append(replace(read, source=str(files[k]), chosen={}))
    own = datasets[parties.labels_at]
    others = tuple(None if each is own else each for each in datasets)
    return replace(own, parties=others, notes=tuple(notes))


def _fill(scan: Scan) -> None:
    """Completes the scan of one party's table."""
    scan.format, scan.upright = "party-files", True
    path = Path(scan.settings["table"])
    table = read_csv(path, scan.findings, scan.folder)
    if table is None:
        return
    lacking = [name for name in ("id", "path") if name not in table.columns]
    for name in lacking:
        hint = nearest(name, table.columns)
        scan.findings.add_whole(f"{path}, line 1", f"there is no column '{name}'", hint)
    if lacking:
        return
    paths = [inner for cell in table.column("path") if (inner := inner_path(cell)) is not None]
    scan.names = list(dict.fromkeys(paths))
    if not describe(scan):
        return
    by_line, first = dict(zip(table.lines, table.column("id"), strict=True)), dict[str, int]()
    for line, name in by_line.items():
        where = f"{path}, line {line}"
        if absent := missing(name):
            scan.findings.add_whole(where, f"the cell 'id' {absent}", "write the id of the example")
        elif first.setdefault(name, line) != line:
            what = f"the id '{name}' is in line {first[name]} too"
            scan.findings.add_whole(where, what, "write one line for each id")
    scan.columns["id"] = np.array(["" if line is None else by_line[line] for line in scan.lines], dtype=str)
    if scan.cells is not None:
        scan.classes = tuple(scan.settings["classes"] or classes_in_cells(scan.cells, path, scan.findings))
        scan.labels = labels_of_cells(scan)
    scan.headers = probe_all(scan.folder, scan.names, scan.findings, full=scan.full)
    scan.bad.update(row for row, header in enumerate(scan.headers) if header is None)
    grey = all(header.mode in _GREY for header in scan.headers if header is not None)
    scan.settings = {**scan.settings, "channels": 1 if grey else 3}


def _compare(parties: PartyScans, tables: Sequence[Path]) -> None:
    """Finds the party with the labels and the ids that all have; problems are added to the findings."""
    add = parties.findings.add_whole
    labelled = [k for k, scan in enumerate(parties.scans) if scan.cells is not None]
    split = [k for k, scan in enumerate(parties.scans) if scan.splits is not None]
    if not labelled:
        add(tables[0], "no party has labels", "add the columns 'label' and 'split' to the table of one party")
        return
    at = next((k for k in labelled if k in split), labelled[0])
    for name, having in (("label", labelled), ("split", split)):
        for k in sorted({at} ^ set(having)):
            what = f"the column '{name}' belongs in the table of the one party with labels, {tables[at]}"
            add(f"{tables[k]}, line 1", what, "add it" if k == at else "remove it")
    if not labelled == split == [at]:
        return
    parties.labels_at, own = at, parties.scans[at]
    held = [set(scan.columns["id"][scan.rows()].tolist()) for scan in parties.scans]
    splits = dict(zip(own.columns["id"].tolist(), own.splits or (), strict=True))
    shared = sorted(held[0].intersection(*held[1:]))
    tested = "test" if "test" in splits.values() else "validation"
    parties.trained = [name for name in shared if splits[name] == "train"]
    parties.tested = [name for name in shared if splits[name] == tested]
    for names, purpose in ((parties.trained, "training"), (parties.tested, "test")):
        if not names:
            what = f"no {purpose} image has an id that is in the tables of all parties"
            add(tables[at], what, "ids are compared as text: '007' is not '7'")


def check_parties(files: Sequence[str]) -> Check:
    """Reads all of the tables and images of several parties; see `check_folder`. Problems are in the result."""
    parties = scan_parties(files, full=True)
    facts = [scan.facts() for scan in parties.scans]
    findings = sorted(parties.findings, key=lambda finding: (finding.example, natural(finding.where)))
    counts = {name: sum(each[name] for each in facts) for name in ("images", "left_out")}
    of_party = {str(file): each for file, each in zip(files, facts, strict=True)}
    labelled = facts[parties.labels_at]
    return Check(
        {
            "format": "party-files",
            **counts,
            "classes": labelled["classes"],
            "splits": labelled.get("splits", {}),
            "shared": {"training": len(parties.trained), "test": len(parties.tested)},
            "parties": of_party,
        },
        tuple(unique(findings)),
        tuple(parties.findings.warnings),
        {"files": list(files)},
    )
