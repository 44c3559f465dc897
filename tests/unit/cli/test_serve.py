"""`fedlens serve`: what it refuses in a sentence, and how an interruption is reported."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.identity.federation_folder import FederationFolder
from fedlens.server import serve as serving
from tests.unit.identity.federation_kit import federation_in, joined
from tests.unit.server.serve_kit import Wards

runner = CliRunner()


@pytest.fixture
def wards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wards:
    monkeypatch.chdir(tmp_path)
    return Wards(tmp_path)


def refused(*arguments: str | Path) -> str:
    """The sentence of a command that fails."""
    answer = runner.invoke(app, ["serve", *map(str, arguments)])
    assert answer.exit_code in (1, 2), answer.output
    assert answer.stderr.startswith("error: ")
    assert "unexpected" not in answer.stderr
    return answer.stderr


def test_wrong_commands_are_refused_in_sentences(wards: Wards, tmp_path: Path) -> None:
    file, folder = wards.experiment, wards.federation.registry.folder
    assert "is not the folder of a federation" in refused(file, "--federation", "nowhere")
    FederationFolder.create(tmp_path / "early", ("127.0.0.1", 443), None).request_issuer()
    assert "early has no site" in refused(file, "--federation", tmp_path / "early", "--bind", "127.0.0.1:0")
    assert "local.lr" in refused(file, "--federation", folder, "--set", "local.lr=-1")
    assert "not at sites" in refused("digits", "--federation", folder)
    assert "HOST:PORT" in refused(file, "--federation", folder, "--bind", "8443")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen at port" in refused(file, "--federation", folder, "--bind", busy)
    few = refused(file, "--federation", folder, "--bind", "127.0.0.1:0", "--set", "engine.patience=0.01")
    assert "0 of 3 accepted sites have answered" in few
    (tmp_path / "new").mkdir()
    empty = federation_in(tmp_path / "new")
    assert "fedlens federation invite" in refused(file, "--federation", empty.folder)
    empty.invite("ward-a")  # which can join while the server listens
    bind = ("--bind", "127.0.0.1:0", "--out", tmp_path / "other", "--set", "engine.patience=0.01")
    assert "0 of 0 accepted sites" in refused(file, "--federation", empty.folder, *bind)
    joined(empty, "ward-b", tmp_path / "new")
    assert "0 of 1 accepted sites" in refused(file, "--federation", empty.folder, *bind)


def test_a_missing_extra_is_named(wards: Wards, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("fedlens.server.serve", "fedlens.engines.links"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    sentence = refused(wards.experiment, "--federation", wards.federation.registry.folder)
    assert "needs aiohttp" in sentence
    assert "pip install 'fedlens[network]'" in sentence


def test_an_interruption_says_how_to_go_on(wards: Wards, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving.CensusLink, "gather", interrupted)
    arguments = [
        "serve",
        str(wards.experiment),
        "--federation",
        "hospitals",
        "--bind",
        "127.0.0.1:0",
        "--until",
        "2099-01-31",
        "--agreement",
        "agreement.pdf",
        "--out",
        "run",
    ]
    Path("agreement.pdf").write_text("The agreement.")
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 130
    assert "resume with: fedlens serve" in answer.stderr
    terms = "--until 2099-01-31 --agreement agreement.pdf"
    assert f"--federation hospitals --bind 127.0.0.1:0 {terms} --out run" in answer.stderr
    assert "listening at 127.0.0.1:" in answer.stdout
    assert json.loads((Path("run") / "serve.json").read_text())["attempt"] == 1
