"""`fedlens data list`: the datasets on this machine, and how to get the others."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DataDir, Debug, Json

if TYPE_CHECKING:
    from pathlib import Path

    from fedlens.data.catalogue import DatasetFacts, Presence

HEAD = ("dataset", "here", "train", "test", "classes", "clients", "to fetch", "licence")
SAID = {"here": "yes", "partly": "in part", "absent": "no", "built in": "built in", "your own": "your own"}
OWN = "your own data"
UNKNOWN = "unknown"


def list_datasets(
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the datasets: which are on this machine, their sizes and licences, and how to get the others."""
    with reported(debug, as_json):
        from fedlens.data.catalogue import CATALOGUE, presence
        from fedlens.settings.datadir import data_directory

        root = data_directory(data_dir)
        found = {name: presence(record, root) for name, record in CATALOGUE.items()}
        if as_json:
            rows = [as_object(CATALOGUE[name], one) for name, one in found.items()]
            print_json({"data_dir": str(root), "datasets": rows})
            return
        say(f"data directory: {root}")
        groups: dict[str, list[DatasetFacts]] = {}
        for name in found:
            record = CATALOGUE[name]
            groups.setdefault(OWN if record.own else record.task, []).append(record)
        for task, records in groups.items():
            say(f"\n{task}")
            _print_group(records, found)
        _print_how([CATALOGUE[name] for name, one in found.items() if one.state in ("absent", "partly")])


def _print_how(absent: list[DatasetFacts]) -> None:
    names: dict[str, list[str]] = {}
    for record in absent:
        names.setdefault(record.how, []).append(record.name)
    for number, (how, those) in enumerate(names.items()):
        if not number:
            say("\nhow to get the missing datasets")
        say(f"- {', '.join(those)}: {how}")


def _print_group(records: list[DatasetFacts], found: dict[str, Presence]) -> None:
    if all(record.own for record in records):
        print_columns([(record.name, record.task, record.summary) for record in records])
        return
    rows = [(record.name, SAID[found[record.name].state], *_numbers(record)) for record in records]
    print_columns(rows, HEAD, numeric=(2, 3, 4, 5))


def _numbers(record: DatasetFacts) -> tuple[str, ...]:
    """The counts of a dataset; unknown ones are named so, and clients are none without natural clients."""
    clients = "none" if record.unit is None else UNKNOWN
    given = (
        *((count, UNKNOWN) for count in (record.train, record.test, record.classes)),
        (record.clients, clients),
    )
    told = [other if count is None else f"{count:,}" for count, other in given]
    download = record.download or (UNKNOWN if record.files else "nothing")
    return (*told, download, (record.licence or UNKNOWN).partition(";")[0])


def as_object(record: DatasetFacts, found: Presence) -> dict[str, Any]:
    """One dataset as JSON: its facts, and which of its files are on this machine."""
    paths: list[Path] = list(found.found)
    here = {"state": found.state, "found": [str(path) for path in paths], "lacking": list(found.lacking)}
    return {**asdict(record), "here": here}
