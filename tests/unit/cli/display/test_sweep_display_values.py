"""The line of a run that ended: which value it shows."""

from __future__ import annotations

from fedlens.cli.display.sweep_display import outcome
from fedlens.results.rows import Row

LINE = Row(
    "0f",
    "r",
    "finished",
    None,
    1,
    "test_accuracy",
    {"round": [1], "test_accuracy": [0.8], "validation_accuracy": [0.7]},
)


def test_a_run_of_tuning_shows_its_value_on_validation_data() -> None:
    assert outcome(LINE, "tune") == "validation accuracy 70.0 %"
    assert outcome(LINE) == outcome(LINE, "final") == "test accuracy 80.0 %"
