"""A run read from its directory: each file when it is asked for, the later of two lines of a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.base.errors import RunDirectoryError
from fedlens.results.run import Run, read_run
from tests.unit.results.fake_run import line, make_run


def test_the_later_of_two_lines_of_a_round_counts(tmp_path: Path) -> None:
    lines = [line(at, test_accuracy=value) for at, value in ((0, 0.1), (1, 0.2), (1, 0.3), (2, 0.4))]
    assert read_run(make_run(tmp_path, metrics=lines)).series("test_accuracy") == ([0, 1, 2], [0.1, 0.3, 0.4])


def test_a_file_is_read_when_it_is_asked_for_and_once(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path))
    run.metrics_path.write_text("{no json\n{}\n")
    assert run.config["seed"] == 0
    with pytest.raises(RunDirectoryError):
        _ = run.metrics
    with pytest.raises(RunDirectoryError):
        read_run(run.path)
    run.config_path.unlink()
    assert run.config["seed"] == 0


def test_what_a_run_has_not_written_is_empty_or_none(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path, summary={}))
    assert (run.status, run.summary, run.recordings) == ("running", {}, {})
    assert run.evaluation is run.examples is run.held_out is None
    with pytest.raises(RunDirectoryError, match="has not ended, so it has no model"):
        run.model()


def test_a_damaged_file_of_the_test_is_an_error_and_a_damaged_partition_none(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path))
    run.partition_path.write_bytes(b"no partition")
    run.evaluation_path.symlink_to(tmp_path / "gone")
    assert run.partition is None
    with pytest.raises(RunDirectoryError):
        _ = run.evaluation
