"""The documentation does not grow silently: `cat docs/**/*.md | wc -w` stays within its limit."""

from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
LIMIT = 103_000


def test_the_documentation_is_within_its_limit() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")}
    assert sum(words.values()) <= LIMIT


def test_pages_of_settings_and_evidence_stay_short() -> None:
    for folder in ("settings", "evidence"):
        pages = [DOCS / f"{folder}.md", *(DOCS / folder).glob("*.md")]
        assert len(pages) > 5
        for page in pages:
            assert len(page.read_text(encoding="utf-8").split()) <= 4_200, page.name
