"""The places that `tests/mutations.py` breaks are in the source, each once: the list does not go out of date."""

from __future__ import annotations

from pathlib import Path

import pytest

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
