from pathlib import Path

import pytest

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import CsvTable, inner_path, read_csv


def table(tmp_path: Path, content: str | bytes) -> tuple[CsvTable | None, Findings]:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    findings = Findings()
    return read_csv(path, findings), findings


def told(findings: Findings) -> list[str]:
    return [f"{finding.where.rpartition('/')[2]}: {finding.what}" for finding in findings]


def test_a_plain_table(tmp_path: Path) -> None:
    found, findings = table(tmp_path, "path,client\na.png, mercy \nb.png,\n")
    assert found is not None
    assert not findings.found
    assert (found.columns, len(found)) == (("path", "client"), 2)
    assert found.column("client") == ["mercy", ""]
    assert found.lines == (2, 3)
    assert found.where(1).endswith("t.csv, line 3")
    assert found.notes == ()


@pytest.mark.parametrize(("delimiter", "named"), [(";", "semicolons"), ("\t", "tabs")])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_other_delimiters_a_mark_and_windows_lines_are_read(
    tmp_path: Path, delimiter: str, named: str, mark: str, end: str
) -> None:
    lines = ["path,client", "a.png,mercy, north", ""]
    text = mark + end.join(line.replace(",", delimiter, 1) for line in lines)
    found, findings = table(tmp_path, text)
    assert found is not None
    assert not findings.found
    assert found.rows == (("a.png", "mercy, north"),)
    notes = [f"t.csv is separated by {named}"] + ["t.csv begins with a byte-order mark"] * bool(mark)
    assert list(found.notes) == notes


def test_quoted_cells_hold_delimiters_and_lines_are_still_counted(tmp_path: Path) -> None:
    text = 'path,note\na.png,"two\nlines, and ""quotes"""\n\n,,\nb.png,x,y\nc.png,z\n'
    found, findings = table(tmp_path, text)
    assert found is not None
    assert found.rows == (("a.png", 'two\nlines, and "quotes"'), ("c.png", "z"))
    assert found.lines == (2, 7)
    assert told(findings) == ["t.csv, line 6: the line has 3 cells, and the first line has 2"]
    assert findings.found[0].example


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "t.csv: the table is empty"),
        (b"\n\n", "t.csv: the table is empty"),
        (b"path,client\n", "t.csv: the table has only its first line"),
        ("path,client\na,b\n".encode("utf-16"), "t.csv: the encoding of the table is UTF-16"),
        ("path,client\na,b\n".encode("utf-16-le"), "t.csv: the encoding of the table is UTF-16"),
        ("path,client\na,b\nü,b\n".encode("latin-1"), "t.csv, line 3: the byte 0xfc is not UTF-8"),
        (b'path,client\na,b\nc,"d\ne,f\n', "t.csv, line 3: the table cannot be read from here on"),
        (b"path,client,client\na,b,c\n", "t.csv, line 1: 2 columns are named 'client'"),
        (b"path,,client\na,b,c\n", "t.csv, line 1: a column has no name"),
        (b"path,,\na,b,c\n", "t.csv, line 1: a column has no name"),
    ],
)
def test_what_no_line_can_be_read_from_is_a_fault_of_the_whole(
    tmp_path: Path, content: bytes, what: str
) -> None:
    found, findings = table(tmp_path, content)
    assert found is None
    assert len(findings) == 1
    assert told(findings)[0].startswith(what)
    assert not findings.found[0].example
    assert findings.found[0].hint


def test_the_hints_name_what_helps(tmp_path: Path) -> None:
    _, findings = table(tmp_path, "path\nü\n".encode("latin-1"))
    assert "iconv -f WINDOWS-1252 -t UTF-8 t.csv" in str(findings.found[0])


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    findings = Findings()
    assert read_csv(tmp_path / "no.csv", findings) is None
    assert read_csv(tmp_path, findings) is None
    assert [finding.what for finding in findings] == [
        "the table does not exist",
        "the file cannot be read: Is a directory",
    ]


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        ("a.png", "a.png"),
        ("./a//b.png", "a/b.png"),
        ("a\\b.png", "a/b.png"),
        ("", None),
        (".", None),
        ("/data/a.png", None),
        ("C:\\data\\a.png", None),
        ("\\\\server\\a.png", None),
        ("~/a.png", None),
        ("../a.png", None),
        ("a/../../b.png", None),
        ("a..b/c.png", "a..b/c.png"),
    ],
)
def test_paths_lead_below_the_folder_or_nowhere(cell: str, path: str | None) -> None:
    assert inner_path(cell) == path


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (",".join(["path", *(f"c{k}" for k in range(300_000))]) + "\na\n" * 50,
         "t.csv, line 1: the first line has 300,001 columns, and at most 10,000 are read"),
        ("path," + "c," * 300_000 + "d\na\n",
         "t.csv, line 1: the first line has 300,002 columns, and at most 10,000 are read"),
        ("path,label\na.png," + "x" * 200_000 + "\n", "t.csv, line 2: a cell has more than 131,072 characters"),
        ("x" * 200_000 + ",path\na,b\n", "t.csv, line 1: a cell has more than 131,072 characters"),
    ],
    ids=["many columns", "of one name", "a huge cell", "a huge name"],
)  # fmt: skip
def test_a_table_of_absurd_size_is_one_sentence(tmp_path: Path, content: str, what: str) -> None:
    found, findings = table(tmp_path, content)
    assert found is None
    assert told(findings) == [what]
    assert findings.found[0].hint


def test_a_long_cell_does_not_fill_the_screen(tmp_path: Path) -> None:
    findings = Findings()
    findings.add("t.csv, line 2", f"there is no class '{'x' * 100_000}'")
    assert len(str(findings.found[0])) < 2200
    assert "characters...]" in str(findings.found[0])
