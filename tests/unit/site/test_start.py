"""A site as a process: it stops when it is told to, also in the middle of an operation."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.files.chained_log import read_chained
from fedlens.identity.private_files import one_writer, private_folder
from fedlens.site.answers_log import NAME
from fedlens.site.leave import come_back, leave
from fedlens.site.start import agent_of

_SCRIPT = """
import sys
from pathlib import Path

import torch

from fedlens.site.start import work
from tests.unit.site.site_kit import write_site
from tests.unit.site.test_agent import Server, Site

site, server = Site(Path(sys.argv[1])), Server()
settings = write_site(Path(sys.argv[1]))

def endless(payload, client):
    print("computing", flush=True)
    while True:
        torch.randn(200, 200) @ torch.randn(200, 200)

site.operation.instead = endless
server.ask()
print("left:", work(site.agent(server), site.folder, settings), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_ends_a_site_in_the_middle_of_an_operation(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "left: False\n", "")
    assert all("kind" in values for values, _, _ in read_chained(tmp_path / "site" / "log" / NAME))  # no ask
    assert f'"stopped","reason":"{number.name}"' in (tmp_path / "site" / "log" / "site.jsonl").read_text()


def test_a_site_that_leaves_ends_another_process_in_the_middle_of_an_operation(tmp_path: Path) -> None:
    command, folder = [sys.executable, "-c", _SCRIPT, str(tmp_path)], tmp_path / "site"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        leave(folder)  # returns when no other process holds the folder
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "left: True\n", "")
    kinds = [values.get("kind") for values, _, _ in read_chained(folder / "log" / NAME)]
    assert kinds[-1] == "left"
    assert None not in kinds  # no ask has a line
    assert '"stopped","reason":"this site has left"' in (folder / "log" / "site.jsonl").read_text()
    with pytest.raises(ConfigError, match="this site left the federation on"):
        agent_of(folder, print)
    come_back(folder)
    with pytest.raises(ConfigError) as refused:  # of site.toml, which this folder has none of
        agent_of(folder, print)
    assert "left" not in str(refused.value)
    with pytest.raises(ConfigError, match="has not left"):
        come_back(folder)


def test_a_folder_that_does_not_become_free_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlens.site.leave._PATIENCE", 0.0)
    with (
        one_writer(private_folder(tmp_path / "site")),
        pytest.raises(IdentityError, match="another process uses"),
    ):
        leave(tmp_path / "site")
    with pytest.raises(ConfigError, match="this site left"):
        agent_of(tmp_path / "site", print)
