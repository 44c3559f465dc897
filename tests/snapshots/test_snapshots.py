"""What users see in tables, pages and figures is what the snapshots say; `write.py` has how they change."""

from __future__ import annotations

import inspect

import pytest

from fedlens.report import study_figures, study_tables
from tests.snapshots import study_snapshots
from tests.snapshots.kit import EXPECTED
from tests.snapshots.write import SNAPSHOTS, left_over

ANEW = (
    "If users are to see this, write it with `python -m tests.snapshots.write {}`, and say why in the commit."
)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_users_see_is_what_the_snapshot_says(name: str) -> None:
    assert (EXPECTED / name).is_file(), ANEW.format(name)
    lines, expected = SNAPSHOTS[name]().splitlines(), (EXPECTED / name).read_text("utf-8").splitlines()
    assert lines == expected, ANEW.format(name)


def test_no_snapshot_is_left_over_and_all_are_small() -> None:
    assert left_over() == [], "run: python -m tests.snapshots.write"
    assert sum(path.stat().st_size for path in EXPECTED.rglob("*") if path.is_file()) < 1_000_000


def test_each_option_of_each_kind_of_table_and_figure_has_a_snapshot() -> None:
    common = set(options(study_tables._common)) - {"kind"}
    given = {(spec["kind"], key) for _, spec in study_snapshots.TABLES.values() for key in spec}
    assert common <= {key for _, key in given}
    assert {(kind, key) for kind, make in study_tables.TABLES.items() for key in options(make)} <= given
    drawn = {(spec["kind"], key) for _, spec in study_snapshots.FIGURES.values() for key in spec}
    assert set(study_figures._COMMON) <= {key for _, key in drawn} | {"name"}  # of its file
    assert {(kind, key) for kind, make in study_figures.FIGURES.items() for key in options(make)} <= drawn


def options(make: object) -> list[str]:
    """The keys of a kind in a study file."""
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
