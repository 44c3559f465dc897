"""A table or a figure that cannot be is refused when the study file is read, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError
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
            r"unknown setting 'spred' .*line 9: .*did you mean 'spread'",
        ),
        (
            '[[tables]]\nkind = "summary"\ninterval = "bootstrap"',
            r"the option 'interval' was removed .*line 9: .*t intervals",
        ),
        (
            '[[tables]]\nkind = "summary"\nwhere = { alpha = 1 }',
            r"no dimension 'alpha' .*line 9: \[\[tables\]\] 2 where",
        ),
        ('[[tables]]\nkind = "ranks"', r"'ranks' was removed .*line 8: .*take kind = 'differences'"),
        ('[[tables]]\nkind = "relative"', r"no method 'centralized' .*line 7: \[\[tables\]\] 2 to"),
        ('[[tables]]\nkind = "targets"', r"needs a target \(.*line 7: \[\[tables\]\] 2\)"),
        ('[[figures]]\nkind = "curve"', r"'curve' .*line 8: \[\[figures\]\] 1 kind\); did you mean 'curves'"),
        ('[[figures]]\nkind = "setting"\nx = "lrr"', r"'lrr' .*line 9: \[\[figures\]\] 1 x\)"),
    ],
)
def test_a_wrong_table_or_figure_is_refused_with_its_line(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f"{STUDY}{table}\n")
    with pytest.raises(ConfigError, match=message):
        StudyPlan.load(file)
