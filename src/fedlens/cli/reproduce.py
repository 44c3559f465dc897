"""`fedlens reproduce`: run the study behind a figure or a table of a paper."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.base.printable import printable
from fedlens.base.shell_command import quoted_command
from fedlens.cli.display.output import CommandOutput, print_columns, print_json, reported, say
from fedlens.cli.options import AcceptChanges, Changes, DataDir, Debug, Download, Jobs, Json, Quiet, Report

if TYPE_CHECKING:
    from fedlens.studies.reproduce import ListedStudy, StudyCost, StudyRecord
    from fedlens.studies.study_plan import StudyPlan


class Scale(StrEnum):
    """The scales of a study."""

    SMOKE = "smoke"
    MINUTES = "minutes"
    LAPTOP = "laptop"
    PAPER = "paper"


_SCALE = (
    "smoke: two rounds, nothing learned; minutes: up to 10 minutes of one core, the default where the study has it; "
    "laptop: up to an hour; paper: the paper's own settings."
)
_LARGE = ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1, ""))
_DIFFERENCES = 8  # that are printed before the runs start
ChosenScale = Annotated[Scale | None, typer.Option(help=_SCALE)]
_DRY_RUN = "Print the cost and how the scale differs from paper, and run nothing."
DryRun = Annotated[bool, typer.Option("--dry-run", help=_DRY_RUN)]
_LISTED = "List all studies: cost by scale, missing data, and what has been run."
Listed = Annotated[bool, typer.Option("--list", help=_LISTED)]


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A study, such as hsu2019/fig5; --list shows all.")
    ] = None,
    scale: ChosenScale = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the results; default studies/<study>/<scale>."),
    ] = None,
    dry_run: DryRun = False,
    listed: Listed = False,
    changes: Changes = None,
    accept_changes: AcceptChanges = False,
    report: Report = True,
    data_dir: DataDir = None,
    download: Download = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the study behind a figure or a table of a paper, and show both results side by side.

    The same command continues an interrupted study.
    """
    with reported(debug, as_json) as output:
        from fedlens.base.errors import ConfigError
        from fedlens.studies.reproduce import (
            absent_data,
            chosen_scale,
            costs,
            listed_studies,
            records,
            refuse_absent,
        )
        from fedlens.studies.reproductions import folder_of, reproduction

        if listed:
            show_list(listed_studies(data_dir), as_json)
            return
        if name is None:
            raise ConfigError("no study is given", hint="name one; 'fedlens reproduce --list' lists them")
        path = reproduction(name)
        chosen = chosen_scale(name, scale)
        recorded = records().get(name, [])
        output.more = {"records": [asdict(record) for record in recorded]}
        if not (quiet or as_json):
            show_record(name, recorded, chosen)
        cost = costs()[name][chosen]
        # Changed settings may need other data; loading them says which.
        absent = [] if changes else absent_data(cost.datasets, data_dir)
        if absent and not dry_run:
            refuse_absent(cost.datasets, data_dir, download)

        from fedlens.cli.sweep import run_study
        from fedlens.studies.study import Study

        study = Study.load(path, chosen, overrides=changes or ())
        _show_plan(study.plan(), None if changes else cost, quiet, dry_run, as_json)
        if dry_run and absent:
            _show_absent(name, chosen, cost, absent, output)
            return
        run_study(
            study,
            output,
            quiet=quiet,
            dry_run=dry_run,
            out=out or folder_of(name, chosen, changes or ()),
            jobs=jobs,
            data_dir=data_dir,
            download=download,
            report=report,
            accept_changes=accept_changes,
        )


def _show_plan(plan: StudyPlan, cost: StudyCost | None, quiet: bool, dry_run: bool, as_json: bool) -> None:
    """Prints the cost, the caveats, and what differs from the paper: the first settings, or all with --dry-run."""
    if not quiet:
        lines = [*(_cost_lines(cost) if cost else ()), *plan.caveats]
        for line in lines if dry_run else [*lines, *difference_lines(plan.differences)]:
            print(printable(line), file=sys.stderr if as_json else sys.stdout)
    if dry_run and plan.differences and not as_json:
        print_columns(plan.differences, ("setting", "paper", "here"))


def _show_absent(
    name: str, scale: str, cost: StudyCost, absent: Sequence[str], output: CommandOutput
) -> None:
    """Prints the stored cost for --dry-run if data are missing, so that nothing can be measured."""
    if output.as_json:
        output.json({"study": name, "scale": scale, **asdict(cost), "absent": list(absent)})
    else:
        how = quoted_command("data", "info", absent[0])
        say(f"missing data: {', '.join(absent)}; {how} says how to get them")


def _cost_lines(cost: StudyCost) -> list[str]:
    from fedlens.base.format import many

    if not cost.runs:
        return ["nothing is trained"]
    before = f"pre-training before them, once: {cost.pretraining_images:,} images"
    runs = f"{many(cost.runs, 'run')} at most, {cost.images:,} training images"
    return [runs, before] if cost.pretraining_images else [runs]


def difference_lines(differences: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns a line for each of the first settings that differ from the paper; empty at the scale of the paper.

    >>> difference_lines([("rounds", "80", "2"), ("C", "0.05, 0.4", "0.05, 0.1")])
    ['rounds: 80 in the paper; 2 here', 'C: 0.05, 0.4 in the paper; 0.05, 0.1 here']
    """
    lines = [f"{name}: {paper} in the paper; {here} here" for name, paper, here in differences[:_DIFFERENCES]]
    more = len(differences) - len(lines)
    return lines + ([f"and {more} more, which --dry-run and the page list"] if more else [])


def show_list(studies: Sequence[ListedStudy], as_json: bool) -> None:
    """Prints the studies of each paper: costs by scale, data that are missing, and what has been run."""
    if as_json:
        print_json([asdict(study) for study in studies])
        return
    from fedlens.studies.reproduce import SCALES
    from fedlens.studies.reproductions import PAPERS, left_out

    for paper in dict.fromkeys(study.name.partition("/")[0] for study in studies):
        of = (
            f": {PAPERS[paper].title} ({PAPERS[paper].authors}, {PAPERS[paper].link})"
            if paper in PAPERS
            else ""
        )
        say(f"{'' if paper == studies[0].name.partition('/')[0] else chr(10)}{paper}{of}")
        rows = [
            (
                study.name,
                *(cost_words(study, scale) for scale in SCALES),
                absent_words(study),
                run_words(study),
                study.description,
            )
            for study in studies
            if study.name.partition("/")[0] == paper
        ]
        head = ("study", *SCALES, "missing data", "has been run", "what it is")
        print_columns(rows, head, numeric=range(1, 1 + len(SCALES)))
    for name, reason in left_out().items():
        say(f"{name} has no study: {reason}")
    say("\ncosts: core time of a recorded run, else training images, with those of pre-training.")
    say("For the time on this machine: fedlens reproduce STUDY --dry-run")


def cost_words(study: ListedStudy, scale: str) -> str:
    """The cost of a scale in a column: core time if a run of the study as it is now is recorded, else images.

    >>> from fedlens.studies.reproduce import StudyRecord
    >>> from fedlens.studies.reproduce import ListedStudy
    >>> from fedlens.studies.reproduce import StudyCost
    >>> costs = {"smoke": StudyCost(0, 0, ()), "minutes": StudyCost(3, 9_000, (), 2_000)}
    >>> costs["paper"] = StudyCost(2, 10**9, ())
    >>> study = ListedStudy("a/b", "", costs, ())
    >>> [cost_words(study, scale) for scale in ("smoke", "minutes", "laptop", "paper")]
    ['no training', '11 thousand images', '-', '1.0 billion images']
    >>> study = ListedStudy("a/b", "", costs, (), records=[StudyRecord("minutes", "1.0", 0.1, "Learns.")])
    >>> cost_words(study, "minutes")
    '6 min'
    """
    from fedlens.base.format import duration

    cost = study.costs.get(scale)
    if cost is None:
        return "-"
    if not cost.runs:
        return "no training"
    for record in study.records:
        if record.scale == scale and not record.stale:
            return duration(3600 * record.cpu_hours)
    images = cost.images + cost.pretraining_images
    least, unit = next(each for each in _LARGE if images >= each[0])
    return f"{images / least:,.{1 if images < 9.95 * least and unit else 0}f} {unit}images"


def absent_words(study: ListedStudy) -> str:
    """The datasets that are missing, with the scales that need them if others do not."""
    scales = [scale for scale, cost in study.costs.items() if set(cost.datasets) & set(study.absent)]
    text = ", ".join(study.absent)
    return f"{text} (for {', '.join(scales)})" if text and len(scales) < len(study.costs) else text or "-"


def run_words(study: ListedStudy) -> str:
    """Which scales have been run: in the local folder, and by us."""
    local: list[Any] = [
        scale if done == planned else f"{scale} ({done} of {planned} runs)"
        for scale, (done, planned) in study.local.items()
    ]
    ours = [
        f"{record.scale} by us ({record.version}{', before a change' if record.stale else ''})"
        for record in study.records
    ]
    return ", ".join([*(f"{each} here" for each in local), *ours]) or "-"


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
