"""The table of algorithms by task is what building them says."""

import pytest

from tools.task_table import PAGE, rendered, works


@pytest.mark.nightly
def test_the_table_is_what_building_each_pair_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run: python -m tools.task_table"


def test_a_rule_that_works_and_an_engine_that_does_not() -> None:
    assert works("moon", "classification", "inline")
    assert not works("fedbn", "classification", "vectorized")
