from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fedlens
from tests.unit.cli import fake_api

if TYPE_CHECKING:
    from fedlens.engines.links.https import HttpsLink
    from fedlens.identity.federation_folder import FederationFolder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(fake_api.RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Any]]:
    """`api("finishes")` puts the experiment that trains nothing in place; returns the list of its calls."""
    monkeypatch.chdir(tmp_path)

    def put(ending: str) -> list[Any]:
        calls: list[Any] = []
        module = fake_api.make_api(ending, calls)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(fedlens, "api", module, raising=False)
        return calls

    return put


def command(arguments: list[str], ending: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of `fedlens ...` in a process of its own."""
    fake = f"from tests.unit.cli.fake_api import install; install({ending!r}); " if ending else ""
    code = f"{fake}from fedlens.cli.main import main; main()"
    source = Path(fedlens.__file__).parents[1]  # a broken copy, in tests.mutations
    path = os.pathsep.join([str(source), str(ROOT)])
    return [sys.executable, "-W", "error", "-c", code, *arguments], {**os.environ, "PYTHONPATH": path}


# For each line of JSON, a folder and arguments: runs `fedlens` in a fork, and says how it ended and what it imported.
FORKS = """
import json, os, sys
from fedlens.cli.main import main
for line in sys.stdin:
    folder, arguments = json.loads(line)
    reading, writing = os.pipe()
    if os.fork() == 0:
        code = "no exit code"
        try:
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.argv[1:] = arguments
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            with os.fdopen(writing, "w") as file:
                json.dump([code, list(sys.modules)], file)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        print(file.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported() -> Iterator[Callable[[list[str], Path], set[str]]]:
    """The modules that a process has after a command, which has to succeed."""
    argv, env = command([])
    argv[argv.index("-c") + 1] = FORKS
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def modules(arguments: list[str], folder: Path) -> set[str]:
            print(json.dumps([str(folder), arguments]), file=process.stdin, flush=True)
            code, found = json.loads(process.stdout.readline())
            assert code == 0
            assert "fedlens.cli.main" in found
            return set(found)

        yield modules
        process.stdin.close()


@pytest.fixture
def fedlens_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `fedlens ...` as a process, with its two streams apart."""

    def start(*arguments: str, ending: str | None = None) -> subprocess.CompletedProcess[str]:
        argv, env = command(list(arguments), ending)
        return subprocess.run(
            argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return start


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the passphrase of the root and data of a site."""
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "pw"
    from tests.unit.identity.federation_kit import ROOT

    secret.write_bytes(ROOT + b"\n")
    secret.chmod(0o600)
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "scans.csv").write_text("path,label,patient\na.png,no,p1\n")
    return tmp_path


@pytest.fixture
def federation(here: Path) -> FederationFolder:
    """The folder `hospitals`."""
    from tests.unit.identity.federation_kit import federation_in

    return federation_in(here)


@pytest.fixture
def server(here: Path) -> Iterator[tuple[FederationFolder, HttpsLink]]:
    """The folder `hospitals` and its server, which listens."""
    from fedlens.identity.federation_folder import FederationFolder
    from tests.link_kit import Federation

    kit = Federation(here)
    with kit.link() as link:
        file = kit.registry.folder / "federation.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "port": kit.port}))
        yield FederationFolder(kit.registry.folder), link
