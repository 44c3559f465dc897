"""The files of a study's results, those of other versions too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlens.base.errors import DataError, RunDirectoryError
from fedlens.results.rows import Results, write_info, write_lines
from fedlens.results.tables import study_tables
from tests.unit.results.study_fake import results_of

# Of a study file at version 0.1.0 with a table [clock] and with widening, from before both were removed.
OF_AN_OLDER_VERSION = {
    "clock": {"images_per_second": 100.0, "up_mbit": 1.0, "down_mbit": 10.0},
    "tuning": {"on": "validation", "seeds": [7, 8], "budget": 4, "refit": True, "search": "grid", "widen": 8},
}


def written(folder: Path) -> Results:
    results = results_of({None: {"fedavg": [0.5, 0.6], "fedadam": [0.7, 0.8]}})
    write_info(folder, results.info)
    write_lines(folder / "results.jsonl", results.lines.values())
    return results


def test_fields_of_other_versions_are_no_obstacle(tmp_path: Path) -> None:
    tables = [table.to_csv() for table in study_tables(written(tmp_path))]
    info = json.loads((tmp_path / "study.json").read_text())
    info |= {"clock": OF_AN_OLDER_VERSION["clock"], "weather": "fair"}
    info["entries"] = [{**entry, "colour": 1} for entry in info["entries"]]
    (tmp_path / "study.json").write_text(json.dumps(info))
    rows = [json.loads(row) for row in (tmp_path / "results.jsonl").read_text().splitlines()]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps({**row, "mood": 3}) + "\n" for row in rows))
    assert [table.to_csv() for table in study_tables(Results.read(tmp_path))] == tables


def test_the_tuning_of_an_older_version_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    info = json.loads((tmp_path / "study.json").read_text()) | OF_AN_OLDER_VERSION
    (tmp_path / "study.json").write_text(json.dumps(info))
    tables = study_tables(Results.read(tmp_path))
    assert [table.name for table in tables] == ["summary", "differences", "choices"]


def test_a_field_that_is_missing_or_no_table_is_still_a_damage(tmp_path: Path) -> None:
    written(tmp_path)
    info = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps({key: info[key] for key in info if key != "seeds"}))
    with pytest.raises(DataError, match=r"study\.json is corrupt: .*'seeds'"):
        Results.read(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps({**info, "entries": [1]}))
    with pytest.raises(DataError, match=r"study\.json is corrupt"):
        Results.read(tmp_path)
    write_info(tmp_path, results_of({None: {"fedavg": [0.5]}}).info)
    (tmp_path / "results.jsonl").write_text('{"digest": "a"}\n')
    with pytest.raises(RunDirectoryError, match="a line is not of a run"):
        Results.read(tmp_path)
