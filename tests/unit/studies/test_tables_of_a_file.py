"""A table that cannot be is refused when the study file is read, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.core.errors import ConfigError
from fedlens.studies.study_plan import StudyPlan

STUDY = """base = "digits"
seeds = [0, 1]
[grid]
"local.lr" = [0.1, 0.3]
[[tables]]
kind = "summary"
"""


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[[tables]]\nkind = "sumary"', r"'sumary' .*study.toml, line 8: .*kind.; did you mean 'summary'"),
        (
            '[[tables]]\nkind = "summary"\nspred = "none"',
            r"no option 'spred' .*line 9: .*did you mean 'spread'",
        ),
        (
            '[[tables]]\nkind = "summary"\ninterval = "bootstrap"',
            r"at least 30 seeds, and this table has 2: .*line 9",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f"{STUDY}{table}\n")
    with pytest.raises(ConfigError, match=message):
        StudyPlan.load(file)


def test_ranks_alone_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY.replace("summary", "ranks"))
    with pytest.raises(ConfigError, match=r"'ranks' is the only one: .*tables"):
        StudyPlan.load(file)
