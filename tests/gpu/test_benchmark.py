"""`python -m benchmarks.gpu` runs to its end, so that time on a GPU is not lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", *words])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return int(ended.value.code or 0)


def test_each_number_has_the_name_of_the_machine_and_a_failed_section_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(asked: gpu.Setting) -> gpu.Found:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(gpu.SECTIONS, "peak", broken)
    file = tmp_path / "gpu.json"
    assert run(monkeypatch, "peak", "memory", "--json", str(file)) == 1
    found = json.loads(file.read_text())
    assert found["peak"] == {"error": "RuntimeError: no kernel image"}
    assert found["memory"]["a group of 2, estimated, MB"] > 13  # two models of 1.7 million weights
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.endswith(f"({found['machine']})") for line in lines)
    assert gpu.torch.cuda.get_device_name() in found["machine"]


@pytest.mark.nightly
def test_all_sections_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sections = [name for name in gpu.SECTIONS if name != "tests"]
    assert run(monkeypatch, *sections) == 0
    printed = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert printed == set(sections)
