"""What a run has left at a site goes after `[keep] days`, or by hand, with a line in the log of the site."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.base.format import many
from fedlens.cli.main import app
from fedlens.files.chained_log import read_chained
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.private_files import one_writer
from fedlens.site.answers_log import NAME, AnswersLog, AskRefused, note_decision
from fedlens.site.client_logs import LOGS, ClientLogs
from fedlens.site.kept_states import KeptStates
from fedlens.site.retention import purge_site
from fedlens.site.settings import SITE_FILE, SiteSettings
from tests.unit.cli.commands import ran, refused, runner
from tests.unit.site.ask_kit import SITE, answer_of, ask_of
from tests.unit.site.site_kit import write_site

DAY, NOW = 86_400.0, 1_000_000_000.0
SECRET = os.urandom(32)


def answered(folder: Path, run: str, days: float) -> None:
    """A run that asked so many days ago, whose client keeps a state, and whose answer the server may not have."""
    then, ask = NOW - days * DAY, ask_of(run=run, nonce=run.encode().ljust(16))
    log = AnswersLog(folder / "log", folder / "work", lambda: then, sent=folder / "sent")
    log.keep(ask, answer_of(ask, SECRET, log.state[1]), SECRET + run.encode())
    log.close()
    state = torch.frombuffer(bytearray(SECRET + run.encode().ljust(32)), dtype=torch.uint8)
    KeptStates(folder / "states", lambda: then).put(ask, {"w": state})
    logs = ClientLogs(folder / LOGS, FileCipher(SITE))
    logs.put(run, "a", {"runs": {run: {}}, "models": [*logs.get(run, "a")["models"], run.encode()]})


def having(folder: Path, content: bytes) -> list[str]:
    """The files below a folder that contain these bytes."""
    return sorted(
        path.parent.name for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    write_site(tmp_path)
    tmp_path.chmod(0o700)
    answered(tmp_path, "old-run", 31)
    answered(tmp_path, "new-run", 29)
    assert (
        having(tmp_path, SECRET + b"old-run")
        == having(tmp_path, SECRET + b"new-run")
        == ["sent", "states", "work"]
    )
    return tmp_path


def test_a_run_that_is_due_leaves_no_byte_and_a_line(site: Path) -> None:
    log = (site / "log" / NAME).read_bytes()
    folders = {LOGS: 1, "sent": 1, "states": 1, "work": 1}
    assert purge_site(site, 30, NOW) == {"old-run": folders}
    assert having(site, SECRET + b"old-run") == []
    assert having(site, SECRET + b"new-run") == ["sent", "states", "work"]
    assert (site / "log" / NAME).read_bytes().startswith(log)
    line, _, _ = list(read_chained(site / "log" / NAME))[-1]
    assert (line["kind"], line["run"], line["files"]) == ("purged", "old-run", 4)
    logs = ClientLogs(site / LOGS, FileCipher(SITE))
    assert logs.get("new-run", "a")["runs"] == {"new-run": {}}
    assert logs.get("old-run", "a") == {
        "runs": {},
        "models": [b"old-run", b"new-run"],
    }  # none is summed again
    lines = (site / "log" / NAME).read_bytes()
    assert purge_site(site, 30, NOW) == {}
    assert (site / "log" / NAME).read_bytes() == lines  # 'site start' looks every day


def test_a_purged_answer_is_never_computed_again(site: Path) -> None:
    log = AnswersLog(site / "log", site / "work")
    purge_site(site, 30, NOW)
    for opened in (log, AnswersLog(site / "log", site / "work")):
        with pytest.raises(AskRefused, match="acknowledged"):
            opened.find(ask_of(run="old-run", nonce=b"old-run".ljust(16)))


def test_a_run_is_purged_by_name(site: Path) -> None:
    assert "no run 'other'" in refused("site", "purge", "other", "--folder", site)
    assert "a run or --due" in refused("site", "purge", "--folder", site)
    assert "give a whole name of: old-run, new-run" in refused("site", "purge", "new", "--folder", site)
    removed = "client-logs (1 file), sent (1 file), states (1 file), work (1 file)"
    for lines, files in ((1, 4), (2, 0)):  # what a person asks for has a line in any case
        said = ran("site", "purge", "new-run", "--folder", site)
        nothing = "nothing: no state and no stored answer of it is here"
        assert said.startswith(f"removed of new-run: {removed if files else nothing}\n")
        assert f"stays: its {many(lines, 'line')} of the log, and one on this; approvals and names" in said
        line, _, _ = list(read_chained(site / "log" / NAME))[-1]
        assert (line["kind"], line["run"], line["files"]) == ("purged", "new-run", files)
    assert having(site, SECRET) == ["sent", "states", "work"]
    (site / SITE_FILE).write_text((site / SITE_FILE).read_text() + "[keep]\ndays = 36500\n")
    assert "nothing is due" in ran("site", "purge", "--due", "--folder", site)
    with one_writer(site), pytest.raises(IdentityError, match="another process uses the folder"):
        purge_site(site, 30, NOW)


def test_a_run_that_has_not_asked_yet_is_purged_too(site: Path) -> None:
    note_decision(site, {"kind": "approved", "run": "early-run", "time": 1})
    said = ran("site", "purge", "early-run", "--folder", site)
    assert said.startswith("removed of early-run: nothing: no state and no stored answer of it is here\n")


def test_a_purge_that_is_interrupted_has_a_line_on_what_is_gone(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(states: KeptStates, run: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(KeptStates, "purge", interrupted)
    answer = runner.invoke(app, ["site", "purge", "new-run", "--folder", str(site)])
    assert answer.stderr == "interrupted: the command had not ended; run it again\n"
    line, _, _ = list(read_chained(site / "log" / NAME))[-1]
    assert (line["kind"], line["files"]) == ("purged", 3)


def test_retention_is_a_setting_of_the_site(site: Path) -> None:
    assert SiteSettings.read(site / SITE_FILE).keep.days == 365
    (site / SITE_FILE).write_text((site / SITE_FILE).read_text() + "[keep]\ndays = 0\n")
    with pytest.raises(ConfigError, match=r"keep\.days"):
        SiteSettings.read(site / SITE_FILE)
