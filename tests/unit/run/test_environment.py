"""What a run ran on."""

import inspect
import json
import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedlens
from fedlens.run import environment
from fedlens.run.environment import command_words, describe_environment


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(autouse=True)
def revision_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git is asked each time, as outside of the tests."""
    monkeypatch.setattr(environment, "_git_revision", inspect.unwrap(environment._git_revision))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    try:
        git("init", "--quiet")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    return tmp_path


def test_the_command_is_named_as_a_person_types_it() -> None:
    assert command_words(["/env/bin/fedlens", "cost", "a.toml"]) == ["fedlens", "cost", "a.toml"]
    assert command_words(["/env/lib/fedlens/__main__.py", "cost", "a.toml"]) == ["fedlens", "cost", "a.toml"]
    assert command_words(["/work/train.py"]) == ["train.py"]
    assert command_words([]) == command_words([""]) == ["python"]


def test_it_says_what_the_design_asks_and_is_json() -> None:
    found = describe_environment(["fedlens", "run", "a b.toml"], 7)
    assert json.loads(json.dumps(found)) == found
    assert (found["fedlens"], found["torch"]) == (fedlens.__version__, torch.__version__)
    assert (found["command"], found["seed"]) == ("fedlens run 'a b.toml'", 7)
    assert {"numpy", "safetensors", "pydantic"} <= set(found["libraries"])
    assert found["libraries"]["numpy"].count(".") == 2
    assert 0 < found["cpu"]["usable"] <= found["cpu"]["cores"]
    assert found["cpu"]["model"]
    assert found["memory"] > 2**28
    assert len(found["gpus"]) == torch.cuda.device_count()
    started = datetime.fromisoformat(found["started"])
    assert started.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - started) < timedelta(seconds=30)


def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = SimpleNamespace(name="H200", total_memory=150)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert describe_environment([], 0)["gpus"] == [{"name": "H200", "memory": 150}] * 2


def test_the_revision_is_that_of_the_current_directory(repository: Path) -> None:
    assert describe_environment([], 0)["git"] is None
    (repository / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "-m", "one")
    git("tag", "--annotate", "--message", "one", "v1-dirty")
    revision = git("rev-parse", "HEAD")
    assert describe_environment([], 0)["git"] == {"revision": revision, "dirty": False}
    (repository / "untracked").write_text("")
    assert describe_environment([], 0)["git"] == {"revision": revision, "dirty": False}
    (repository / "a").write_text("2")
    assert describe_environment([], 0)["git"] == {"revision": revision, "dirty": True}


def test_without_a_repository_or_without_git_there_is_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment([], 0)["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment([], 0)["git"] is None


def test_a_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)  # tests ask about this repository once
    before = time.monotonic()
    assert describe_environment([], 0)["git"] is None
    assert time.monotonic() - before < 10


def test_a_system_without_proc_or_page_counts_still_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(environment, "Path", lambda name: SimpleNamespace(read_text=absent))
    monkeypatch.setattr(os, "sysconf", absent)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = describe_environment([], 0)
    assert found["cpu"]["model"]
    assert found["cpu"]["usable"] == os.cpu_count()
    assert found["memory"] is None


def test_libraries_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LIBRARIES", ("numpy", "no-such-library"))
    assert list(describe_environment([], 0)["libraries"]) == ["numpy"]
