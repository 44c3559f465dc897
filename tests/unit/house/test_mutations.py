"""The places that `tests/mutations.py` breaks are in the source, each once: the list does not go out of date."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import mutations
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
