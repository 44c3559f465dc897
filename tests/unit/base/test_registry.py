"""Registries: names to factories, files of the user, settings read off a signature."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedlens.base import registry
from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry, Registry, load_file, load_target, read_settings, settings_model

THINGS = Registry(
    "thing",
    {
        "ordered": Entry("collections:OrderedDict", "keeps order"),
        "bag": Entry("collections:Counter", "counts"),
    },
)


def factory(
    handed: object,
    *,
    size: Annotated[int, Field(ge=1)],
    kind: Literal["soft", "hard"] = "soft",
    rate: float | None = None,
) -> tuple:
    return handed, size, kind, rate


def test_a_name_is_found_and_a_wrong_one_answered_with_the_nearest() -> None:
    assert THINGS.find("bag").__name__ == "Counter"
    assert list(THINGS) == ["ordered", "bag"]
    assert THINGS.rows() == [("ordered", "keeps order"), ("bag", "counts")]
    with pytest.raises(ConfigError) as caught:
        THINGS.find("orderd", where="x.name")
    assert str(caught.value) == "unknown thing 'orderd' (x.name); did you mean 'ordered'."


def package(folder: Path, name: str, row: str) -> None:
    """An installed package that offers a thing."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fedlens.things]\n{row} = collections:deque\n")


def test_packages_are_read_once_and_again_after_one_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), *sys.path])
    package(tmp_path / "one", "first_of_test", "ring")
    os.utime(tmp_path / "one", (1, 1))  # long ago
    reads = []
    monkeypatch.setattr(registry, "entry_points", lambda **how: reads.append(how) or entry_points(**how))
    assert all(THINGS.find("ring").__name__ == "deque" for _ in range(100))
    assert reads == [{"group": "fedlens.things"}]
    assert ("ring", "from collections:deque") in THINGS.rows()
    package(tmp_path / "one", "second_of_test", "queue")
    assert THINGS.find("queue").__name__ == "deque"
    package(tmp_path / "two", "third_of_test", "line")
    sys.path.append(str(tmp_path / "two"))
    assert THINGS.find("line").__name__ == "deque"
    assert len(reads) == 3


def test_a_users_file_is_loaded_once(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import itertools\nCALLS = []\nCALLS.append(1)\ndef make(): return 'made'\nNUMBER = 3\n")
    assert THINGS.find(f"{file}:make")() == "made"
    assert load_file(file) is load_file(file)
    assert load_file(file).CALLS == [1]
    assert load_target(f"{file}:NUMBER") == 3


def test_a_file_may_import_the_module_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_of_test.py").write_text("VALUE = 7\n")
    (tmp_path / "first.py").write_text("from beside_of_test import VALUE\n")
    assert load_target(f"{tmp_path / 'first.py'}:VALUE") == 7
    assert sys.path[-1] == str(tmp_path)  # behind installed packages, which it cannot hide
    # Ray's workers load all files of this process.
    for name in [name for name, module in sys.modules.items() if getattr(module, "VALUE", None) == 7]:
        del sys.modules[name]


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [path for path in sys.path if path and Path(path).resolve() != tmp_path]
    monkeypatch.setattr(sys, "path", installed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_test.py").write_text("VALUE = 8\n")
    assert load_target("module_of_test:VALUE") == 8
    with pytest.raises(ConfigError, match=r"in the folder of the module, or set PYTHONPATH to that folder"):
        load_target("absent_of_test:VALUE")


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("{0}/absent.py:make", "does not exist"),
        ("{0}/mine.py:mak", "does not define 'mak'"),
        ("{0}/mine.py:NUMBER", "is of type int, but must be a function that makes the thing"),
        ("{0}/broken.py:make", "importing {0}/broken.py failed: ZeroDivisionError"),
        ("no_such_package.module:make", "importing no_such_package.module failed"),
        ("{0}/old.py:make", "; 'OP' is now 'EVALUATE_OWN' (x.name)."),
    ],
)
def test_what_can_be_wrong_with_a_users_file(target: str, what: str, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def make(): pass\nNUMBER = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "old.py").write_text("from fedlens.algorithms.client_evaluation import OP\n")
    with pytest.raises(ConfigError) as caught:
        THINGS.find(target.format(tmp_path), where="x.name")
    assert what.format(tmp_path) in str(caught.value)
    assert "x.name" in str(caught.value)


def test_a_file_that_failed_is_tried_again(tmp_path) -> None:
    file = tmp_path / "later.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError):
        load_target(f"{file}:x")
    file.write_text("x = 5  # put right, and longer than before\n")
    assert load_target(f"{file}:x") == 5


def test_settings_are_the_keyword_only_parameters_with_their_defaults() -> None:
    assert read_settings(factory, {"size": 3}, "t") == {"size": 3, "kind": "soft", "rate": None}
    assert set(settings_model(factory).model_fields) == {"size", "kind", "rate"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "the setting 'size' is missing (t.size); add it there, or pass --set t.size=VALUE."),
        ({"size": 0}, "'size' is 0, but must be at least 1 (t.size)."),
        ({"size": 1, "sise": 2}, "unknown setting 'sise' (t.sise); did you mean 'size'."),
        (
            {"size": 1, "kind": "sof"},
            "'kind' is 'sof', but must be 'soft' or 'hard' (t.kind); did you mean 'soft'.",
        ),
        ({"size": "many"}, "(t.size)"),
    ],
)
def test_a_wrong_setting_is_one_sentence_with_its_key(values, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(factory, values, "t")
    assert sentence in str(caught.value)


def test_handed_in_parameters_are_no_settings() -> None:
    with pytest.raises(ConfigError, match="handed"):
        read_settings(factory, {"size": 1, "handed": 2}, "t")


class Constructed:
    def __init__(self, *, factor: int = 2) -> None:
        self.factor = factor


def test_the_settings_of_a_class_are_those_of_its_constructor() -> None:
    assert settings_model(Constructed).model_validate({"factor": "3"}).model_dump() == {"factor": 3}
