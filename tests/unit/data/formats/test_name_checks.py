from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.data_checks import check_names, near_names
from fedlens.data.formats.folder_check import check_folder
from tests.unit.data.pictures import pixels, write


@pytest.mark.parametrize(
    ("rare", "usual"),
    [
        ("dogg", "dog"),
        ("mainz", "Mainz"),
        ("Mainz ", "Mainz"),
        ("Mianz", "Mainz"),
        ("Koln", "Köln"),
        (unicodedata.normalize("NFD", "Köln"), "Köln"),
        ("north ward", "north_ward"),
        ("St Anna", "St. Anna"),
        ("St.Mary's", "St. Marys"),
        ("Klinikum (Ulm)", "Klinikum, Ulm"),
        ("melannomma", "melanoma"),
        ("site 1 nrth", "site 1 north"),
    ],
)
def test_a_name_that_looks_like_a_misspelling_is_near(rare: str, usual: str) -> None:
    assert list(near_names({usual: 90, rare: 2, "other": 50})) == [(rare, usual)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("site1", "site2"),
        ("site1", "site"),
        ("ward 11", "ward 1"),
        ("ward a", "ward b"),
        ("hospital-a", "hospital-b"),
        ("siteA", "siteB"),
        ("type I", "type II"),
        ("cat", "bat"),
        ("left eye", "right eye"),
        ("7", "07"),
        ("a", "b"),
        ("v1.0", "v10"),
        ("...", "---"),
    ],
)
def test_names_that_are_told_apart_on_purpose_are_not_near(first: str, second: str) -> None:
    assert list(near_names({first: 2, second: 90})) == []


def test_letters_matter_only_if_one_of_the_names_is_rare_and_spelling_forms_always() -> None:
    assert list(near_names({"horse": 90, "house": 80})) == []
    assert list(near_names({"horse": 90, "house": 8})) == [("house", "horse")]
    assert list(near_names({"Horse": 90, "horse": 90})) == [("horse", "Horse")]


def test_thousands_of_names_are_compared_by_their_form_alone() -> None:
    names = {f"user {at:05}": 9 for at in range(2000)} | {"USER 00007": 1, "userr 00007": 1}
    assert list(near_names(names)) == [("USER 00007", "user 00007")]


def test_few_images_and_near_names_are_one_line_each() -> None:
    findings = Findings()
    check_names(
        "client", {"Mainz": 90, "mainz": 2, "Bonn": 5, **{f"x{at}": 1 for at in range(12)}}, "t.csv", findings
    )
    assert len(findings) == 0
    near, few = map(str, findings.warnings)
    assert near == (
        "t.csv: the client 'mainz' (2 images) looks like 'Mainz' (90 images); if they are the same, use one spelling."
    )
    assert few.startswith("t.csv: 13 clients have fewer than 5 images: 'x0' 1, 'x1' 1, ")
    assert few.endswith(" and 3 more; check the spelling, or add images.")


def test_the_check_counts_images_of_classes_and_clients_without_the_faulty_ones(tmp_path: Path) -> None:
    lines = []
    for at in range(20):
        write(tmp_path / f"{at:02}.png", pixels(at))
        lines.append(
            f"{at:02}.png,{'dogg' if at == 3 else ('cat', 'dog')[at % 2]},{('Mainz', 'Bonn')[at // 10]}"
        )
    (tmp_path / "t.csv").write_text("\n".join(["path,label,hospital", *lines]) + "\n")
    for at in range(6):
        (tmp_path / f"{10 + at}.png").write_bytes(b"")
    check = check_folder(tmp_path, "csv", {"client_column": "hospital"})
    assert [warning.what for warning in check.warnings] == [
        "the class 'dogg' (1 image) looks like 'dog' (6 images)",
        "1 class has fewer than 5 images: 'dogg' 1",
        "1 client has fewer than 5 images: 'Bonn' 4",
    ]
    check = check_folder(tmp_path, "csv")
    assert str(check.warnings[-1]) == (
        f"{tmp_path}: no client is named, so the partition has to make clients, as iid does; "
        "name a column of the table (client_column, such as client_column=hospital), a folder (client_level) "
        "or a client_pattern."
    )
