"""The table of the pre-trainings that the runs of a study start from."""

from __future__ import annotations

from fedlens.base.format import MISSING, count, duration, label, metric_value
from fedlens.results.rows import Results, Row
from fedlens.results.table_format import StudyTable, TableCell

_NAME = "pretraining"
_HEAD = ("pre-training", "status", "rounds", "images", "CPU time", "last value")


def pretraining_tables(results: Results) -> list[StudyTable]:
    """One table with a row for each pre-training; none for a study without."""
    if not results.info.pretrained:
        return []
    caption = (
        "What runs start from. Their images and times are in no other number of this page; an image of which two views "
        "are trained on counts once. A pre-training is done once for all seeds and kept in the user's cache."
    )
    notes = [
        f"{entry.method}: {line.reason}"
        for entry in results.info.pretrained
        if (line := results.lines.get(entry.digest)) is not None and line.reason
    ]
    rows = [[TableCell(text) for text in _row(results, entry)] for entry in results.info.pretrained]
    return [StudyTable(_NAME, "Pre-training", caption, _HEAD, rows, notes)]


def _row(results: Results, entry: Row) -> list[str]:
    name = results.info.pretrained_labels.get(entry.method, entry.method)
    line = results.lines.get(entry.digest)
    if line is None:
        return [name, "not done", *[MISSING] * (len(_HEAD) - 2)]
    images = line.curve.get("examples") or [None]
    value = line.final(line.main)
    last = MISSING if value is None else f"{metric_value(line.main, value)} {label(line.main)}"
    return [
        name,
        str(line.status),
        count(line.rounds),
        count(images[-1]),
        duration(line.facts.get("cpu_seconds")),
        last,
    ]
