"""A run that was edited while it was stopped: `resume` names what differs, and continues only where it is told to."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import resume
from fedlens.base.errors import FedlensError
from fedlens.cli.main import app
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from tests.faults.run_kit import outcome, summary
from tests.faults.test_run_directories import ROUNDS, Stops, here, stopped  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_workers")

EDITS = {
    "local.lr": ("lr = 0.05", "lr = 0.5", "local.lr is 0.5, was 0.05"),
    "a seed": ("seed = 3", "seed = 4", "seed is 4, was 3"),
    "a derived seed": (
        r"training = \d+",
        "training = 7",
        r"seeds\.training is 7, was \d+",
    ),
    "more rounds": (f"rounds = {ROUNDS}", "rounds = 8", f"rounds is 8, was {ROUNDS}"),
    "the model's width": ("width = 4", "width = 8", "model.width is 8, was 4"),
    "what was not set": ("lr = 0.05", "lr = 0.05\nclip_norm = 1.0", "local.clip_norm is 1.0, was not set"),
    "the partition": ("alpha = 0.5", "alpha = 5.0", "data.partition.alpha is 5.0, was 0.5"),
    "threads": ("threads = 1", "threads = 2", "engine.threads is 2, was 1"),
    "another engine": (
        r'name = "inline"(?s:.*?)channels_last = "auto"\n',
        'name = "vectorized"\n',
        'engine.name is "vectorized", was "inline"',
    ),
}


def edit(run: Path, before: str, after: str) -> None:
    text = (run / "config.toml").read_text()
    edited = re.sub(before, after.replace("\\", "\\\\"), text, count=1)
    assert edited != text
    (run / "config.toml").write_text(edited)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_setting_is_refused_with_both_values(here: Path, name: str) -> None:  # noqa: F811
    before, after, said = EDITS[name]
    edit(here / "run", before, after)
    kept = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    answer = CliRunner().invoke(app, ["resume", "run", "--json"])
    assert answer.exit_code == 2, answer.stderr
    pattern = said if "\\" in said else re.escape(said)
    assert re.match(f"error: config.toml was edited since round 4: {pattern} \\(", answer.stderr), (
        answer.stderr
    )
    assert "fedlens resume run --accept-changes" in answer.stderr
    assert answer.stderr.count("\n") == 1
    now = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    assert {p: b for p, b in now.items() if p.name != ".lock"} == {
        p: b for p, b in kept.items() if p.name != ".lock"
    }


def test_all_edits_are_named_at_once(here: Path) -> None:  # noqa: F811
    edit(here / "run", "lr = 0.05", "lr = 0.5")
    edit(here / "run", "seed = 3", "seed = 4")
    with pytest.raises(
        FedlensError, match=r"local\.lr is 0\.5, was 0\.05; seed is 4, was 3 \(run/config\.toml\)"
    ):
        resume("run")


FREE = [
    ('name = "inline"', 'name = "processes"\nworkers = 2'),
    ('name = "faults"', 'name = "another"'),
    ("cache = 2.0", "cache = 0.5"),
    ("seconds = 0.0", "seconds = 9.0"),
    ("overlap = false", "overlap = true"),
]


def test_what_changes_no_number_may_be_edited(here: Path) -> None:  # noqa: F811
    for before, after in FREE[1:]:
        edit(here / "run", before, after)
    assert resume("run").summary["changes"] == []
    left, right = outcome(here / "run"), outcome(here / "ref")
    assert left.pop("summary")["name"] == "another"
    del right["summary"]
    assert left == right
    edit(here / "run", *FREE[0])
    assert resume("run").summary["changes"] == []  # finished, and still compared


@pytest.mark.report_page
def test_accepted_changes_are_in_the_summary_the_page_and_the_next_checkpoints(here: Path) -> None:  # noqa: F811
    edit(here / "run", f"rounds = {ROUNDS}", "rounds = 7")
    edit(here / "run", "lr = 0.05", "lr = 0.01")
    answer = CliRunner().invoke(app, ["resume", "run", "--accept-changes"])
    assert answer.exit_code == 0, answer.output
    assert "accepted: local.lr is 0.01, was 0.05" in answer.output
    wanted = [
        {"after_round": 4, "key": "local.lr", "before": 0.05, "after": 0.01},
        {"after_round": 4, "key": "rounds", "before": ROUNDS, "after": 7},
    ]
    assert summary(here / "run")["changes"] == wanted
    assert summary(here / "run")["rounds_done"] == 7
    page = (here / "run/report.html").read_text()
    assert re.search(r"local\.lr</td>\s*<td[^>]*>0\.05</td>\s*<td[^>]*>0\.01</td>", page)
    # Once accepted, they are the settings of the run, also for a later change.
    assert resume("run").summary["changes"] == wanted
    edit(here / "run", "rounds = 7", "rounds = 8")
    with pytest.raises(FedlensError, match="edited since round 7: rounds is 8, was 7"):
        resume("run")
    last = {"after_round": 7, "key": "rounds", "before": 7, "after": 8}
    assert resume("run", accept_changes=True).summary["changes"] == [*wanted, last]


def test_a_finished_run_can_be_trained_for_longer(here: Path) -> None:  # noqa: F811
    from fedlens import Experiment

    edit(here / "ref", f"rounds = {ROUNDS}", "rounds = 6")
    assert resume("ref", accept_changes=True).summary["rounds_done"] == 6
    longer = Experiment.load("run.toml", ["rounds=6"]).run("longer").directory
    assert outcome(here / "ref")["model"] == outcome(longer)["model"]


def test_other_changes_of_a_finished_run_are_refused_though_accepted(here: Path) -> None:  # noqa: F811
    edit(here / "ref", "lr = 0.05", "lr = 0.5")
    for more in ([], ["--accept-changes"]):
        answer = CliRunner().invoke(app, ["resume", "ref", *more])
        assert answer.exit_code == 2
        assert answer.stderr.startswith(
            "error: the run is finished, and config.toml was edited since: local.lr is 0.5, was 0.05 (ref/config.toml"
        )
        assert "start a new run with these settings: 'fedlens run ref/config.toml --out DIR'" in answer.stderr
        assert "--accept-changes" not in answer.stderr


def test_rounds_that_are_done_cannot_be_taken_back(here: Path) -> None:  # noqa: F811
    edit(here / "run", f"rounds = {ROUNDS}", "rounds = 3")
    for accept in (False, True):
        with pytest.raises(
            FedlensError, match=r"^rounds is 3, but 4 rounds are done \(run/config\.toml, line 3: rounds\)"
        ):
            resume("run", accept_changes=accept)


def test_a_change_that_the_checkpoint_cannot_hold_is_refused_though_accepted(here: Path) -> None:  # noqa: F811
    edit(here / "run", "width = 4", "width = 8")
    with pytest.raises(
        FedlensError, match=r"do not fit the checkpoint: model\.\S+ has shape \(.*\) in it, and \("
    ):
        resume("run", accept_changes=True)


def test_a_run_of_a_version_that_saved_no_settings_is_resumed_with_a_note(here: Path) -> None:  # noqa: F811
    for path in (here / "run/checkpoint").iterdir():
        loaded = checkpoint.load(path)
        states = loaded.payload["client_files"].values()
        checkpoint.save(here / "run/checkpoint", loaded.round, loaded.payload, states)
    told = Stops()
    resume("run", progress=told)
    assert any("saved no settings" in note for note in told.notes)
    assert outcome(here / "run") == outcome(here / "ref")


def test_a_run_of_a_version_that_saved_no_digest_of_lines_is_resumed_with_a_note(here: Path) -> None:  # noqa: F811
    for path in (here / "run/checkpoint").iterdir():
        forged(path, lambda content: content["about"].update(client_lines=content["about"].pop("lines")))
    change_value(here / "run/metrics.jsonl", 1)
    told = Stops()
    resume("run", progress=told)
    (note,) = [note for note in told.notes if "saved no digest of metrics.jsonl and clients.jsonl" in note]
    assert note.startswith("an older version of fedlens ")


CUTS = {
    "metrics.jsonl": {
        "an end": (lambda lines: lines[:2], "rounds 2 to 3 are missing"),
        "a middle": (lambda lines: lines[:1] + lines[2:], "round 1 is missing"),
        "all": (lambda lines: [], "rounds 0 to 3 are missing"),
        "a double": (lambda lines: [lines[1], *lines], "round 1 is there more than once"),
    },
    "clients.jsonl": {
        "a line": (lambda lines: lines[1:], r"\d+ of \d+ lines are there"),
        "all": (lambda lines: [], r"rounds 1 to 3 are missing"),
    },
}


@pytest.mark.parametrize(("file", "cut"), [(file, cut) for file, cuts in CUTS.items() for cut in cuts])
def test_missing_lines_are_noticed_and_named(here: Path, file: str, cut: str) -> None:  # noqa: F811
    change, said = CUTS[file][cut]
    path = here / "run" / file
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(FedlensError, match=f"^{file} was edited or cut: {said}, and the run is at round 4"):
        resume("run")
    done = resume("run", accept_changes=True)
    assert done.summary["status"] == "finished"
    (noted,) = done.summary["changes"]
    assert noted["key"] == file
    assert re.fullmatch(said, noted["after"])


def change_value(path: Path, at: int) -> None:
    """Makes the loss of a line better than it was."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[at] |= {"local_loss": 0.001} if path.name == "metrics.jsonl" else {"loss": 0.001}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_line(path: Path, at: int) -> None:
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:at], '{"note": "mine"}\n', *rows[at:]]))


@pytest.mark.parametrize(
    ("file", "edited", "at", "said"),
    [
        ("metrics.jsonl", change_value, 2, "line 3 was changed"),
        ("metrics.jsonl", add_line, 4, "line 5 was added"),
        ("clients.jsonl", change_value, 5, "line 6 was changed"),
        ("clients.jsonl", add_line, 0, "line 1 was changed"),
    ],
)
def test_an_edited_line_is_refused_by_its_number_and_continued_when_accepted(
    here: Path,  # noqa: F811
    file: str,
    edited: Callable[[Path, int], None],
    at: int,
    said: str,
) -> None:
    path = here / "run" / file
    edited(path, at)
    kept = path.read_bytes()
    answer = CliRunner().invoke(app, ["resume", "run", "--quiet"])
    assert answer.exit_code == 2
    assert answer.stderr == (
        f"error: {file} was edited or cut: {said}, and the run is at round 4 (run/{file}); restore the file, or "
        "continue with it as it is: fedlens resume run --accept-changes.\n"
    )
    assert path.read_bytes() == kept
    edit(here / "run", f"rounds = {ROUNDS}", "rounds = 8")
    with pytest.raises(KeyboardInterrupt):
        resume("run", accept_changes=True, progress=Stops(6), report=False)
    rounds, lines = [change for change in summary(here / "run")["changes"] if change["after_round"] == 4]
    assert (rounds["key"], lines["key"], lines["after"]) == ("rounds", file, said)
    assert path.read_bytes().startswith(kept)
    # The accepted lines are the run's from then on, and a second edit of the same line is another one.
    with pytest.raises(KeyboardInterrupt):
        resume("run", progress=Stops(7), report=False)
    path.write_bytes(path.read_bytes().replace(b"0.001", b"0.002").replace(b"mine", b"yours"))
    with pytest.raises(FedlensError, match=rf"^{file} was edited or cut: line {at + 1} was changed"):
        resume("run", report=False)


def test_edited_lines_are_named_before_rounds_are_repeated(here: Path) -> None:  # noqa: F811
    change_value(here / "ref/metrics.jsonl", 1)
    answer = CliRunner().invoke(app, ["analyze", "ref", "--record", "5"])
    assert answer.exit_code == 2
    assert answer.stderr == (
        "error: metrics.jsonl was edited or cut: line 2 was changed, and the run is at round 4 (ref/metrics.jsonl); "
        "restore the file, or continue with it as it is: fedlens analyze ref --record 5 --accept-changes.\n"
    )
    assert not list((here / "ref").glob(".repeated*"))
    answer = CliRunner().invoke(app, ["analyze", "ref", "drift", "--record", "5", "--accept-changes"])
    assert answer.exit_code == 0, answer.output


def test_accepted_missing_lines_are_not_asked_about_again(here: Path) -> None:  # noqa: F811
    for file in ("metrics.jsonl", "clients.jsonl"):
        path = here / "run" / file
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["round"] != 2))
    edit(here / "run", f"rounds = {ROUNDS}", "rounds = 8")
    with pytest.raises(KeyboardInterrupt):
        resume("run", accept_changes=True, progress=Stops(6), report=False)
    keys = ["rounds", "metrics.jsonl", "clients.jsonl"]
    assert [change["key"] for change in summary(here / "run")["changes"]] == keys
    with pytest.raises(KeyboardInterrupt):
        resume("run", progress=Stops(7), report=False)
    assert [change["key"] for change in summary(here / "run")["changes"]] == keys
    path = here / "run/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(FedlensError, match=r"^metrics\.jsonl was edited or cut: rounds 0 and 2 are missing"):
        resume("run")


@pytest.mark.parametrize("forged", ['{"clients": 8}', '{"clients": 8, "round": "two"}'])
def test_a_line_without_a_round_is_not_counted(here: Path, forged: str) -> None:  # noqa: F811
    path = here / "run/metrics.jsonl"
    path.write_text(f"{forged}\n{path.read_text()}")
    (here / "run/clients.jsonl").write_text("")
    with pytest.raises(FedlensError, match=r"^clients\.jsonl was edited or cut: rounds 1 to 3 are missing"):
        resume("run")
    assert RunDir(here / "run").truncate_metrics(3) == 1


def test_a_page_without_changes_does_not_speak_of_any(here: Path) -> None:  # noqa: F811
    from fedlens.pages.run_page import write_report

    page = write_report(here / "ref").read_text()
    assert "Changes</h2>" not in page
    assert json.loads(RunDir(here / "ref").summary_path.read_text())["changes"] == []


def forged(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Writes a manifest anew, with a checksum that fits."""
    content = json.loads(re.fullmatch(rb'.*?"content": (.*)\}\n', (path / "manifest.json").read_bytes())[1])  # type: ignore[index]
    text = change(content)
    text = (text if isinstance(text, str) else json.dumps(content)).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s", "content": %s}\n' % (digest, text))


def at(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


PAYLOAD = ("payload", "map")
FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda content: "[1]",
    "deep": lambda content: "[" * 100_000,
    "round": at("round", value="4"),
    "tensors": at("tensors", value=[1]),
    "states": at("states", value=["../../../mine"]),
    "about": at("about", value=3),
    "payload": at("payload", value={"tensor": "/nowhere"}),
    "payload of numbers": at("payload", value=[1, 2]),
    "dtype": at(*PAYLOAD, "state", value={"tensor": "/state/model/0.weight", "dtype": "load", "shape": [1]}),
    "shape": at(
        *PAYLOAD, "state", value={"tensor": "/state/model/0.weight", "dtype": "int8", "shape": [10**30]}
    ),
    "state": at(*PAYLOAD, "state", value={"map": {"model": {"map": {}}}}),
    "state of a number": at(*PAYLOAD, "state", value=7),
    "line": at(*PAYLOAD, "line", value={"map": {"round": 2}}),
    "rows": at(*PAYLOAD, "rows", value=[1]),
    "best": at(*PAYLOAD, "best", value={"map": {"round": "../.."}}),
    "clients": at(*PAYLOAD, "clients", value={"map": {"x": {"map": {}}}}),
    "a path": at(*PAYLOAD, "client_files", value={"map": {"3": "../../mine"}}),
    "failures": at(*PAYLOAD, "failures", value=[3]),
    "changes and settings": lambda content: content["about"].update(changes=3, settings={"local.lr": 9}),
    "settings": at("about", "settings", value={"local.lr": {"deep": [1]}}),
    "traffic": at(*PAYLOAD, "traffic", value={"map": {"clients": {"map": {"train": {"map": {"asks": 3}}}}}}),
    "own files": at("about", "own_files", value={"own.py": [1]}),
    "lines": at(
        "about", "lines", value={"metrics.jsonl": {"lines": -1, "every": 1, "sha256": "a", "marks": [[1]]}}
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_one_sentence_or_passed_over(here: Path, name: str) -> None:  # noqa: F811
    mine = here / "mine.safetensors"
    mine.write_bytes(b"mine")
    for path in (here / "run/checkpoint").iterdir():
        forged(path, FORGERIES[name])
    answer = CliRunner().invoke(app, ["resume", "run", "--quiet"])
    assert answer.exit_code == 2, answer.output
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.count("\n") == 1
    assert "unexpected" not in answer.stderr
    assert mine.read_bytes() == b"mine"
