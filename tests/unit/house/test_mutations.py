"""The places that `tests/mutations.py` breaks are in the source, each once: the list does not go out of date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutations, random_mutants
from tests.mutations import MUTATIONS, ROOT, Mutation

# Identities between two ways of computing the same, which break where the algorithm's own does.
BESIDE = {
    "test_bare_loop.py",
    "test_fedir_beside_others.py",
    "test_groups_in_workers.py",
    "test_leafwise.py",
    "test_partial_work.py",
    "test_stacked_images.py",
    "test_stacked_rules.py",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.text[:20]}")
def test_a_place_to_break_occurs_once(mutation: Mutation) -> None:
    assert (ROOT / "src/fedlens" / mutation.file).read_text("utf-8").count(mutation.text) == 1
    assert all((ROOT / "tests" / path).exists() for path in mutation.tests.split())


def test_the_list_covers_every_identity() -> None:
    identities = {path.name for path in (ROOT / "tests/identity").glob("test_*.py")}
    named = {Path(path).name for m in MUTATIONS for path in m.tests.split()}
    assert identities - named == BESIDE


@pytest.mark.parametrize("survives", [False, True])
def test_a_fault_that_survives_is_an_error(survives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(tests: str, mutation: Mutation | None = None) -> str | None:
        return None if mutation is None or (survives and mutation is MUTATIONS[-1]) else "FAILED"

    monkeypatch.setattr(mutations, "failing", failing)
    assert mutations.main([]) == int(survives)


@pytest.mark.parametrize("code", [0, 1, 2, 5])  # of pytest: passed, failed, not imported, none collected
def test_tests_that_cannot_be_run_are_no_failure(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    stub = f"print('FAILED one' if {code} else 'passed'); raise SystemExit({code})"
    monkeypatch.setattr(mutations, "PYTEST", [sys.executable, "-c", stub])
    if code in (0, 1):
        assert mutations.failing("unit") == ("FAILED one" if code else None)
    else:
        with pytest.raises(RuntimeError, match="could not be run"):
            mutations.failing("unit")


SOURCE = '''
def half(x: float = 1, up: bool = True) -> float | None:
    """Halves."""
    if x < 0 and up:
        raise ValueError(f"{x + 1} is negative")
    warn("2")
    x -= sum(y for y in [x] if y)
    return x / 2
'''
BROKEN = {
    "up: bool = False",
    "x: float = 2",
    "if (not (x < 0 and up)):",
    "if (x < 0 or up):",
    "if x <= 0 and up:",
    "if x < 1 and up:",
    "pass",
    "x -= sum(y for y in [x] if (not (y)))",
    "return None",
    "return x * 2",
    "return x / 3",
}


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of the source, where the random mutants look for it."""
    (tmp_path / "core").mkdir()
    monkeypatch.setattr(random_mutants, "SOURCE", tmp_path)
    (tmp_path / "core/half.py").write_text(SOURCE, "utf-8")
    return tmp_path / "core/half.py"


def test_a_random_mutant_differs_in_one_place_and_runs(half: Path) -> None:
    found = list(random_mutants.mutants("core/half.py"))
    for line, mutant in found:
        assert SOURCE.count(mutant.text) == 1
        compile(SOURCE.replace(mutant.text, mutant.broken), "half", "exec")
        assert line in (2, *random_mutants.executed_lines(mutant))
    assert len(found) == len(BROKEN)
    assert all(sum(text in mutant.broken for _, mutant in found) == 1 for text in BROKEN)


def test_random_mutants_are_of_executed_lines_and_meet_the_tests_of_these(half: Path) -> None:
    tests = {
        "tests/a.py::test[1]": 1 << 8,
        "tests/a.py::test[2]": 1 << 8,
        "tests/b.py::test_b": 1 << 7 | 1 << 8,
    }
    tests |= {"tests/test_half.py::test": 0b11111 << 4, "": 1 << 2}  # "": at an import
    executed = {"core/half.py": tests}
    drawn = random_mutants.draw(4, 1, executed)
    assert drawn == random_mutants.draw(4, 1, executed)
    by_line = {random_mutants.executed_lines(mutant).start: mutant for mutant in drawn}
    assert by_line.keys() == {3, 4, 7, 8}  # 3: the body, for a default in line 2
    ids = ["tests/test_half.py::test", "tests/a.py::test[1]", "tests/b.py::test_b", "tests/a.py::test[2]"]
    assert random_mutants.select(by_line[8], executed) == ids
    assert random_mutants.select(by_line[7], executed) == [ids[0], ids[2]]
    assert random_mutants.select(by_line[3], executed) == ids


def test_a_random_mutant_is_found_again_in_another_file(half: Path) -> None:
    _, mutant = next(iter(random_mutants.mutants("core/half.py")))
    half.rename(half.with_name("moved.py"))
    assert random_mutants.find(mutant) == mutant._replace(file="core/moved.py")
    half.with_name("moved.py").write_text("", "utf-8")
    assert random_mutants.find(mutant) is None


@pytest.mark.parametrize(("output", "failed"), [("FAILED a.py::test[0] - x", "a.py::test"), ("", None)])
def test_where_a_mutant_renames_parameters_the_functions_run(
    output: str, failed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_tests(arguments: list[str], mutation: Mutation | None) -> subprocess.CompletedProcess[str]:
        if "[" in Path(arguments[-1][1:]).read_text("utf-8"):
            return subprocess.CompletedProcess([], 4, "", "ERROR: not found: a.py::test")
        return subprocess.CompletedProcess([], int(bool(output)), output, "")

    monkeypatch.setattr(random_mutants, "run_tests", run_tests)
    assert random_mutants.first_failure(MUTATIONS[0], ["a.py::test[0]", "a.py::test[1]"]) == failed


@pytest.mark.parametrize(("fail", "first"), [(["b", "b"], "b"), (["a", "", "b"], "b"), (["a", "", ""], None)])
def test_a_test_that_fails_by_chance_kills_no_mutant(
    fail: list[str], first: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_tests(arguments: list[str], mutation: Mutation | None) -> subprocess.CompletedProcess[str]:
        output = "".join(f"FAILED {test} - x\n" for test in fail.pop(0).split())
        return subprocess.CompletedProcess([], int(bool(output)), output, "")

    monkeypatch.setattr(random_mutants, "run_tests", run_tests)
    assert random_mutants.first_failure(MUTATIONS[0], ["a", "b"]) == first
