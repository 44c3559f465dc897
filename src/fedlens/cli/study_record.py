"""Shows the recorded run of a study before the study runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedlens.cli.display.output import print_columns, say

if TYPE_CHECKING:
    from fedlens.studies.records import StudyRecord


def show_record(name: str, records: Sequence[StudyRecord], scale: str) -> None:
    """Prints the record of the study `name` at a scale, or else its last one; nothing without records."""
    from fedlens.base.format import duration

    if not records:
        return
    record = next((one for one in records if one.scale == scale), records[-1])
    facts = [f"scale {record.scale}", record.date, f"fedlens {record.version}"]
    say(
        f"recorded: {', '.join(filter(None, facts))}, {duration(3600 * record.cpu_hours)} of one core",
        record.outcome,
    )
    if record.stale:
        say(f"the study has changed since: {record.stale}")
    if record.numbers:
        rows = [(number["of"], number["here"], number["paper"] or "-") for number in record.numbers]
        print_columns(rows, (record.metric, "here", "paper"), numeric=(1, 2))
    for verdict in record.verdicts:
        say(f"{verdict['verdict']}: {verdict['claim']} ({verdict['where']})")
    others = [one.scale for one in records if one is not record]
    say(f"made by: {record.command(name)}" + (f"; recorded too: {', '.join(others)}" if others else ""), "")
