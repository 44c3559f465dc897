"""The table's numbers follow from the pairs; the files say the same."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError, RunDirectoryError, RunFailed
from fedlens.benchmark.comparison import ComparisonRow, ratio, rows_of
from fedlens.benchmark.interleave import Kind, Measurement
from fedlens.benchmark.picture import draw
from fedlens.benchmark.results_file import as_record, write
from tests.unit.benchmark.fakes import TINY, Fake

BARE, HAND, SLOW, FAST, PEER = (
    [1.00, 1.10, 0.90, 1.00],
    [0.10, 0.10, 0.20, 0.10],
    [1.20, 1.10, 1.00, 1.40],
    [0.50, 0.60, 0.40, 0.50],
    [5.00, 6.00, 8.00, 7.00],
)


def measured(name: str, kind: Kind, seconds: list[float], reason: str | None = None) -> Measurement:
    about = {"processes": 2, "threads": 1}
    return Measurement(name, kind, lambda: Fake(name, iter(()), []), about, seconds, 2.5, reason)


@pytest.fixture
def rows() -> list[ComparisonRow]:
    measurements = [
        measured("limit, contiguous", "limit", BARE),
        measured("bmm by hand", "by hand", HAND),
        measured("slow", "fedlens", SLOW),
        measured("fast", "fedlens", FAST),
        measured("Toy 1", "peer", PEER),
        measured("Gone 2", "peer", [], "it cannot be installed: no such version"),
    ]
    return rows_of(TINY, measurements)


def test_every_number_is_of_the_pairs(rows: list[ComparisonRow]) -> None:
    limit, by_hand, slow, fast, peer, _ = rows
    assert [row.images_per_s for row in rows[:5]] == [
        60 / statistics.median(seconds) for seconds in (BARE, HAND, SLOW, FAST, PEER)
    ]
    assert slow.to_limit == ratio(BARE, SLOW)
    assert fast.to_by_hand == ratio(HAND, FAST)
    assert peer.fedlens_to_it == ratio(PEER, FAST)  # of the fastest engine
    assert (limit.to_limit, limit.to_by_hand, limit.overhead_ms) == (None, None, None)
    assert (by_hand.to_by_hand, slow.fedlens_to_it) == (None, None)
    assert slow.overhead_ms == pytest.approx(statistics.median([200, 0, 100, 400]) / TINY.cohort)
    assert slow.start_up == 2.5


@pytest.mark.parametrize(("more", "within"), [(0.0129, True), (0.0131, False), (-0.5, True)])
def test_the_target_is_a_millisecond_a_client_and_one_percent(more: float, within: bool) -> None:
    bare = [1.0] * 12  # three clients: 3 ms and 10 ms
    measurements = [
        measured("bare PyTorch", "limit", bare),
        measured("own", "fedlens", [seconds + more for seconds in bare]),
    ]
    assert rows_of(TINY, measurements)[1].within_target is within


def test_the_limit_is_the_fastest_layout_of_bare_pytorch() -> None:
    rows = rows_of(
        TINY,
        [
            measured("limit, contiguous", "limit", BARE),
            measured("limit, channels last", "limit", FAST),
            measured("own", "fedlens", SLOW),
        ],
    )
    assert [row.name for row in rows] == ["limit, contiguous", "limit", "own"]
    assert rows[0].to_limit == ratio(FAST, BARE)
    assert rows[2].to_limit == ratio(FAST, SLOW)


def test_what_did_not_run_has_a_row_and_no_number(rows: list[ComparisonRow]) -> None:
    gone = rows[-1]
    assert (gone.reason, gone.seconds) == ("it cannot be installed: no such version", ())
    assert {gone.images_per_s, gone.to_limit, gone.fedlens_to_it, gone.overhead_ms} == {None}


def test_without_the_limit_the_others_have_their_speed() -> None:
    measurements = [measured("bare PyTorch", "limit", [], "no memory"), measured("own", "fedlens", FAST)]
    limit, own = rows_of(TINY, measurements)
    assert (limit.reason, own.to_limit, own.overhead_ms) == ("no memory", None, None)
    assert own.images_per_s == 60 / 0.5


def test_the_file_has_all_that_the_numbers_come_from(rows: list[ComparisonRow], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "figures.json"
    write(as_record(rows, [TINY], ["fedlens", "bench", "linear"]), file)
    read = json.loads(file.read_text(encoding="utf-8"))
    assert set(read) == {"format", "environment", "workloads", "rows"}
    assert {"python", "torch", "fedlens", "cpu", "memory", "command"} <= set(read["environment"])
    assert read["environment"]["command"] == "fedlens bench linear"
    assert read["workloads"]["tiny"] == {**vars(TINY), "model": "linear", "shape": [1, 28, 28]}
    by_name = {row["name"]: row for row in read["rows"]}
    assert by_name["fast"]["seconds"] == FAST
    again = ratio(by_name["limit"]["seconds"], by_name["fast"]["seconds"])
    assert by_name["fast"]["to_limit"] == {"median": again.median, "low": again.low, "high": again.high}
    assert by_name["Gone 2"]["reason"].startswith("it cannot be installed")
    with pytest.raises(RunDirectoryError, match=r"cannot be written.*figures\.json"):
        write(read, file / "below-a-file.json")


def test_the_picture_has_a_bar_for_every_row(rows: list[ComparisonRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    draw(rows, tmp_path / "all.svg")
    svg = (tmp_path / "all.svg").read_text(encoding="utf-8")
    for text in (
        "limit, 2 x 1",
        "fast, 2 x 1",
        "120   2.00 x the limit",
        "did not run",
        "images per second",
    ):
        assert f"<!-- {text} -->" in svg
    with pytest.raises(ConfigError, match=r"--picture.*\.png"):
        draw(rows, tmp_path / "all.txt")
    with pytest.raises(RunFailed, match="could not be written"):
        draw(rows, tmp_path / "all.png" / "below-a-file.png")


def test_without_matplotlib_it_says_which_extra(
    rows: list[ComparisonRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"fedlens\[plot\]"):
        draw(rows, tmp_path / "all.png")
