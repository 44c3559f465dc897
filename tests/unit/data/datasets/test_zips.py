import zipfile
from pathlib import Path

import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.dataset_files import unzip


def write(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


def test_what_is_wanted_is_unpacked_and_nothing_else(tmp_path: Path) -> None:
    archive = write(tmp_path / "x.zip", {"a/": b"", "a/one.png": b"1", "a/b/two.png": b"2", "a/no.txt": b"3"})
    assert unzip(archive, tmp_path / "out", lambda name: name.endswith(".png")) == 2
    files = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.*")
    }
    assert files == {"a/one.png": b"1", "a/b/two.png": b"2"}


@pytest.mark.parametrize("name", ["../harm.png", "a/../../harm.png", "/harm.png"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    archive = write(tmp_path / "x.zip", {name: b"1"})
    with pytest.raises(DataError, match="points outside the folder"):
        unzip(archive, tmp_path / "deep" / "out", lambda name: True)
    assert not list(tmp_path.rglob("harm.png"))


def test_a_damaged_member_is_found_and_gets_no_file(tmp_path: Path) -> None:
    archive = write(tmp_path / "x.zip", {"a.png": b"published"})
    content = archive.read_bytes()
    archive.write_bytes(content.replace(b"published", b"publishee", 1))
    with pytest.raises(DataError, match="cannot be unpacked") as caught:
        unzip(archive, tmp_path / "out", lambda name: True)
    assert caught.value.where == str(archive)
    assert list((tmp_path / "out").iterdir()) == []


def test_no_archive_and_nothing_wanted_are_errors(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"<html>")
    with pytest.raises(DataError, match="cannot be unpacked"):
        unzip(tmp_path / "x.zip", tmp_path, lambda name: True)
    archive = write(tmp_path / "y.zip", {"a.png": b"1"})
    with pytest.raises(DataError, match="none of the expected files"):
        unzip(archive, tmp_path, lambda name: False)
