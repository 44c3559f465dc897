"""What is found out about image files once, and when it is found out again."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.loading import judge
from tests.unit.data.pictures import write


@pytest.fixture
def ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFiles:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = [f"{at}.png" for at in range(10)]
    for at, name in enumerate(names):
        write(tmp_path / "images" / name, at)
    return ImageFiles(tmp_path / "images", Paths.of(names), 3, 8, 8)


def again(images: ImageFiles) -> tuple[dict[int, str], str, int]:
    """(what is wrong by position, the contents, how often it was said that files are checked)."""
    said: list[str] = []
    verdict = judge(images, said.append)
    return {at: str(fault) for at, fault in verdict.faults.items()}, verdict.contents, len(said)


def test_the_fingerprint_knows_names_contents_and_the_form(ten: ImageFiles) -> None:
    first = ten.fingerprint()
    assert first == ten.kept(500).fingerprint()
    ids = np.zeros(256, np.uint8)
    others = [
        replace(ten, width=9),
        replace(ten, fit="pad"),
        replace(ten, upright=True),
        replace(ten, ids=ids),
        replace(ten, ids=ids + 1),
        ten.subset(np.arange(9, -1, -1)),
    ]
    prints = {first, *(other.fingerprint() for other in others)}
    ten.path(0).write_bytes(ten.path(0).read_bytes()[:-1] + b"x")  # as long as before
    prints.add(ten.fingerprint())
    assert len(prints) == 8
    ten.path(3).unlink()
    with pytest.raises(DataError, match=r"3\.png"):
        ten.fingerprint()


def test_files_are_read_once_and_again_when_one_has_changed(ten: ImageFiles) -> None:
    nothing, contents, times = again(ten)
    assert (nothing, times) == ({}, 1)
    assert again(ten) == ({}, contents, 0)
    content = ten.path(4).read_bytes()
    ten.path(4).write_bytes(content[: len(content) // 2])
    ten.path(7).unlink()
    wrong, other, times = again(ten)
    assert list(wrong) == [4, 7]
    assert "4.png" in wrong[4]
    assert "copy or export it again" in wrong[4]
    assert (times, other != contents) == (1, True)
    assert again(ten) == (wrong, other, 0)  # with the same words
    ten.path(4).write_bytes(content)
    write(ten.path(7), 7)
    assert again(ten)[:2] == ({}, contents)


def test_a_file_of_the_same_size_is_read_again_by_its_time(ten: ImageFiles) -> None:
    _, contents, _ = again(ten)
    before = ten.path(2).stat()
    content = bytearray(ten.path(2).read_bytes())
    content[-1] ^= 1
    ten.path(2).write_bytes(content)
    os.utime(ten.path(2), ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert again(ten)[1] != contents


def test_another_form_is_another_verdict(ten: ImageFiles) -> None:
    again(ten)
    for other in (replace(ten, fit="pad"), replace(ten, width=4), ten.subset(np.arange(9))):
        assert again(other)[2] == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"faulty": ["a"], "contents": ""}',
        '{"faulty": 3, "contents": ""}',
        '{"faulty": [10], "contents": ""}',
    ],
)
def test_a_damaged_verdict_is_found_out_anew(ten: ImageFiles, tmp_path: Path, content: str) -> None:
    first = again(ten)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text(content)
    assert again(ten) == first
    assert again(ten)[2] == 0


def test_a_cache_that_cannot_be_written_costs_time_only(ten: ImageFiles, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert again(ten) == again(ten)
    assert again(ten)[2] == 1


def test_a_fault_that_has_passed_is_not_held_against_the_files(
    ten: ImageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a drive that was away: nothing of it shows in name, size or time."""
    contents = judge(ten, lambda sentence: None).contents
    for kept in (Path(os.environ["XDG_CACHE_HOME"])).rglob("*.json"):
        kept.unlink()
    real = Image.open

    def busy(path: Path) -> Image.Image:
        if Path(path).name == "3.png":
            raise OSError(24, "Too many open files")
        return real(path)

    monkeypatch.setattr(Image, "open", busy)
    assert list(again(ten)[0]) == [3]
    assert (list(again(ten)[0]), again(ten)[2]) == ([3], 0)
    monkeypatch.setattr(Image, "open", real)
    assert again(ten) == ({}, contents, 1)
    assert again(ten) == ({}, contents, 0)
