import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.probe import FORMATS, probe, probe_all, stored_sizes
from tests.unit.data.pictures import pixels, write


def fault(path: Path, **how: bool) -> str:
    with pytest.raises(DataError) as caught:
        probe(path, **how)
    assert caught.value.where == str(path)
    assert caught.value.hint, "every fault says what to do"
    return str(caught.value)


@pytest.mark.parametrize("ending", sorted(FORMATS))
def test_a_good_file_of_every_format_has_its_size(tmp_path: Path, ending: str) -> None:
    image = pixels(0, 6, 9, channels=1 if ending in (".pgm", ".pbm") else 3)
    path = tmp_path / f"a{ending.upper()}"
    made = Image.fromarray(image)
    made.convert("1" if ending == ".pbm" else made.mode).save(path, format=FORMATS[ending])
    assert probe(path).size == (9, 6)
    assert probe(path, full=True).size == (9, 6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_usual_mode_is_fine_for_a_photograph(tmp_path: Path, mode: str) -> None:
    Image.fromarray(pixels(0)).convert(mode).save(tmp_path / "a.png")
    assert probe(tmp_path / "a.png").size == (8, 8)


def test_a_file_is_missing_a_folder_or_empty(tmp_path: Path) -> None:
    assert fault(tmp_path / "a.png").startswith("the file does not exist")
    (tmp_path / "b.png").mkdir()
    assert fault(tmp_path / "b.png").startswith("it is a folder, not an image file")
    (tmp_path / "c.png").touch()
    assert fault(tmp_path / "c.png").startswith("the file is empty (0 bytes)")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello", "not a readable image"),
        (b"<!DOCTYPE html><html>", "the file is a web page"),
        (b"\xef\xbb\xbf \n<html>", "the file is a web page"),
        (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "the file is an SVG drawing"),
        (b'{"error": 404}', "the file is JSON text"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "the file is a Git LFS pointer"),
        (b"\0" * 128 + b"DICM" + b"\0" * 99, "the file is a DICOM file"),
        (b"\0\0\0\x18ftypheic" + b"\0" * 99, "the file is a HEIC photograph"),
        (b"%PDF-1.7", "the file is a PDF document"),
        (b"PK\x03\x04", "the file is a ZIP archive"),
        (b"\x93NUMPY\x01\x00", "the file is a NumPy array"),
    ],
)
def test_what_is_no_image_is_named_for_what_it_is(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "a.png").write_bytes(content)
    assert fault(tmp_path / "a.png").startswith(what)


def test_a_file_of_another_format_than_its_name_says(tmp_path: Path) -> None:
    Image.fromarray(pixels(0)).save(tmp_path / "a.png", format="JPEG")
    text = fault(tmp_path / "a.png")
    assert "the file name ends in .png, and the file is a JPEG" in text
    assert "rename it to end in .jpg" in text
    Image.fromarray(pixels(0)).save(tmp_path / "b", format="PNG")
    assert "has no ending, and the file is a PNG" in fault(tmp_path / "b")


@pytest.mark.parametrize("ending", [".jpg", ".png", ".bmp", ".gif", ".webp", ".tif"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_cut_off_file_is_found_without_a_full_look(tmp_path: Path, ending: str, share: float) -> None:
    path = write(tmp_path / f"a{ending}", pixels(1, 64, 64))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "cannot be decoded" in fault(path)


def test_what_cameras_write_behind_the_end_is_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jpg", pixels(1, 64, 64))
    path.write_bytes(path.read_bytes() + b"maker's notes" * 500)
    assert probe(path).size == (64, 64)


def test_damage_in_the_middle_shows_only_in_a_full_look(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", pixels(1, 64, 64))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    assert probe(path).size == (64, 64)
    assert "cannot be decoded" in fault(path, full=True)


def _cmyk(path: Path) -> Path:
    Image.new("CMYK", (4, 4)).save(path.with_suffix(".jpg"))
    return path.with_suffix(".jpg")


def _film(path: Path) -> Path:
    frames = [Image.fromarray(pixels(seed)) for seed in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    return path


def _pages(path: Path) -> Path:
    return _film(path.with_suffix(".tif"))


def _deep(dtype: type, ending: str) -> Callable[[Path], Path]:
    return lambda path: write(path.with_suffix(ending), np.zeros((4, 4), dtype))


def _deep_colour(path: Path) -> Path:
    """A PNG of 16 bits per channel, which Pillow reads but does not write."""
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress((b"\0" + b"\x12\x34" * 6) * 2)
    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_cmyk, "the colours of the image are CMYK, for print"),
        (_film, "the image has 3 frames"),
        (_pages, "the image has 3 frames"),
        (_deep(np.uint16, ".png"), "the image has 16 bits per channel"),
        (_deep(np.uint16, ".tif"), "the image has 16 bits per channel"),
        (_deep(np.int32, ".tif"), "the image has 32 bits per channel"),
        (_deep(np.float32, ".tif"), "the image has 32 bits per channel"),
        (_deep_colour, "the image has 16 bits per channel"),
    ],
)
def test_what_a_photograph_cannot_be(tmp_path: Path, make: Callable[[Path], Path], what: str) -> None:
    assert fault(make(tmp_path / "a.png")).startswith(what)


def test_the_second_image_of_a_cameras_file_is_no_film(tmp_path: Path) -> None:
    frames = [Image.fromarray(pixels(seed)) for seed in range(2)]
    frames[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=frames[1:])
    assert probe(tmp_path / "a.jpg", full=True).size == (8, 8)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_can_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png", pixels(0, 100, 100))
    for limit in (9_000, 4_000):  # Pillow warns above the limit, and refuses above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert "pixels; the limit is 0 million" in fault(path)


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_a_mask_has_one_channel_of_whole_numbers(tmp_path: Path, mode: str) -> None:
    array = pixels(0, channels=1)
    image = (
        Image.fromarray(array.astype(np.uint16)) if mode == "I;16" else Image.fromarray(array).convert(mode)
    )
    image.save(tmp_path / "m.png")
    assert probe(tmp_path / "m.png", mask=True).size == (8, 8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_a_mask_in_colour_is_a_fault(tmp_path: Path, mode: str) -> None:
    Image.fromarray(pixels(0)).convert(mode).save(tmp_path / "m.png")
    assert f"the mask is in colour ({mode})" in fault(tmp_path / "m.png", mask=True)


def test_many_files_are_looked_at_in_their_order(tmp_path: Path) -> None:
    names = []
    for at in range(40):
        names.append(f"{at}.png")
        write(tmp_path / names[-1], pixels(at, 4, at + 1))
    for at in (3, 17, 30):
        (tmp_path / names[at]).write_bytes(b"")
    findings = Findings()
    headers = probe_all(tmp_path, names, findings, threads=4)
    assert stored_sizes(headers) == [None if at in (3, 17, 30) else (at + 1, 4) for at in range(40)]
    assert [finding.where for finding in findings] == [str(tmp_path / names[at]) for at in (3, 17, 30)]
    assert all(finding.example and finding.hint for finding in findings)


def test_a_full_look_and_masks_are_passed_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", pixels(1, 64, 64))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    for how, count in (({}, 0), ({"full": True}, 1), ({"mask": True}, 1)):
        findings = Findings()
        probe_all(tmp_path, ["a.png"], findings, **how)
        assert len(findings) == count
