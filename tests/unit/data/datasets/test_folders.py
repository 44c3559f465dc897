from pathlib import Path

import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.dataset_files import read_lines
from fedlens.data.datasets.folders import absent, check_present, folders_in, images_in


def test_images_and_folders_are_listed_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.JPEG", "a.png", "c.jpg", "._b.JPEG", "boxes.txt"):
        (tmp_path / name).touch()
    for name in ("two", "one", ".cache"):
        (tmp_path / name).mkdir()
    assert images_in(tmp_path) == ["a.png", "b.JPEG", "c.jpg"]
    assert folders_in(tmp_path) == ["one", "two"]


def test_absent_files_are_found_in_every_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "1.jpg").touch()
    (tmp_path / "2.jpg").touch()
    names = ["gone/1.jpg", "a/b/1.jpg", "2.jpg", "a/b/2.jpg", "1.jpg"]
    assert absent(tmp_path, names) == [0, 3, 4]
    with pytest.raises(DataError, match=r"3 of the 5 images .* the first is gone/1.jpg of line 1") as caught:
        check_present(tmp_path, names, "list.txt")
    assert caught.value.where == "list.txt"
    check_present(tmp_path, names[1:3], "list.txt")


def test_lines_are_read_from_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes("\ufeffa 1\r\nb 2\n\n".encode())
    assert read_lines(path) == ["a 1", "b 2"]
    path.write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="cannot be read"):
        read_lines(path)
