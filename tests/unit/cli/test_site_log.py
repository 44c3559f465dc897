"""`fedlens site log` and `fedlens site show`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.site.log_export import AskedLog
from tests.unit.identity.federation_kit import federation_in, joined
from tests.unit.site.test_log_export import site_in


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of a site that was asked three times."""
    folder = tmp_path / "ward-a"
    folder.mkdir(mode=0o700)
    joined(federation_in(tmp_path), "ward-a", tmp_path / "keys")
    (tmp_path / "keys" / "ward-a").rename(folder / "keys")
    site_in(folder, sent=True)
    return folder


def ran(folder: Path, *arguments: str, code: int = 0) -> str:
    answer = CliRunner().invoke(app, ["site", *arguments, "--folder", str(folder)])
    assert answer.exit_code == code, answer.output
    return answer.output


def test_the_lines_are_shown_verified_and_exported(site: Path) -> None:
    shown = ran(site, "log", "--last", "2").splitlines()
    assert [line.split()[4:7] for line in shown[1:3]] == [["3", "train", "a"], ["purged", "files", "1"]]
    assert shown[3].startswith("the chain of 9 lines holds; its head is ")
    assert "the chain of 9 lines holds" in ran(site, "log", "--verify")
    told = json.loads(ran(site, "log", "--json"))
    assert (told["lines"], len(told["asks"])) == (9, 3)
    ran(site, "log", "--export", str(site / "audit"))
    assert (site / "audit.csv").is_file()
    assert "What left ward-a" in (site / "audit.html").read_text()
    text = ran(site, "show", told["asks"][0]["answer"][:8])
    assert text.count("update.weight  ") == 1
    assert "update.weight float32[2,2]" in text
    assert "█▁▁█▁▁█▁▁█" in text


def test_the_log_is_read_after_the_keys_are_deleted(site: Path) -> None:
    shutil.rmtree(site / "keys")
    assert "the chain of 9 lines holds" in ran(site, "log", "--verify")
    ran(site, "log", "--export", str(site / "audit"))
    assert "What left ward-a" in (site / "audit.html").read_text()
    assert "update.weight float32[2,2]" in ran(site, "show", AskedLog.read(site).asks[0]["ask"])
    shutil.rmtree(site / "log")
    assert "is not the folder of a site" in ran(site, "log", code=2)


def test_a_damaged_log_is_exit_code_1_of_verify(site: Path) -> None:
    path = site / "log" / "asked.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":4'))
    assert "the log is damaged in line 7: the line was changed" in ran(site, "log", "--verify", code=1)
    assert "damaged in line 7" in ran(site, "log", code=2)


def test_the_log_fits_a_narrow_terminal(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    shown = ran(site, "log", "--last", "4").splitlines()
    assert shown[0] == "run run, approved by reviewer, ward-a"
    assert shown[1:5] == [
        "  2027-01-15 08:00  1 train a, answered, 264 B, 2 fields",
        "  2027-01-15 08:00  2 train a, answered, 264 B, 2 fields",
        "  2027-01-15 08:00  3 train a, refused, policy, 0 B",
        "  2027-01-15 08:00  purged, files 1",
    ]
    monkeypatch.setenv("COLUMNS", "200")
    assert "approved by" in ran(site, "log").splitlines()[0]


def test_an_answer_whose_body_was_not_kept_is_shown_as_the_log_has_it(site: Path) -> None:
    shutil.rmtree(site / "sent")
    digest = json.loads(ran(site, "log", "--json"))["asks"][0]["head"]
    text = ran(site, "show", digest)
    assert "update.weight float32[2,2]" in text
    assert text.count("note: no values are shown: bodies are kept with [keep] sent = true") == 1
    assert "of ask, answer, payload or head of one line" in " ".join(
        ran(site, "show", "0" * 9, code=2).split()
    )
