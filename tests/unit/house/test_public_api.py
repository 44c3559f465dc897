"""The public API is what docs/api/public.txt says, and the examples use nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fedlens.base.errors import MOVED, RENAMED, ConfigError, renamed
from fedlens.base.registry import load_target
from tools.public_api import EXPORTING, FILE, documented, exported, rendered, used


def test_the_public_api_is_as_declared() -> None:
    command = "python -m tools.public_api"
    assert FILE.read_text("utf-8") == rendered(), f"name the change in CHANGELOG.md, and run `{command}`"


def test_examples_and_pages_use_public_names_only() -> None:
    known = set(documented())
    assert {name: files for name, files in used().items() if name not in known} == {}


def test_examples_import_from_the_collections_what_these_have() -> None:
    """A user's file has one import for rules, one for aggregates and one for all other parts."""
    offered = {name for module in EXPORTING for name in exported(module)}
    for module in EXPORTING[1:]:
        assert exported(module) == import_module(module).__all__
    frozen = {"small_fashion.py"}  # published studies name this file by its digest
    elsewhere = {
        name: files - frozen
        for name, files in used().items()
        if name.rpartition(".")[0] not in EXPORTING and name.rpartition(".")[2] in offered and files - frozen
    }
    assert elsewhere == {}


def test_the_package_lists_what_it_has_and_imports_nothing_for_it() -> None:
    code = (
        "import sys, fedlens; print(*dir(fedlens)); print([m for m in ('torch', 'pydantic') if m in sys.modules]);"
        "print(fedlens.rules.ClientRule.__name__, fedlens.parts.averaging.__name__, fedlens.aggregates.Mean.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {"Experiment", "Study", "aggregates", "parts", "rules", "resume_rounds"} <= set(lines[0].split())
    assert lines[1:] == ["[]", "ClientRule averaging Mean"]


def test_the_text_has_fields_signatures_and_what_a_class_must_define() -> None:
    lines = rendered().splitlines()
    engine = lines.index("class fedlens.core.protocol.Engine(Protocol)")
    assert (
        lines[engine + 1] == "    abstractmethod open(self, program: Program, states: ClientStates) -> None"
    )
    assert "    deadline: float | None = None" in lines
    assert any(line.startswith("fedlens.local.training.") is False and ", *, " in line for line in lines)


def test_an_old_name_is_gone_and_its_new_one_is_public() -> None:
    blocks = {
        block.split("(")[0].split()[0]: block for block in rendered().replace("class ", "").split("\n\n")
    }
    for old, new in RENAMED.items():
        owner, _, name = old.rpartition(".")
        text = "\n".join(block for key, block in blocks.items() if owner in key.split("."))
        words = re.findall(r"\w+", text)
        assert new in words, old
        assert name not in words, old


def test_an_old_module_is_gone_and_its_error_names_the_new_one(tmp_path: Path) -> None:
    text = rendered()
    for old, new in MOVED.items():
        assert f"fedlens.{old}." not in text
        assert " and " in new or f"fedlens.{new}." in text
        with pytest.raises(ModuleNotFoundError) as caught:
            import_module(f"fedlens.{old}")
        assert renamed(caught.value) == f"; 'fedlens.{old}' is now 'fedlens.{new}'"
    file = tmp_path / "mine.py"
    file.write_text("from fedlens.core.errors import ConfigError\n")
    with pytest.raises(ConfigError, match=r"is now 'fedlens\.base\.errors'"):
        load_target(f"{file}:task")
