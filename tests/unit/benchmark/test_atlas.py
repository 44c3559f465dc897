"""The queue of the atlas, with made-up studies: order, records, stop and resume, changes, failures, sizes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import atlas as queue_file
from benchmarks import atlas_record, atlas_unfinished
from benchmarks.atlas import Atlas, at_most, diverged, pin_to_one_core, plan_of, queue, show, work
from benchmarks.atlas_record import FILES, STEPS, RecordRefused, headline, outcome, refuse_machine, thinned
from benchmarks.atlas_unfinished import KEPT, UNFINISHED, KeepingProgress, number_kept
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.cli.signals import stopped_by_signals
from fedlens.files.lock import locked
from fedlens.results.rows import Results, Row, StudyInfo
from fedlens.results.tables import study_tables
from fedlens.studies import reproduce as records_file
from fedlens.studies import reproductions as reproductions_file
from fedlens.studies.planned import PlannedRun
from fedlens.studies.reproduce import StudyCost, records
from fedlens.studies.study import Study
from tests.unit.studies.study_kit import Heard, planned, without_clock

STUDY = """# {name} (nobody, figure 1).
#
name = "{name}"
title = "Made up"
base = "digits"
seeds = {seeds}
set = {{ {more}"rounds" = 6, "select.clients_per_round" = 3 }}
methods.fedavg.label = "FedAvg"
scales.minutes.set = {{ "rounds" = {rounds} }}
figures = [{{ kind = "curves" }}]
tables = [{{ kind = "summary", document = "{name}.document.toml" }}]
"""
DOCUMENT = """source = "nobody"
[[values]]
method = "fedavg"
metric = "test_accuracy"
where = "figure 1"
about = 0.5
[[claims]]
text = "FedAvg is better than guessing."
where = "figure 1"
holds = "fedavg > 15 %"
[[claims]]
text = "FedAvg reaches 99 %."
where = "section 1"
holds = "fedavg > 99 %"
[[claims]]
text = "FedAvg is simple."
where = "section 2"
why = "no number"
"""
DRAW = atlas_record.draw
LINEAR = '"model.name" = "linear", '
Write = Callable[..., None]


@pytest.fixture
def atlas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Atlas:
    """An empty atlas over the studies in `studies`, which `write` adds."""
    folder = tmp_path / "studies"
    folder.mkdir()
    (folder / "record.toml").write_text("# Studies that we have run.\n", encoding="utf-8")
    for module in (reproductions_file, records_file):
        monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(reproductions_file, "left_out", dict)
    monkeypatch.setattr(atlas_record, "draw", lambda folder: None)
    return Atlas(tmp_path / "root", folder / "record.toml", tmp_path / "atlas")


@pytest.fixture
def write(atlas: Atlas, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a study file with its document, and its costs."""
    costs: dict[str, dict[str, StudyCost]] = {}
    monkeypatch.setattr(queue_file, "costs", lambda: costs)

    def add(name: str, images: int = 1, data: str = "digits", tables: str = "", **settings: Any) -> None:
        path = atlas.toml.parent / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        given = {"seeds": [0], "rounds": 2, "more": LINEAR, **settings}
        path.write_text(STUDY.format(name=path.stem, **given) + tables, encoding="utf-8")
        path.with_suffix(".document.toml").write_text(DOCUMENT, encoding="utf-8")
        costs[name] = dict.fromkeys(("minutes", "paper"), StudyCost(2, images, (data,)))

    return add


def record(atlas: Atlas) -> list[str]:
    """Works in this process, and returns what was recorded."""
    work(atlas, jobs=0, progress=Heard())
    return list(records(atlas.toml))


def test_a_study_runs_as_reproduce_runs_it_and_its_record_has_files_numbers_and_cost(
    atlas: Atlas,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(atlas_record, "draw", DRAW)
    write("nobody/fig1", seeds=[0, 1])
    assert record(atlas) == ["nobody/fig1"]
    [made] = records(atlas.toml)["nobody/fig1"]
    folder = atlas.root / made.folder
    assert {path.name for path in folder.iterdir()} == {*FILES, "curves.svg"} - {"data.json"}
    ordinary = tmp_path / "ordinary"
    Study.load(atlas.toml.parent / "nobody" / "fig1.toml", "minutes").run(ordinary, jobs=0, report=False)
    assert without_clock(folder) == without_clock(ordinary)
    assert Results.read(folder).info.command == "fedlens reproduce nobody/fig1 --scale minutes"
    assert made.command("nobody/fig1") == "fedlens reproduce nobody/fig1 --scale minutes"
    cost = json.loads((folder / "cost.json").read_bytes())
    assert (cost["runs"], cost["left_out"], cost["date"]) == (2, "", made.date)
    assert made.cpu_hours == round(cost["cpu_seconds"] / 3600, 4)
    assert cost["cpu_seconds"] > 0
    mean = 50 * sum(line.final("test_accuracy") or 0 for line in Results.read(folder).lines.values())
    [number] = made.numbers
    assert number["of"] == "FedAvg"
    assert number["here"].startswith(f"{mean:.1f} ±")
    assert number["paper"] == "about 50.0"
    assert made.metric == "Test accuracy (%)"
    assert made.outcome == (
        f"Test accuracy {mean:.1f} % (FedAvg), 2 seeds (0, 1). Claims: 1 shown, 1 not shown."
    )
    assert [(one["where"], one["verdict"]) for one in made.verdicts] == [
        ("figure 1", "shows"),
        ("section 1", "does not show"),
    ]
    assert atlas.toml.read_text(encoding="utf-8").startswith("# Studies that we have run.\n")
    show(Atlas(atlas.root, atlas.toml, atlas.scratch), None, None)
    shown = capsys.readouterr().out
    assert "1 record, 0 stale" in shown
    assert "0 studies next" in shown


def test_papers_take_turns_and_missing_data_and_records_are_left_out(atlas: Atlas, write: Write) -> None:
    for name, images in {"a/slow": 3, "a/quick": 1, "b/only": 9}.items():
        write(name, images)
    write("b/absent", data="inaturalist-user-120k")
    order, skipped = queue(atlas)
    assert [each.name for each in order] == ["a/quick", "b/only", "a/slow"]
    assert skipped == {("b/absent", "minutes"): "missing data: inaturalist-user-120k"}
    assert [each.scale for each in queue(atlas, "a", "paper")[0]] == ["paper", "paper"]
    with pytest.raises(ConfigError, match="a/quick"):
        queue(atlas, "a/quik")


class Stops(Heard):
    """Sends the signal of `kill` in a round of the first run."""

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        super().round_done(run, round, rounds)
        if len(self.rounds) == 3:
            signal.raise_signal(signal.SIGTERM)


def test_a_stopped_queue_continues_within_the_run_and_loses_nothing(
    atlas: Atlas, write: Write, tmp_path: Path
) -> None:
    write("nobody/fig1", rounds=5)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        work(atlas, jobs=0, progress=Stops())
    assert not records(atlas.toml)
    assert not (atlas.root / "docs").exists()
    spent = json.loads((atlas.scratch / "nobody/fig1/minutes/spent.json").read_bytes())
    heard = Heard()
    assert work(atlas, jobs=0, progress=heard) == 0
    first = heard.rounds[0]
    assert first[1] > 1, "the run goes on from its checkpoint"
    [made] = records(atlas.toml)["nobody/fig1"]
    Study.load(atlas.toml.parent / "nobody" / "fig1.toml", "minutes").run(
        tmp_path / "o", jobs=0, report=False
    )
    assert without_clock(atlas.root / made.folder) == without_clock(tmp_path / "o")
    cost = json.loads((atlas.root / made.folder / "cost.json").read_bytes())
    assert cost["seconds"] > spent["seconds"] > 0


PRETRAINED = """
[pretrained.pooled]
base = "digits"
set = { "model.name" = "linear", "rounds" = 2, "algorithm.name" = "centralized" }
[pretrained.short]
base = "digits"
set = { "model.name" = "linear", "rounds" = 1, "algorithm.name" = "centralized" }
[methods.fedavg.set]
"model.weights" = "pretrained:pooled"
[methods.other.set]
"model.weights" = "pretrained:short"
"""


class StopsIn(Heard):
    """Sends the signal of `kill` in the first round of a run."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        super().round_done(run, round, rounds)
        if run.key == self.run:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("tables", "stop", "left"),
    [
        ("", "fedavg-seed1", ["fedavg-seed1"]),
        (PRETRAINED, "other-seed1", ["short-pretrain-seed0", "other-seed1"]),
    ],
    ids=["plain", "one of two pre-trainings is needed again"],
)
def test_finished_runs_outlive_the_scratch_folder(
    atlas: Atlas,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tables: str,
    stop: str,
    left: list[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of pre-trainings
    monkeypatch.setattr(atlas_unfinished, "SECONDS", 0.0)
    write("nobody/fig1", seeds=[0, 1], tables=tables)
    home, pages = atlas.root / "docs/atlas/nobody/fig1/minutes", list[set[str]]()
    atlas = replace(atlas, write_pages=lambda: pages.append({path.name for path in home.iterdir()}))
    first = StopsIn(stop)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        work(atlas, jobs=0, progress=first)
    assert not records(atlas.toml)
    assert {path.name for path in home.iterdir()} == {*KEPT}
    assert pages == [{*KEPT}] * len(first.ended)
    plan = plan_of("nobody/fig1", "minutes")
    assert number_kept(home, plan) == len(first.ended)
    kept = {line["run"]: line for line in without_clock(home, UNFINISHED)}

    shutil.rmtree(atlas.scratch)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    second = Heard()
    assert work(atlas, jobs=0, progress=second) == 0
    assert second.ended == left
    assert pages[-1] >= {*FILES} - {"data.json"}
    assert not pages[-1] & {*KEPT}
    ordinary = tmp_path / "ordinary"
    Study.load(atlas.toml.parent / "nobody" / "fig1.toml", "minutes").run(ordinary, jobs=0, report=False)
    assert without_clock(home) == without_clock(ordinary)
    assert kept.items() <= {line["run"]: line for line in without_clock(home)}.items()
    whole, resumed = (Results.read(folder).info for folder in (ordinary, home))
    assert resumed == replace(whole, command=resumed.command)
    cost = json.loads((home / "cost.json").read_bytes())
    assert cost["runs"] == len(whole.entries) + len(whole.pretrained)


def test_kept_runs_of_other_settings_do_not_count(
    atlas: Atlas, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atlas_unfinished, "SECONDS", 0.0)
    write("nobody/fig1", seeds=[0, 1])
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        work(atlas, jobs=0, progress=StopsIn("fedavg-seed1"))
    home = atlas.root / "docs/atlas/nobody/fig1/minutes"
    write("nobody/fig1", seeds=[0, 1], rounds=3)
    assert number_kept(home, plan_of("nobody/fig1", "minutes")) == 0
    monkeypatch.setattr(atlas_unfinished, "MOST", 100)
    shutil.rmtree(atlas.scratch)
    heard = Heard()
    work(atlas, jobs=0, progress=heard)
    assert heard.ended == ["fedavg-seed0", "fedavg-seed1"]


def test_runs_are_kept_after_ten_minutes_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    kept, line = list[int](), next(iter(results(4).lines.values()))
    progress = KeepingProgress(heard := Heard(), lambda: kept.append(len(heard.ended)))
    run = planned(0)
    for seconds, status in ((350.0, "finished"), (350.0, "failed"), (1.0, "finished"), (599.0, "finished")):
        progress.run_ended(run, replace(line, facts={"seconds": seconds}, status=status))
    assert kept == [3]
    assert len(heard.ended) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="no other platform can")
def test_the_queue_leaves_all_cores_but_the_last() -> None:
    before = os.sched_getaffinity(0)
    try:
        pin_to_one_core()
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_the_pages_are_written_after_each_record(atlas: Atlas, write: Write) -> None:
    for name in ("a/one", "b/two"):
        write(name)
    pages = list[list[str]]()
    record(replace(atlas, write_pages=lambda: pages.append([*records(atlas.toml)])))
    assert pages == [["a/one"], ["a/one", "b/two"]]


def test_a_record_is_stale_when_a_setting_changes_and_not_when_a_title_does(
    atlas: Atlas, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("nobody/fig1")
    record(atlas)
    path = atlas.toml.parent / "nobody" / "fig1.toml"
    path.write_text(path.read_text("utf-8").replace("Made up", "Another title"), encoding="utf-8")
    assert replace(atlas).recorded == {("nobody/fig1", "minutes"): ""}
    assert queue(replace(atlas))[0] == []
    write("nobody/fig1", rounds=3)
    show(replace(atlas), None, None)
    shown = capsys.readouterr().out
    assert "1 record, 1 stale" in shown
    assert "stale: Changed: rounds: 3 instead of 2." in shown
    assert [each.name for each in queue(replace(atlas))[0]] == ["nobody/fig1"]
    assert record(replace(atlas)) == ["nobody/fig1"]
    [made] = records(atlas.toml)["nobody/fig1"]
    assert {line.rounds for line in Results.read(atlas.root / made.folder).lines.values()} == {3}


def test_a_failed_study_is_in_the_log_alone_and_the_queue_goes_on(
    atlas: Atlas, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "def net(*, classes):\n    raise RuntimeError('no such layer')\n", "utf-8"
    )
    write("a/broken", more=f'"model.name" = "{tmp_path}/broken.py:net", ')
    write("a/wrong", more=LINEAR + '"model.weights" = "nowhere.safetensors", ')
    write("b/whole")
    assert record(atlas) == ["b/whole"]
    rows = [json.loads(line) for line in (atlas.scratch / "failed.jsonl").read_text("utf-8").splitlines()]
    assert {(row["name"], row["scale"]) for row in rows} == {("a/broken", "minutes"), ("a/wrong", "minutes")}
    order, skipped = queue(replace(atlas))
    assert not order
    assert "1 of 1 run failed; the first is" in skipped["a/broken", "minutes"]
    assert "no such layer" in skipped["a/broken", "minutes"]
    assert "nowhere.safetensors" in skipped["a/wrong", "minutes"]
    assert [each.name for each in queue(replace(atlas), "a/broken")[0]] == ["a/broken"]
    write("a/broken")
    assert [each.name for each in queue(replace(atlas))[0]] == ["a/broken"], "its file has changed"


@pytest.mark.parametrize(
    "reason",
    [
        "diverged in round 3: The test loss has been more than 100 times the lowest value before",
        "no client update of round 17 was accepted: update holds NaN or Inf (2 of 2)",
    ],
)
def test_a_run_that_diverges_is_a_result(reason: str) -> None:
    whole = results(4, runs=1)
    line = replace(whole.lines["final0"], status="failed", reason=reason)
    assert diverged(line)
    assert not diverged(replace(line, reason="nowhere.safetensors does not exist"))
    lost = replace(whole, lines={**whole.lines, "final0": line})
    assert outcome(lost) == (
        "No cell has a value of test accuracy; 1 cell without a value, because runs diverged."
    )
    assert headline(lost)[1][0]["here"] == "failed (1 of 1)"


def test_a_second_queue_is_refused(atlas: Atlas, write: Write) -> None:
    write("nobody/fig1")
    atlas.scratch.mkdir()
    with (
        locked(atlas.scratch / ".lock", "the queue of the atlas"),
        pytest.raises(RunDirectoryError, match="the queue of the atlas is in use by process"),
    ):
        work(atlas)


def test_the_queue_ends_after_its_hours() -> None:
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(), at_most(1e-6):
        time.sleep(60)


def results(evaluations: int, runs: int = 3) -> Results:
    """Final and tuning runs with curves of so many evaluations."""

    def line(digest: str) -> Row:
        curve: dict[str, Any] = {"round": [*range(1, evaluations + 1)], "elapsed": [0.123456] * evaluations}
        curve["test_accuracy"] = [k / (2 * evaluations) for k in range(evaluations)]
        return Row(digest, digest, "finished", None, evaluations, "test_accuracy", curve)

    roles = ("final", "tune")
    entries = [Row.planned(f"{r}{k}", f"{r}{k}", "fedavg", {}, {}, r, k) for r in roles for k in range(runs)]
    info = StudyInfo(
        "s", "", [*range(runs)], None, 2, [0.4], "fedavg", {"fedavg": "FedAvg"}, {}, [{}], entries=entries
    )
    return Results(info, {entry.digest: line(entry.digest) for entry in entries})


def size(of: Results) -> int:
    return atlas_record._bytes(of)


def test_a_large_record_loses_evaluations_says_which_and_keeps_every_table() -> None:
    whole = results(400)
    assert thinned(whole, size(whole)) == (whole, "")
    small, lost = thinned(whole, size(whole) // 2)
    assert lost == f"{STEPS[0][0]}; {STEPS[1][0]}"
    summary = replace(whole, info=replace(whole.info, tables=[{"kind": "summary"}]))
    smaller, lost = thinned(summary, size(whole) // 15)
    assert lost.endswith("50 evaluations at equal distances and the last ones")
    for kept, full in ((small, whole), (smaller, summary)):
        assert [t.to_csv() for t in study_tables(kept)] == [t.to_csv() for t in study_tables(full)]
        assert kept.lines["final0"].curve["round"][-2:] == [399, 400]
    with pytest.raises(RecordRefused, match="the lines of the runs take"):
        thinned(whole, 100)


def test_a_table_of_rounds_to_a_target_keeps_the_evaluations_that_it_needs() -> None:
    whole = results(400)
    whole = replace(whole, info=replace(whole.info, tables=[{"kind": "targets"}]))
    with pytest.raises(RecordRefused, match="evaluate less often"):
        thinned(whole, size(whole) // 15)


def test_records_have_at_most_so_many_bytes_alone_and_together(
    atlas: Atlas, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("nobody/fig1")
    monkeypatch.setattr(atlas_record, "MOST_IN_ALL", 1000)
    assert record(atlas) == []
    log = (atlas.scratch / "failed.jsonl").read_text("utf-8")
    assert "all records take" in log
    monkeypatch.setattr(atlas_record, "MOST", 12_000)
    work(atlas, "nobody/fig1", jobs=0, progress=Heard())
    assert "the lines of the runs take" in (atlas.scratch / "failed.jsonl").read_text("utf-8")
    assert not [path for path in (atlas.root / "docs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "text", ["/home/somebody/data", "read from /tmp/data/x.csv", f"on {socket.gethostname()}"]
)
def test_a_record_never_names_the_machine(text: str) -> None:
    with pytest.raises(RecordRefused, match="names this machine"):
        refuse_machine(f'{{"a": "{text}"}}', "results.jsonl")


def test_ratios_and_recipes_are_no_paths() -> None:
    refuse_machine('"lr / (1 - momentum), images/s, fashion-mnist/fedavg, https://arxiv.org/abs/1, </g>"', "")
