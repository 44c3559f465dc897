"""What a run of sites shows: a table on a terminal, a line when a state changes elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from fedlens.cli.display.serve_display import ServeDisplay
from fedlens.server.progress import SiteRow

ROWS = [
    SiteRow("ward-a", "online", 3.0, 1),
    SiteRow("ward-b", "refused", None, 0, "contract"),
    SiteRow("ward-c", "late", 90.0, 2),
]


def shown(terminal: bool, *all_rows: list[SiteRow], quiet: bool = False) -> str:
    out = io.StringIO()
    display = ServeDisplay(
        Console(file=out, force_terminal=terminal, width=100, color_system=None), quiet, beating=False
    )
    display.waiting(Path("runs/wards/1"), "127.0.0.1:8443", "20261128-014605-d6ee")
    for rows in all_rows:
        display.sites(rows)
        display.tick()
    display.close()
    return out.getvalue()


def test_a_line_says_when_a_state_changes() -> None:
    lines = shown(False, ROWS, ROWS, ROWS[:1]).splitlines()
    assert lines[0] == "listening at 127.0.0.1:8443, run 20261128-014605-d6ee, run directory: runs/wards/1"
    assert lines[1:] == [
        "3 sites: 1 refused (ward-b: contract), 1 late, which means not heard of for a while (ward-c), "
        "1 online (ward-a)",
        "1 site: 1 online (ward-a)",
    ]


def test_a_terminal_shows_a_table_with_the_troubled_first() -> None:
    text = shown(True, ROWS)
    table = [line.split() for line in text.splitlines() if line.strip().startswith("ward-")]
    assert [row[:2] for row in table[:3]] == [["ward-b", "refused"], ["ward-c", "late"], ["ward-a", "online"]]
    assert "never" in table[0]
    assert "contract" in table[0]
    assert "not heard of for a while" in text
    assert "waiting for the sites" in text


def test_a_table_of_many_sites_is_cut() -> None:
    many = [SiteRow(f"site-{k:03}", "online", 1.0, 1) for k in range(100)]
    text = shown(True, many)
    assert "site-019" in text
    assert "site-020" not in text
    assert "100 sites: 100 online (site-000, " in text


def test_quiet_shows_nothing() -> None:
    assert shown(False, ROWS, quiet=True) == ""


def test_a_run_follows_the_wait_and_may_start_again() -> None:
    out = io.StringIO()
    display = ServeDisplay(Console(file=out, width=100), beating=False)
    display.waiting(Path("runs/wards/1"), "127.0.0.1:8443", "1")
    plan = {
        "directory": "runs/wards/1",
        "rounds": 3,
        "name": "wards",
        "algorithm": "fedavg",
        "dataset": "sites",
    }
    for _ in range(2):  # a dropped round starts the run again
        display.started(plan)
        display.round_done({"round": 1, "seconds": 1.0, "elapsed": 1.0})
    display.close()
    assert out.getvalue().count("round 1/3") == 2
    assert display.directory == Path("runs/wards/1")
