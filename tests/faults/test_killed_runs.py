"""Runs that are killed, interrupted, or run out of disk, and go on to the numbers of one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.run_kit import experiment, lives, of_another_kind, outcome, summary

ROUNDS = 6


def plain(name: str = "ref") -> dict[str, Any]:
    return {"args": ["run", "run.toml", "--out", name, "--json"]}


def auto(**how: Any) -> dict[str, Any]:
    return {"args": "auto", "out": "broken", **how}


def at_random(number: str) -> list[dict[str, Any]]:
    """Ten ends: five soon after a round is written down, and before each of these one before any round is."""
    draw = random.Random(number)
    plan = []
    for _ in range(5):
        plan += [auto(after=draw.uniform(0.0, 0.3), signal=number)]
        plan += [auto(lines=1, after=draw.uniform(0.0, 0.1), signal=number)]
    return plan


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([*range(1, 40, 10), 60, 40], id="every tenth"),
        pytest.param(
            [*range(1, 40, 2), *range(2, 40, 4), 60, 80, 50, 40, 70, 30], id="each", marks=pytest.mark.nightly
        ),
    ],
)
def test_killed_at_each_step_of_writing_it_ends_with_the_same_bits(tmp_path: Path, steps: list[int]) -> None:
    """Each life gets further: before, in and after the saves of the first rounds, and of the last ones."""
    experiment(tmp_path, rounds=ROUNDS)
    with lives(tmp_path) as play:
        first, *rest = play([plain(), *(auto(call=n, signal="SIGKILL") for n in steps), auto()])
    assert first["code"] == 0, first["err"]
    codes = [life["code"] for life in rest]
    assert codes[-1] == 0, rest[-1]["err"]
    assert codes.count(-signal.SIGKILL) >= len(steps) // 2, codes
    assert set(codes) <= {0, -signal.SIGKILL}, rest
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "ref")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "algorithm",
    [
        'name = "dsgd"',
        'name = "push-sum"',
        'name = "gradient-tracking"',
        'name = "splitfed"\ncut = "1"\nkeep_optimizer = true',
        'name = "split-relay"\ncut = "1"',
        'name = "fedma"',
        'name = "vertical"',
        'name = "fedgkt"\ncut = "1"\nclient = { name = "small-cnn", width = 4, norm = "none" }',
        'name = "fednas"',
        'name = "own.py:stateful"\n[aggregate]\nname = "secagg"\nthreshold = 0.75',
    ],
    ids=[
        "dsgd",
        "push-sum",
        "gradient-tracking",
        "splitfed",
        "split-relay",
        "fedma",
        "vertical",
        "fedgkt",
        "fednas",
        "secagg",
    ],
)
def test_algorithms_of_other_kinds_killed_while_they_write_end_with_the_same_bits(
    tmp_path: Path, algorithm: str
) -> None:
    """What clients and the server's holder keep between rounds comes from the checkpoint, boxes from nowhere."""
    of_another_kind(tmp_path, algorithm)
    with lives(tmp_path) as play:
        first, *rest = play([plain(), *(auto(call=n, signal="SIGKILL") for n in (3, 12, 20, 33, 25)), auto()])
    assert first["code"] == 0, first["err"]
    codes = [life["code"] for life in rest]
    assert codes[-1] == 0, rest[-1]["err"]
    assert codes.count(-signal.SIGKILL) >= 3, (codes, rest)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "ref")


@pytest.mark.nightly  # at each step of writing above
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    experiment(tmp_path, rounds=10, epochs=3)
    with lives(tmp_path) as play:
        first, second, *rest = play([plain(), plain("again"), *at_random("SIGKILL"), auto()])
    assert (first["code"], second["code"], rest[-1]["code"]) == (0, 0, 0), rest[-1]["err"]
    assert [life["code"] for life in rest].count(-signal.SIGKILL) >= 8, [life["code"] for life in rest]
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "ref") == outcome(tmp_path / "again")


@pytest.mark.nightly  # in the middle of a save, and in real processes below
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_interrupted_at_random_moments_it_says_how_to_go_on(tmp_path: Path, number: str) -> None:
    experiment(tmp_path, rounds=10, epochs=3)
    with lives(tmp_path) as play:
        first, *rest = play([plain(), *at_random(number), auto()])
    assert first["code"] == rest[-1]["code"] == 0, rest[-1]["err"]
    codes = [life["code"] for life in rest]
    assert set(codes) <= {0, 130, -getattr(signal, number)}, (
        codes
    )  # the last: not yet in fedlens, or not any more
    told = [life for life in rest if life["code"] == 130 and life["err"]]
    assert len(told) >= 5, codes
    for life in told:
        assert "Traceback" not in life["err"]
        last = life["err"].rstrip().splitlines()[-1]
        summed = json.loads(life["out"]) if life["out"] else {}
        assert summed.get("status", "interrupted") == "interrupted"
        if "directory" in summed:
            assert last == "interrupted: resume with: fedlens resume broken"
        else:
            assert last in (
                "interrupted: nothing was started",
                "interrupted: the command had not ended; run it again",
            )
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "ref")


@pytest.mark.parametrize(
    "calls", [range(8, 34, 13), pytest.param(range(8, 34, 5), marks=pytest.mark.nightly)], ids=["two", "six"]
)
def test_interrupted_in_mid_save_it_goes_on(tmp_path: Path, calls: range) -> None:
    experiment(tmp_path, rounds=3)
    plan = [how for n in calls for how in (auto(call=n, signal="SIGINT"), auto())]
    for at, life in enumerate(plan):
        life["out"] = f"broken {at // 2}"
    with lives(tmp_path) as play:
        first, *rest = play([plain(), *plan])
    assert first["code"] == 0, first["err"]
    assert [life["code"] for life in rest] == [130, 0] * len(calls), rest
    for at in range(len(calls)):
        run = tmp_path / f"broken {at}"
        assert summary(run)["status"] == "finished"
        assert outcome(run) == outcome(tmp_path / "ref")


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(("SIGKILL", "SIGINT"), id="two"),
        pytest.param(("SIGKILL", "SIGINT", "SIGTERM"), id="three", marks=pytest.mark.nightly),
    ],
)
def test_with_workers_killed_and_interrupted_it_has_the_numbers_of_one_process(
    tmp_path: Path, ends: tuple[str, ...]
) -> None:
    """Kill, Ctrl-C, terminate, and the other engine without any of it."""
    experiment(tmp_path, "processes", rounds=8, epochs=3)
    plan = [auto(lines=2 if number == "SIGKILL" else 1, after=0.03, signal=number) for number in ends]
    alone = plain() | {"args": [*plain()["args"], "--engine", "inline"]}
    with lives(tmp_path) as play:
        *cut, last, whole = play([*plan, auto(), alone])
    assert [life["code"] for life in (*cut, last, whole)] == [-9, *[130] * (len(ends) - 1), 0, 0], (
        cut,
        last,
        whole,
    )
    for life in (*cut, last):
        assert "Traceback" not in life["err"]
    for life in cut[1:]:
        assert life["err"].splitlines()[-1] == "interrupted: resume with: fedlens resume broken"
        assert json.loads(life["out"])["status"] == "interrupted"
    broken, ref = outcome(tmp_path / "broken"), outcome(tmp_path / "ref")
    assert (broken["summary"].pop("engine"), ref["summary"].pop("engine")) == ("processes", "inline")
    assert broken == ref


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    experiment(tmp_path, rounds=ROUNDS)
    with lives(tmp_path) as play:
        first, killed = play([plain(), auto(call=40, signal="SIGKILL")])
        before = sorted(
            path.name for path in (tmp_path / "broken/checkpoint").iterdir() if "." not in path.name
        )
        full, resumed = play([auto(limit=12_000), auto()])
    assert (first["code"], killed["code"], full["code"], resumed["code"]) == (0, -9, 1, 0), (full, resumed)
    assert before
    assert (
        full["err"].startswith("error: the checkpoint of round ")
        or "error: the checkpoint of round" in full["err"]
    )
    assert "fedlens resume broken" in full["err"]
    assert "Traceback" not in full["err"]
    told = json.loads(full["out"])
    assert told["status"] == "failed"
    assert "could not be written" in told["error"]["what"]
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "ref")


@pytest.mark.nightly  # a limit of the size of a file above; a checkpoint alone in unit/run/test_checkpoint.py
def test_a_small_file_system_that_is_full(tmp_path: Path) -> None:
    """The real thing, where one may be mounted: a run on a disk of its own that somebody else fills."""
    mount = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=1m tmpfs "{small}" || exit 77; exec "$@"'
    if shutil.which("unshare") is None or os.system(
        "unshare --user --map-root-user --mount true 2>/dev/null"
    ):
        pytest.skip("no small file system can be mounted here")
    experiment(tmp_path, rounds=40)
    out = str(small / "run")
    with lives(tmp_path) as play:
        (life,) = play(
            [{"args": ["run", "run.toml", "--out", out, "--json", "--set", "model.width=64"]}],
            prefix=(*mount, script, "sh"),
        )
    assert life["code"] == 1, life
    assert "the disk is full, so " in life["err"]
    assert "Traceback" not in life["err"]
