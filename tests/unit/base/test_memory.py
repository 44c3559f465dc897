"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.base import memory
from fedlens.base.memory import free_in_groups, free_in_machine, free_memory


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def test_the_limits_of_all_groups_count(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (tmp_path / "mine").write_text("0::/outer/inner\n")
    group(root / "outer", memory_max=1000, memory_current=700, memory_stat="anon 500\ninactive_file 200")
    group(root / "outer/inner", memory_max="max", memory_current=600, memory_stat="anon 600")
    assert list(free_in_groups(tmp_path / "mine", root)) == [500]


def test_a_container_of_version_1_whose_path_is_the_host_s(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (tmp_path / "mine").write_text("5:devices:/x\n4:cpu,memory:/docker/123\n0::/\n")
    files = {
        "memory_limit_in_bytes": 900,
        "memory_usage_in_bytes": 400,
        "memory_stat": "total_inactive_file 100",
    }
    group(root / "memory", **files)
    assert list(free_in_groups(tmp_path / "mine", root)) == [600]


def test_without_groups_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(free_in_groups(tmp_path / "none", tmp_path)) == []
    monkeypatch.setattr(memory, "free_in_groups", lambda: iter([]))
    machine = free_memory()
    assert machine > 0
    monkeypatch.setattr(memory, "free_in_groups", lambda: iter([1024, 4096]))
    assert free_memory() == min(machine, 1024)


def test_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:  8000 kB\nMemFree:  1000 kB\nMemAvailable:  5000 kB\nCached:  4000 kB\n"
    )
    assert free_in_machine(tmp_path / "meminfo") == 5000 * 1024
    assert free_in_machine(tmp_path / "none") > 0
