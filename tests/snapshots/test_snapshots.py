"""What users see in tables, pages and figures is what the snapshots say; `write.py` has how they change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedlens
from fedlens.pages import render
from fedlens.results import tables
from fedlens.results.figures import study_figures
from tests.snapshots import study_snapshots
from tests.snapshots.figures import builders, watched
from tests.snapshots.kit import EXPECTED
from tests.snapshots.write import SNAPSHOTS, left_over

pytestmark = pytest.mark.pictures

ANEW = (
    "If users are to see this, write it with `python -m tests.snapshots.write {}`, and say why in the commit."
)

# It hands on what another function makes: the map of a dataset that is read.
HANDED_ON = {"read_places_map"}


class Made:
    """The texts of the snapshots, each made once, and the functions that made a figure for them."""

    def __init__(self, builders: set[tuple[str, str]]) -> None:
        self.builders, self.text = builders, cache(lambda name: SNAPSHOTS[name]())


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    with watched() as seen:
        yield Made(seen)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_users_see_is_what_the_snapshot_says(name: str, made: Made) -> None:
    assert (EXPECTED / name).is_file(), ANEW.format(name)
    lines, expected = made.text(name).splitlines(), (EXPECTED / name).read_text("utf-8").splitlines()
    assert lines == expected, ANEW.format(name)


def test_every_function_that_makes_a_figure_takes_part_in_a_snapshot(made: Made) -> None:
    for name in SNAPSHOTS:
        made.text(name)
    missing = builders(Path(fedlens.__file__).parent) - made.builders
    assert {name for _, name in missing} == HANDED_ON, "draw their figures in tests/snapshots/*_snapshots.py"


def test_no_snapshot_is_left_over_and_all_are_small() -> None:
    assert left_over() == [], "run: python -m tests.snapshots.write"
    assert sum(path.stat().st_size for path in EXPECTED.rglob("*") if path.is_file()) < 1_000_000


def test_each_option_of_each_kind_of_table_and_figure_has_a_snapshot() -> None:
    common = set(options(tables._common)) - {"kind"}
    given = {(spec["kind"], key) for _, spec in study_snapshots.TABLES.values() for key in spec}
    assert common <= {key for _, key in given}
    assert {(kind, key) for kind, make in tables.TABLES.items() for key in options(make)} <= given
    drawn = {(spec["kind"], key) for _, spec in study_snapshots.FIGURES.values() for key in spec}
    assert set(options(study_figures._common)) <= {key for _, key in drawn} | {"name"}  # of its file
    assert {(kind, key) for kind, make in study_figures.FIGURES.items() for key in options(make)} <= drawn


def test_every_card_of_a_page_is_in_a_snapshot() -> None:
    pages = "".join(path.read_text("utf-8") for path in (EXPECTED / "pages").iterdir())
    templates = Path(render.__file__).parent / "templates"
    titles = {
        title
        for path in templates.glob("*.html.j2")
        if path.name != "asked_log.html.j2"  # `tests/unit/site/test_log_export.py` reads that page
        for match in re.findall(r'card\("([^"]+)"|<h[23][^>]*>([^<{]+)</h', path.read_text("utf-8"))
        for title in match
        if title
    }
    titles.discard("Sites that were not evaluated")  # of a run over sites: `tests/unit/site/test_policy.py`
    assert len(titles) > 30
    assert sorted(title for title in titles if f"# {title}" not in pages) == []


def options(make: object) -> list[str]:
    """The keys of a kind in a study file."""
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
