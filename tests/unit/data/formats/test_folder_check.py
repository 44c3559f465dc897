from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import settings_model
from fedlens.data.formats.folder_check import check_folder, natural
from fedlens.data.formats.registry import FORMATS, find_format
from tests.unit.data.formats.boxed import told, write_coco, write_voc, write_yolo
from tests.unit.data.pictures import pixels, write


def folders_of_classes(folder: Path, each: int = 3) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for k in range(each):
            write(folder / name / f"{k}.png", 10 * label + k)
    return folder


def test_every_format_reads_what_it_says() -> None:
    assert list(FORMATS) == [
        "image-folder",
        "csv",
        "parquet",
        "mask-folder",
        "coco-json",
        "voc-xml",
        "yolo-txt",
    ]
    for row in FORMATS.values():
        assert callable(row.fill())
        wanted = {
            "path",
            "size",
            "fit",
            "channels",
            "test",
            "on_error",
            "client_column",
            "client_level",
            "table",
        }
        assert wanted <= set(settings_model(row.reader()).model_fields)
        assert row.summary
    with pytest.raises(
        ConfigError, match=r"there is no format 'coco' \(--format\); did you mean 'coco-json'"
    ):
        find_format("coco")


@pytest.mark.parametrize(
    ("format", "writer"), [("voc-xml", write_voc), ("coco-json", write_coco), ("yolo-txt", write_yolo)]
)
def test_facts_of_boxes(tmp_path: Path, format: str, writer: object) -> None:
    writer(tmp_path)  # type: ignore[operator]
    check = check_folder(tmp_path, format)
    assert check.findings == ()
    assert check.facts["format"] == format
    assert (check.facts["images"], check.facts["left_out"], check.facts["boxes"]) == (4, 0, 4)
    assert check.facts["classes"] == {"cat": 2, "dog": 2}
    assert check.facts["splits"] == {"train": 2, "test": 2}


def test_facts_of_classes_and_clients(tmp_path: Path) -> None:
    check = check_folder(folders_of_classes(tmp_path), "image-folder", {"client_pattern": "([0-9])"})
    assert check.findings == ()
    assert check.facts["classes"] == {"cat": 3, "dog": 3}
    assert check.facts["clients"] == {"0": 2, "1": 2, "2": 2}


def test_the_only_table_need_not_be_named(tmp_path: Path) -> None:
    folders_of_classes(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the folder has no table .*; name the table with --set table=FILE"
    ):
        check_folder(tmp_path, "csv")
    lines = [f"{name}/{k}.png,{name}{k % 2}" for name in ("cat", "dog") for k in range(3)]
    (tmp_path / "all.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    check = check_folder(tmp_path, "csv")
    assert check.findings == ()
    assert check.facts["format"] == "csv"
    assert check.facts["classes"] == {"cat0": 2, "cat1": 1, "dog0": 2, "dog1": 1}
    (tmp_path / "more.csv").write_text("path,label\ncat/0.png,x\n")
    with pytest.raises(ConfigError, match=r"the folder has 2 files ending in \.csv"):
        check_folder(tmp_path, "csv")
    told_of = [finding.what for finding in check_folder(tmp_path, "csv", {"table": "more.csv"}).findings]
    assert told_of[0] == "there is only one class, 'x'"
    assert told_of[1].startswith("5 of 6 images are not in the table")


def test_every_image_is_decoded_and_findings_are_sorted_by_file(tmp_path: Path) -> None:
    folders_of_classes(tmp_path, each=11)
    # Its header and its end are whole: only decoding shows what is wrong in the middle.
    file = write(tmp_path / "cat" / "9.png", pixels(1, 64, 64))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))
    (tmp_path / "cat" / "10.png").write_bytes(b"")
    (tmp_path / "cat" / "1.png").write_text("<html>")
    check = check_folder(tmp_path, "image-folder")
    said = told(check.findings, tmp_path)
    assert [sentence.split(":")[0] for sentence in said] == [f"DATA/cat/{k}.png" for k in (1, 9, 10)]
    assert "cannot be decoded" in said[1]
    assert check.facts["images"] == 19


def test_what_is_wrong_with_the_whole_comes_first(tmp_path: Path) -> None:
    folders_of_classes(tmp_path, each=4)
    for at in (2, 3):
        (tmp_path / "cat" / f"{at}.png").write_bytes(b"")
    lines = [
        "cat/0.png,0",
        "cat/1.png,2",
        *(f"{name}/{k}.png,0" for name in ("cat", "dog") for k in range(4)),
    ]
    (tmp_path / "z.csv").write_text("path,label\n" + "\n".join(lines[:2] + lines[4:]) + "\n")
    found = check_folder(tmp_path, "csv").findings
    assert [finding.example for finding in found] == [False, True, True]
    assert told(found, tmp_path)[0].startswith("DATA/z.csv: the labels skip 1, and go up to 2")


@pytest.mark.parametrize("table", ["t.csv", "data/t.csv"])
def test_files_are_named_as_they_are_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folders_of_classes(Path("data"))
    (tmp_path / "data" / "cat" / "0.png").write_bytes(b"")
    lines = [f"{name}/{k}.png,{name if k else ''}" for name in ("cat", "dog") for k in range(3)]
    Path(table).write_text("path,label\n" + "\n".join(lines) + "\n")
    found = check_folder(Path("data"), "csv", {"table": table})
    assert [finding.where for finding in found.findings] == [
        "data/cat/0.png",
        *(f"{table}, line {line}" for line in (2, 5)),
    ]


def test_the_only_table_is_that_of_the_folder_and_not_one_of_its_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders_of_classes(Path("data"))
    lines = [f"{name}/{k}.png,{name}" for name in ("cat", "dog") for k in range(3)]
    Path("data/t.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    Path("t.csv").write_text("path\nnothing.png\n")
    assert check_folder(Path("data"), "csv").findings == ()


def test_a_folder_that_is_not_there_and_settings_that_are_wrong(tmp_path: Path) -> None:
    check = check_folder(tmp_path / "nowhere", "csv")
    assert [finding.what for finding in check.findings] == ["the folder does not exist"]
    with pytest.raises(
        ConfigError, match=r"unknown setting 'clientlevel' \(--set clientlevel\); did you mean 'client_level'"
    ):
        check_folder(tmp_path, "voc-xml", {"clientlevel": 1})
    with pytest.raises(
        ConfigError,
        match=r"the setting 'classes' is missing \(--set classes\); pass --set 'classes=\[\"a\", \"b\"\]'",
    ):
        check_folder(tmp_path, "mask-folder")


def test_lines_are_sorted_by_number() -> None:
    lines = ["b.txt, line 2", "a.txt, line 10", "a.txt, line 9", "a10.txt", "a9.txt", "a.txt"]
    expected = ["a9.txt", "a10.txt", "a.txt", "a.txt, line 9", "a.txt, line 10", "b.txt, line 2"]
    assert sorted(lines, key=natural) == expected


def test_a_duplicate_at_another_client_with_another_label_is_warned_about(tmp_path: Path) -> None:
    for at, name in enumerate(
        f"{client}/{label}/{k}.png" for client in "ab" for label in ("cat", "dog") for k in "12345"
    ):
        write(tmp_path / name, pixels(at))
    write(tmp_path / "b" / "dog" / "6.png", pixels(2))
    warnings = check_folder(tmp_path, "image-folder", {"label_level": 2, "client_level": 1}).warnings
    assert told(warnings, tmp_path) == [
        "DATA/b/dog/6.png: the same image has different labels: 'a/cat/3.png' (a, cat) and 'b/dog/6.png' (b, dog); "
        "correct the label of one, or remove one of them."
    ]


@pytest.mark.parametrize("half", ["\ud800", "x\udcff"])
def test_half_a_character_in_a_name_is_a_problem(tmp_path: Path, half: str) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["categories"][0]["name"] = half
        for image in content["images"]:
            image["hospital"] = image["file_name"] + half

    write_coco(tmp_path, rename)
    for name in ("test.json", "train.json"):
        content = json.loads((tmp_path / name).read_text())
        content["categories"][0]["name"] = half
        (tmp_path / name).write_text(json.dumps(content))
    shown = half.encode("ascii", "backslashreplace").decode()
    said = told(check_folder(tmp_path, "coco-json").findings, tmp_path)
    assert (
        f"DATA: the name of the class '{shown}' has half of a character, {shown[-6:]}; write it in UTF-8, or "
        in said[0]
    )
    assert [
        f"the name of the value of 'hospital' '{name}.png{shown}' has half" in line
        for name, line in zip("ab", said[1:], strict=True)
    ]


def test_a_file_name_that_no_file_can_have_is_a_problem(tmp_path: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["images"][0]["file_name"] = "\ud800.png"

    said = told(check_folder(write_coco(tmp_path, rename), "coco-json").findings, tmp_path)
    assert "image 10: its file '\\ud800.png' has a character that no file name can have" in "".join(said)


@pytest.mark.parametrize("format", ["coco-json", "voc-xml", "mask-folder", "yolo-txt"])
def test_paths_of_a_table_may_start_at_the_folder_of_the_images(tmp_path: Path, format: str) -> None:
    settings: dict[str, Any] = {"table": "t.csv", "client_column": "hospital"}
    if format == "mask-folder":
        settings["classes"] = ["road", "tree"]
        for at, name in enumerate("abcd"):
            write(tmp_path / "images" / f"{name}.png", pixels(at))
            write(tmp_path / "masks" / f"{name}.png", pixels(at, channels=1) % 2)
    else:
        {"coco-json": write_coco, "voc-xml": write_voc, "yolo-txt": write_yolo}[format](tmp_path)
    lines = [f"{name}.png,{'Bonn' if name in 'ac' else 'Celle'}" for name in "abcd"]
    (tmp_path / "t.csv").write_text("\n".join(["path,hospital", *lines, "e.png,Bonn"]) + "\n")
    check = check_folder(tmp_path, format, settings)
    assert check.facts["clients"] == {"Bonn": 2, "Celle": 2}
    assert [finding.what for finding in check.findings] == ["the file 'e.png' does not exist"]
    assert any("of t.csv found in " in note for note in check.facts["notes"])


def test_a_path_that_is_in_two_image_folders_is_a_problem(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    write(tmp_path / "images" / "test" / "a.png", pixels(50))
    (tmp_path / "t.csv").write_text("path,site\na.png,x\nb.png,y\nc.png,x\nd.png,y\nimages/test/a.png,x\n")
    first = check_folder(tmp_path, "yolo-txt", {"table": "t.csv"}).findings[-1]
    assert first.what == "'a.png' is in several folders: images/test, images/train"


def test_the_check_suggests_the_table_and_the_column_that_name_the_clients(tmp_path: Path) -> None:
    folders_of_classes(tmp_path)
    lines = [
        f"{name}/{k}.png,{name}{k},{('Celle', 'Gera')[k % 2]}" for name in ("cat", "dog") for k in range(3)
    ]
    (tmp_path / "shops.csv").write_text("file,id,shop\n" + "\n".join(lines) + "\n")
    (tmp_path / "prices.csv").write_text("shop,price\nCelle,3\n")
    hint = str(check_folder(tmp_path, "image-folder").warnings[-1])
    assert "(client_column, such as table=shops.csv client_column=shop path_column=file)" in hint
    hint = str(
        check_folder(tmp_path, "image-folder", {"table": "shops.csv", "path_column": "file"}).warnings[-1]
    )
    assert "(client_column, such as client_column=shop)" in hint
