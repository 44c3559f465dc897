"""Peers are driven over two lines; whatever they do wrong is one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import peer as peers
from benchmarks.peer import SCRIPTS, Peer, PeerProcess, as_argument, chosen, installed, known_peers
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.benchmark.arrangements import Arrangement
from fedlens.benchmark.limit import WORKLOADS
from tests.unit.benchmark.fakes import GOOD, TINY, peer

ONE = Arrangement(1, 1)
PYTHON = Path(sys.executable)


def driven(one: Peer, **seconds: float) -> PeerProcess:
    return PeerProcess(one, PYTHON, TINY, ONE, **{"start_seconds": 30.0, "round_seconds": 30.0, **seconds})


def test_rounds_are_what_the_peer_says(tmp_path: Path) -> None:
    candidate = driven(peer(tmp_path / "driver.py", GOOD))
    assert [candidate.round() for _ in range(3)] == [0.25, 0.5, 0.75]
    candidate.close()
    assert candidate._process.returncode == 0


def test_it_is_told_what_to_train_and_nothing_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    source = f"""
import json, os, sys
told = [sys.argv[1:], {{k: v for k, v in os.environ.items() if k.startswith(("PYTHON", "FEDLENS", "OMP"))}}]
open({str(tmp_path / "told.json")!r}, "w").write(json.dumps(told))
"""
    one = peer(tmp_path / "driver.py", source + GOOD)
    PeerProcess(one, PYTHON, TINY, Arrangement(3, 2)).close()
    (load, *way), environment = json.loads((tmp_path / "told.json").read_text())
    assert json.loads(load) == {**vars(TINY), "model": "linear", "shape": [1, 28, 28]}
    assert way == ["--processes", "3", "--threads", "2"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert Path(environment["FEDLENS_LIMIT"]).name == "limit.py"
    assert "PYTHONPATH" not in environment


def test_a_mode_reaches_the_driver(tmp_path: Path) -> None:
    source = f"import sys\nopen({str(tmp_path / 'told')!r}, 'w').write(' '.join(sys.argv[-2:]))\n"
    driven(replace(peer(tmp_path / "driver.py", source + GOOD), mode="threads")).close()
    assert (tmp_path / "told").read_text() == "--mode threads"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
def test_it_stands_still_while_the_others_have_their_turn(tmp_path: Path) -> None:
    candidate = driven(peer(tmp_path / "driver.py", GOOD))
    stat = Path(f"/proc/{candidate._process.pid}/stat")
    for _ in range(2):
        deadline = time.monotonic() + 10
        while stat.read_text().split()[2] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stat.read_text().split()[2] == "T"
        candidate.round()
    candidate.close()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ImportError('no module named toy')",
            "it ended with code 1: ImportError: no module named toy",
        ),
        ("import os; os._exit(3)", "it ended with code 3: no message"),
        ("import time; time.sleep(60)", r"it did not start within 0\.5 s"),
        ("print('hello')", "it wrote 'hello' in place of 'ready'"),
        ("print('[1]')", r"it wrote '\[1\]' in place of 'ready'"),
    ],
)
def test_what_does_not_start_says_why(tmp_path: Path, source: str, says: str) -> None:
    hangs, began = "sleep" in source, time.monotonic()
    with pytest.raises(RunFailed, match=says):
        driven(peer(tmp_path / "driver.py", source), start_seconds=0.5 if hangs else 30.0)
    assert time.monotonic() - began < peers.END_SECONDS  # what hangs is not waited for


READY = "import os, sys, time\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('3 of 10 replies failed')", "RuntimeError: 3 of 10 replies failed"),
        ("os.kill(os.getpid(), 9)", "it ended with code -9"),
        ("time.sleep(60)", r"it did not finish a round within 0\.5 s"),
        ("print('{}')", "in place of 'seconds'"),
    ],
)
def test_what_fails_in_a_round_says_why_and_leaves_nothing(
    tmp_path: Path, source: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "END_SECONDS", 0.2)
    child = (
        "import subprocess\nother = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    )
    tell = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\n"
    candidate = driven(
        peer(tmp_path / "driver.py", READY.replace("\nprint", f"\n{child}{tell}print") + source),
        round_seconds=0.5 if "sleep" in source else 3600.0,  # an end is noticed long before
    )
    with pytest.raises(RunFailed, match=says):
        candidate.round()
    candidate.close()
    assert candidate._process.returncode is not None
    if sys.platform != "win32":
        assert gone(int((tmp_path / "pid").read_text()))


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_peer_that_stands_still_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    driver = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
import turns
turns.end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
    benchmark = f"""
import os, signal, subprocess, sys
peer = subprocess.Popen([sys.executable, "-c", {driver!r}], stdout=subprocess.PIPE, start_new_session=True)
peer.stdout.readline()
peer.send_signal(signal.SIGSTOP)
print(peer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", benchmark], capture_output=True, text=True, timeout=300)
    assert gone(int(done.stdout))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The install script as a module, whose pip is a fake: it writes down what it was given, or fails."""
    spec = importlib.util.spec_from_file_location("install_peer", SCRIPTS / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        with (tmp_path / "pip.log").open("a", encoding="utf-8") as log:
            print(*command[3:], file=log)
        return subprocess.CompletedProcess(command, 1 if "broken==1" in command else 0)

    def create(home: Path, **_: object) -> None:
        (home / "bin").mkdir(parents=True, exist_ok=True)
        (home / "installed.json").unlink(missing_ok=True)

    monkeypatch.setattr(module.subprocess, "run", pip)
    monkeypatch.setattr(module.venv, "create", create)
    return module


def test_an_environment_is_made_once_and_anew_when_it_is_another_or_half_made(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*requirements: str) -> int:
        monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "env"), *requirements])
        return int(install.main())

    def times() -> int:
        return len((tmp_path / "pip.log").read_text().splitlines())

    assert run("torch==2", "toy==1") == 0
    assert run("torch==2", "toy==1") == 0
    assert times() == 1
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "env" / "bin" / "python")] * 2
    assert run("torch==3", "toy==1") == 0
    assert times() == 2
    assert run("torch==3", "broken==1") == 1
    assert capsys.readouterr().out.count("python") == 1  # where it failed there is none
    assert run("torch==3", "broken==1") == 1
    assert run("torch==3", "toy==1") == 0
    assert times() == 5


def test_what_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "nothing==1"
        assert command[-2] == f"torch=={peers.torch_version()}"
        errors = "WARNING: retrying\nERROR: No matching distribution found for nothing==1\n\nnotice: new pip"
        return subprocess.CompletedProcess(command, 1, "", errors)

    monkeypatch.setattr(subprocess, "run", failed)
    one = peer(tmp_path / "driver.py", GOOD)
    said: list[str] = []
    with pytest.raises(RunFailed, match="the installation failed: ERROR: No matching distribution"):
        installed(one, tmp_path / "peers", said.append)
    assert f"toy-1-torch-{peers.torch_version()}" in said[0]

    def slow(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(RunFailed, match="did not end within 60 minutes"):
        installed(one, tmp_path / "peers")


def script(file: Path, status: int) -> Path:
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\nexit {status}\n")
    file.chmod(0o755)
    return file


@pytest.mark.skipif(sys.platform == "win32", reason="writes shell scripts in place of interpreters")
def test_the_first_version_that_runs_is_taken(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", "")
    launcher = script(tmp_path / "shims" / "python2.1", 127)  # of pyenv, where this version is not chosen
    monkeypatch.setenv("PATH", str(launcher.parent))
    assert install.find_interpreter(["2.1", "2.2"]) is None
    by_conda = script(tmp_path / "miniforge3" / "envs" / "old" / "bin" / "python2.2", 0)
    assert install.find_interpreter(["2.1", "2.2"]) == by_conda
    by_uv = script(tmp_path / ".local/share/uv/python" / "cpython-2.2.3" / "bin" / "python2.2", 0)
    assert install.find_interpreter(["2.1", "2.2"]) == by_uv
    by_pyenv = script(tmp_path / "pyenv" / "versions" / "2.1.3" / "bin" / "python2.1", 0)
    assert install.find_interpreter(["2.1", "2.2"]) == by_pyenv
    assert install.find_interpreter(["2.2", "2.1"]) == by_uv


def test_an_environment_is_made_by_the_python_that_is_found(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["install.py", "env", "toy==1", "--pythons=3.99,3.100"])
    monkeypatch.setattr(install, "find_interpreter", lambda versions: None)
    with pytest.raises(
        SystemExit, match=r"ERROR: none of these versions of Python was found: 3\.99, 3\.100 \("
    ):
        install.main()
    called: list[list[str]] = []
    monkeypatch.setattr(install, "find_interpreter", lambda versions: Path(versions[1]))
    monkeypatch.setattr(install.subprocess, "call", called.append)
    install.main()
    assert called == [["3.100", install.__file__, "env", "toy==1"]]


def test_a_python_that_is_not_there_is_the_reason_of_the_peers_row(tmp_path: Path) -> None:
    one = replace(peer(tmp_path / "driver.py", GOOD), pythons="2.0,2.1")
    with pytest.raises(
        RunFailed, match=r"the installation failed: ERROR: none of .* was found: 2\.0, 2\.1 \(looked"
    ):
        installed(one, tmp_path)


def test_a_peer_with_modes_is_measured_in_each() -> None:
    threads, processes = chosen(["blazefl", "blazefl"])
    assert [threads.mode, processes.mode] == ["threads", "processes"]
    assert threads.title == "BlazeFL 2.0.3, threads"
    assert replace(threads, mode="", title="") == replace(processes, mode="", title="")  # one environment
    assert chosen(None) == known_peers()
    with pytest.raises(ConfigError, match="unknown peer 'blaze'"):
        chosen(["blaze"])


def test_environments_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peers.usual_directory() == tmp_path / "fedlens" / "peers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert peers.usual_directory() == tmp_path / "home" / ".cache" / "fedlens" / "peers"


def test_every_peer_is_pinned_and_has_its_driver() -> None:
    known = known_peers()
    names = {"flower", "pfl", "fedlab", "fedml", "nvflare", "blazefl", "fluke"}
    assert names == {one.name for one in known}
    for one in known:
        assert one.driver.is_file()
        assert all("==" in requirement for requirement in one.requirements)
        assert any(one.version in requirement for requirement in one.requirements)
        assert one.version in one.title
        assert len(one.ways(1)) == 1
        assert all(way.processes * way.threads <= 4 for way in one.ways(4))


def test_the_drivers_read_the_workload_that_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_LIMIT", str(Path(peers.limit.__file__)))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import turns  # type: ignore[import-not-found,unused-ignore]

    try:
        read = turns.workload_of(as_argument(TINY))
        assert {**vars(read), "model": None} == {**vars(TINY), "model": None}
        assert read.model.__name__ == "linear"
        assert read.model().state_dict().keys() == TINY.model().state_dict().keys()
        assert turns.workload_of("mnist-cnn").examples == WORKLOADS["mnist-cnn"].examples
        for clients in (1, 3, 49, 1000):
            for cohort in range(1, clients + 1):
                share = turns.share_of(replace(TINY, clients=clients, cohort=cohort))
                assert int(clients * share) == cohort
    finally:
        for name in ("turns", "limit"):
            sys.modules.pop(name, None)


def test_the_drivers_import_nothing_of_fedlens() -> None:
    for file in SCRIPTS.glob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert not line.strip().startswith(("import fedlens", "from fedlens")), file
