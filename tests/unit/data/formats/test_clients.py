import math
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.summary_text import listed
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import clients
from fedlens.data.formats.clients import ClientAssignment
from fedlens.data.formats.scan import Scan

NAMES = ["north/ward1/a.png", "north/ward2/b.png", "south/ward1/c.png"]


def describe(
    names: list[str], settings: dict[str, Any], folder: Path, findings: Findings, **more: Any
) -> Scan:
    scan = Scan(folder, settings, findings, names=list(names))
    clients.describe(scan, **more)
    return scan


def told(findings: Findings) -> list[str]:
    """Where (the last part of the path) and what, of each finding."""
    return [f"{finding.where.rpartition('/')[2]}: {finding.what}" for finding in findings]


def with_table(tmp_path: Path, text: str, names: list[str] = NAMES, **settings: Any) -> tuple[Scan, Findings]:
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    findings = Findings()
    found = describe(names, {"table": str(tmp_path / "t.csv"), **settings}, tmp_path, findings)
    return found, findings


@pytest.mark.parametrize(
    ("rule", "clients"),
    [
        ({"client_level": 1}, ["north", "north", "south"]),
        ({"client_level": 2}, ["ward1", "ward2", "ward1"]),
        ({"client_level": -1}, ["ward1", "ward2", "ward1"]),
        ({"client_level": -2}, ["north", "north", "south"]),
        ({"client_pattern": r"ward(\d)"}, ["1", "2", "1"]),
        ({"client_pattern": r"^(\w+)/"}, ["north", "north", "south"]),
    ],
)
def test_folders_and_patterns_say_whose_an_image_is(rule: dict, clients: list[str]) -> None:
    findings = Findings()
    found = describe(NAMES, rule, Path("data"), findings)
    assert not findings.found
    assert found.columns["client"].tolist() == clients
    assert (found.splits, found.cells, found.bad) == (None, None, set())


def test_without_a_rule_there_are_no_clients() -> None:
    assert describe(NAMES, {}, Path("data"), Findings()).columns == {}


def test_folders_may_be_counted_below_that_of_the_split() -> None:
    inner = ["a/x.png", "b/y.png"]
    found = describe(["train/a/x.png", "test/b/y.png"], {"client_level": 1}, Path(), Findings(), inner=inner)
    assert found.columns["client"].tolist() == ["a", "b"]


def test_a_path_that_does_not_say_it_is_named() -> None:
    findings = Findings()
    names = [*NAMES, "stray.png", "east/d.png"]
    found = describe(names, {"client_level": 2}, Path("data"), findings)
    assert found.bad == {3, 4}
    assert told(findings) == [
        "stray.png: client_level is 2, and 'stray.png' is in no folder",
        "d.png: client_level is 2, and 'east/d.png' is 1 folder deep",
    ]
    findings = Findings()
    found = describe(names, {"client_pattern": "ward([12])"}, Path("data"), findings)
    assert found.bad == {3, 4}
    assert told(findings)[0] == "stray.png: client_pattern 'ward([12])' finds no client in 'stray.png'"
    assert all(finding.example for finding in findings)


def test_a_table_gives_clients_splits_labels_and_further_columns(tmp_path: Path) -> None:
    text = (
        "path,label,client,split,age,dose,ward,code\n"
        "south/ward1/c.png,cat,3,Test,40,0.5,x,007\n"
        "north/ward1/a.png,dog,1,train,51,,y,008\n"
        "north/ward2/b.png,cat,1,valid,62,2,,009\n"
    )
    found, findings = with_table(tmp_path, text)
    assert not findings.found
    assert found.cells == ["dog", "cat", "cat"]
    assert found.splits == ["train", "validation", "test"]
    assert found.columns.keys() == {"client", "age", "dose", "ward", "code"}
    assert found.columns["client"].tolist() == ["1", "1", "3"]
    assert found.columns["age"].tolist() == [51, 62, 40]
    assert found.columns["age"].dtype == np.int64
    assert math.isnan(found.columns["dose"][0])
    assert found.columns["dose"][1:].tolist() == [2.0, 0.5]
    assert found.columns["ward"].tolist() == ["y", "", "x"]
    assert found.columns["code"].tolist() == ["008", "009", "007"]
    assert [where.rpartition("/")[2] for where in found.sources] == [f"t.csv, line {n}" for n in (3, 4, 2)]


def test_any_column_can_be_that_of_the_clients(tmp_path: Path) -> None:
    text = "path,hospital,client\n" + "".join(f"{name},h{at},one\n" for at, name in enumerate(NAMES))
    found, findings = with_table(tmp_path, text, client_column="hospital")
    assert not findings.found
    assert found.columns["client"].tolist() == found.columns["hospital"].tolist() == ["h0", "h1", "h2"]


def test_a_table_is_found_in_the_folder_of_the_data_too(tmp_path: Path) -> None:
    (tmp_path / "who.csv").write_text("path,client\n" + "".join(f"{n},{n[0]}\n" for n in NAMES))
    found = describe(NAMES, {"table": "who.csv"}, tmp_path, Findings())
    assert found.columns["client"].tolist() == ["n", "n", "s"]


def test_fields_of_annotations_serve_as_columns() -> None:
    records = {"city": ["ulm", None, "jena"], "height": [3, 4, 5]}
    findings = Findings()
    found = describe(NAMES, {"client_column": "city"}, Path("data"), findings, records=records)
    assert found.columns["client"].tolist() == ["ulm", "", "jena"]
    assert found.columns["height"].tolist() == [3, 4, 5]
    assert told(findings) == ["b.png: the cell 'city' is empty"]
    assert found.bad == {1}


def test_files_that_are_missing_on_either_side_are_found(tmp_path: Path) -> None:
    text = f"path,client\nnorth/ward1/a.png,x\nc.png,y\nnorth/ward9/z.png,y\n{'n' * 300}.png,z\n"
    found, findings = with_table(tmp_path, text, [*NAMES, "e.png", "f.png"])
    assert told(findings) == [
        "t.csv, line 3: the file 'c.png' does not exist",
        "t.csv, line 4: the file 'north/ward9/z.png' does not exist",
        f"t.csv, line 5: the file '{'n' * 300}.png' does not exist",
        "t.csv: 4 of 5 images are not in the table: north/ward2/b.png, south/ward1/c.png, e.png and 1 more",
    ]
    assert "did you mean 'south/ward1/c.png'?" in str(findings.found[0])
    assert found.bad == {1, 2, 3, 4}
    assert all(finding.example for finding in findings)


def test_a_line_about_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    _, findings = with_table(tmp_path, "path,client\na.png,x\nb.png,y\nnotes.txt,y\n", ["a.png", "b.png"])
    assert told(findings) == ["t.csv, line 4: 'notes.txt' is not an image of this dataset"]


def test_two_lines_about_one_file(tmp_path: Path) -> None:
    text = "path,client\na.png,x\nb.png,y\n./a.png,x\nb.png,z\nb.png,y\n"
    _found, findings = with_table(tmp_path, text, ["a.png", "b.png"])
    assert told(findings) == [
        "t.csv, line 4: 'a.png' is in line 2 too, with other cells",
        "t.csv, line 5: 'b.png' is in line 3 too, with other cells",
        "t.csv, line 6: 'b.png' is in line 3 too, with the same cells",
    ]


def test_a_doubled_line_that_contradicts_leaves_the_image_out(tmp_path: Path) -> None:
    text = "path,client\na.png,x\nb.png,y\nb.png,z\nc.png,z\nc.png,z\n"
    found, findings = with_table(tmp_path, text, ["a.png", "b.png", "c.png"])
    assert found.bad == {1}
    assert len(findings) == 2


def test_empty_cells_and_unknown_splits_have_their_line(tmp_path: Path) -> None:
    text = "path,client,split\na.png,x,train\nb.png,,test\nc.png,y,\nd.png,y,dev\n"
    found, findings = with_table(tmp_path, text, [f"{letter}.png" for letter in "abcd"])
    assert told(findings) == [
        "t.csv, line 4: the split is empty",
        "t.csv, line 5: there is no split 'dev'",
        "t.csv, line 3: the cell 'client' is empty",
    ]
    assert found.bad == {1, 2, 3}


def test_paths_that_lead_elsewhere_are_found_and_backslashes_are_read(tmp_path: Path) -> None:
    text = "path,client\na\\b.png,x\n/etc/passwd,x\n../c.png,y\n,y\nc.png,y\n"
    found, findings = with_table(tmp_path, text, ["a/b.png", "c.png"])
    assert told(findings) == [
        "t.csv, line 3: the path '/etc/passwd' is not below the data folder",
        "t.csv, line 4: the path '../c.png' is not below the data folder",
        "t.csv, line 5: the path is empty",
    ]
    assert found.columns["client"].tolist() == ["x", "y"]
    assert found.notes == ["1 paths of t.csv had backslashes, read as slashes"]


def test_an_umlaut_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "zürich/a.png")
    text = "path,client\nzürich/a.png,x\nb.png,y\n"
    found, findings = with_table(tmp_path, text, [decomposed, "b.png"])
    assert not findings.found
    assert found.columns["client"].tolist() == ["x", "y"]


def test_one_client_only_is_a_fault_of_the_whole() -> None:
    findings = Findings()
    describe(["a/x.png", "a/y.png"], {"client_level": 1}, Path("data"), findings)
    assert told(findings) == ["data: all 2 examples belong to one client, 'a'"]
    assert not findings.found[0].example


def test_a_table_that_cannot_be_read_is_the_one_fault(tmp_path: Path) -> None:
    findings = Findings()
    found = describe(NAMES, {"table": "no.csv", "client_column": "hospital"}, tmp_path, findings)
    assert told(findings) == ["no.csv: the table does not exist"]
    assert found.columns == {}


@pytest.mark.parametrize(
    ("lat", "lon", "what"),
    [
        ("91", "5", "'lat' is 91.0, which is not a coordinate in degrees"),
        ("48", "-180.5", "'lon' is -180.5, which is not a coordinate in degrees"),
        ("", "5", "'lat' is missing"),
        ("48", "nan", "'lon' is nan, which is not a coordinate in degrees"),
    ],
)
def test_coordinates_that_are_missing_or_off_the_sphere(
    tmp_path: Path, lat: str, lon: str, what: str
) -> None:
    text = f"path,lat,lon\na.png,48.5,9.9\nb.png,{lat},{lon}\n"
    found, findings = with_table(tmp_path, text, ["a.png", "b.png"])
    assert told(findings) == [f"t.csv, line 3: {what}"]
    assert found.bad == {1}
    assert [found.columns[name][0] for name in ("lat", "lon")] == [48.5, 9.9]


@pytest.mark.parametrize(
    "names", [("Lat", "LON"), ("latitude", "longitude"), ("Latitude", "lng"), ("lat", "Long")]
)
def test_coordinates_go_by_several_names(tmp_path: Path, names: tuple[str, str]) -> None:
    text = f"path,{names[0]},{names[1]}\na.png,48.5,9.9\nb.png,91,9\nc.png,9,91\nd.png,9,\ne.png,9,181\n"
    found, findings = with_table(tmp_path, text, [f"{letter}.png" for letter in "abcde"])
    assert told(findings) == [
        f"t.csv, line 3: '{names[0]}' is 91.0, which is not a coordinate in degrees",
        f"t.csv, line 5: '{names[1]}' is missing",
        f"t.csv, line 6: '{names[1]}' is 181.0, which is not a coordinate in degrees",
    ]
    assert found.bad == {1, 3, 4}
    assert found.columns[names[0]].tolist() == [48.5, 91.0, 9.0, 9.0, 9.0]


@pytest.mark.parametrize("cell", ["NaN", "nan", "NA", "null", "N/A", "<NA>", "#N/A"])
def test_a_client_that_stands_for_a_missing_one_is_none(tmp_path: Path, cell: str) -> None:
    text = f"path,client\na.png,x\nb.png,{cell}\nc.png,y\n"
    found, findings = with_table(tmp_path, text, ["a.png", "b.png", "c.png"])
    assert told(findings) == [
        f"t.csv, line 3: the cell 'client' is '{cell}', which stands for a missing value"
    ]
    assert findings.found[0].hint == "write the client of the image"
    assert found.bad == {1}


def test_names_that_only_look_missing_are_names(tmp_path: Path) -> None:
    text = "path,client\na.png,none\nb.png,Na\nc.png,Nana\n"
    found, findings = with_table(tmp_path, text, ["a.png", "b.png", "c.png"])
    assert not findings.found
    assert found.columns["client"].tolist() == ["none", "Na", "Nana"]
    described = describe(["NA/a.png", "EU/b.png"], {"client_level": 1}, Path("data"), Findings())
    assert described.columns["client"].tolist() == ["NA", "EU"]  # continents


def test_a_point_alone_is_no_number(tmp_path: Path) -> None:
    found, _ = with_table(tmp_path, "path,dose\na.png,.5\nb.png,.\nc.png,1.\n", ["a.png", "b.png", "c.png"])
    assert found.columns["dose"].tolist() == [".5", ".", "1."]


@pytest.mark.parametrize(
    ("column", "says"), [("path", "its file"), ("label", "its class"), ("split", "its split")]
)
def test_a_column_with_another_use_is_not_that_of_the_clients(tmp_path: Path, column: str, says: str) -> None:
    text = "path,label,split\na.png,x,train\nb.png,y,test\n"
    what = rf"the column '{column}' gives {says}, not the client of an image \(client_column\)"
    with pytest.raises(ConfigError, match=what):
        with_table(tmp_path, text, ["a.png", "b.png"], client_column=column)


def test_a_field_label_of_annotations_may_be_that_of_the_clients() -> None:
    found = describe(
        ["a", "b"], {"client_column": "label"}, Path(), Findings(), records={"label": ["x", "y"]}
    )
    assert found.columns["client"].tolist() == ["x", "y"]


def test_numbers_that_are_no_coordinates_are_left_alone(tmp_path: Path) -> None:
    _, findings = with_table(tmp_path, "path,lat\na.png,500\n", ["a.png"])  # without lon, who knows
    assert not findings.found
    _, findings = with_table(tmp_path, "path,lat,Latitude\na.png,500,500\n", ["a.png"])
    assert not findings.found


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"client_column": "c", "client_level": 1}, "client_level", "client_column and client_level both"),
        (
            {"client_level": 1, "client_pattern": "(a)"},
            "client_pattern",
            "client_level and client_pattern both",
        ),
        ({"client_level": 0}, "client_level", "client_level is 0"),
        ({"client_pattern": "a(b"}, "client_pattern", "'a\\(b' is not a regular expression"),
        ({"client_pattern": "ab"}, "client_pattern", "'ab' has 0 groups, and needs exactly one"),
        ({"client_pattern": "(a)(b)"}, "client_pattern", "has 2 groups"),
    ],
)
def test_rules_that_are_none(settings: dict, where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        ClientAssignment.of(settings)
    assert caught.value.where == where


def test_a_column_that_there_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    text = "path,hospital\na.png,x\nb.png,y\n"
    _, findings = with_table(tmp_path, text, ["a.png", "b.png"], client_column="hospitl")
    assert told(findings) == [
        "t.csv, line 1: there is no column 'hospitl', which data.dataset.client_column names"
    ]
    assert findings.found[0].hint == "did you mean 'hospital'"
    with pytest.raises(ConfigError, match="give a table"):
        describe(NAMES, {"client_column": "hospital"}, Path("data"), Findings())


def test_lists_of_names_are_short() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed([str(n) for n in range(1003)]) == "0, 1, 2 and 1,000 more"
