from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets.omniglot import omniglot
from tests.unit.data.datasets.small_files import zipped

ALPHABETS = {"Greek": 3, "Balinese": 2}  # and how many characters each has here
EVALUATION = {"Angelic": 2}


def ink(number: int, drawer: int) -> np.ndarray:
    """bool [105, 105]: where there is ink; another place for each image."""
    drawn = np.zeros((105, 105), bool)
    drawn[5 + number * 15 : 20 + number * 15, 5 + drawer * 4 : 15 + drawer * 4] = True
    return drawn


def write(root: Path, alphabets: dict[str, int] = ALPHABETS, part: str = "background") -> Path:
    """Characters of 20 drawers each, as published: 1-bit PNG files, ink black on white."""
    folder = root / "omniglot-py" / f"images_{part}"
    number = 0
    for alphabet, characters in alphabets.items():
        for character in range(1, characters + 1):
            number += 1
            place = folder / alphabet / f"character{character:02d}"
            place.mkdir(parents=True)
            for drawer in range(1, 21):
                Image.fromarray(~ink(character, drawer)).save(place / f"{number:04d}_{drawer:02d}.png")
    return folder


def held_out(character: Iterable[int], drawer: Iterable[int]) -> list[bool]:
    return [(c + d) % 5 == 0 for c, d in zip(character, drawer, strict=True)]


def test_a_character_is_a_class_and_an_alphabets_drawer_a_client(tmp_path: Path) -> None:
    write(tmp_path)
    data = omniglot(tmp_path, False, 0)
    assert data.classes == (
        "Balinese/character01", "Balinese/character02",
        "Greek/character01", "Greek/character02", "Greek/character03",
    )  # fmt: skip
    assert data.coarse is not None
    assert data.coarse.tolist() == [0, 0, 1, 1, 1]
    assert (data.input_shape, len(data.train), len(data.test)) == ((1, 28, 28), 80, 20)
    both = [*data.train.columns["client"], *data.test.columns["client"]]
    assert sorted(set(both)) == sorted(f"{a}/drawer{d:02d}" for a in ALPHABETS for d in range(1, 21))
    for split in (data.train, data.test):
        for label, client, alphabet, drawer in zip(
            split.targets, *(split.columns[key] for key in ("client", "alphabet", "drawer")), strict=True
        ):
            assert client == f"{alphabet}/drawer{drawer:02d}"
            assert data.classes[label].startswith(alphabet)


def test_ink_is_bright_and_whole_images_are_as_published(tmp_path: Path) -> None:
    write(tmp_path)
    data = omniglot(tmp_path, False, 0, size=105)
    for split in (data.train, data.test):
        for image, label, drawer in zip(split.inputs, split.targets, split.columns["drawer"], strict=True):
            character = int(data.classes[label][-2:])
            np.testing.assert_array_equal(image[0], 255 * ink(character, drawer))
    np.testing.assert_allclose(data.mean[0], 150 / 105**2)
    small = omniglot(tmp_path, False, 0).train.inputs
    assert small.min() == 0
    np.testing.assert_allclose(small.mean() / 255, 150 / 105**2, atol=2e-3)


def test_a_fifth_of_each_character_is_for_testing_and_every_drawer_trains(tmp_path: Path) -> None:
    write(tmp_path)
    data = omniglot(tmp_path, False, 0)
    assert np.bincount(data.test.targets).tolist() == [4] * 5
    for split, expected in ((data.train, False), (data.test, True)):
        characters = [int(data.classes[label][-2:]) for label in split.targets]
        assert set(held_out(characters, split.columns["drawer"])) == {expected}
    assert len(set(data.train.columns["client"])) == 40


def test_drawers_may_be_held_out_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path)
    data = omniglot(tmp_path, False, 0, test="drawers")
    assert set(data.test.columns["drawer"].tolist()) == {5, 10, 15, 20}
    assert not set(data.test.columns["client"]) & set(data.train.columns["client"])
    assert np.bincount(data.test.targets).tolist() == [4] * 5


def test_parts_are_read_apart_or_together(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, EVALUATION, "evaluation")
    (tmp_path / "omniglot-py" / "images_background" / ".DS_Store").touch()
    assert len(omniglot(tmp_path, False, 0).classes) == 5
    assert omniglot(tmp_path, False, 0, part="evaluation").classes == (
        "Angelic/character01", "Angelic/character02",
    )  # fmt: skip
    together = omniglot(tmp_path, False, 0, part="all")
    assert len(together.train) + len(together.test) == 140
    assert together.classes[0] == "Angelic/character01"
    assert together.coarse is not None
    assert together.coarse.tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(
        DataError, match=r"Omniglot is incomplete in .*: missing omniglot-py/images_evaluation"
    ):
        omniglot(tmp_path, False, 0, part="all")


PLACE = Path("Greek", "character02")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("drawer3.png", "no drawer is named"),
        ("0004_3.png", "no drawer is named"),
        ("0004_00.png", "no drawer is named"),
        ("0005_07.png", "the drawer has another image of this character"),
    ],
)
def test_a_wrongly_named_image_is_refused(tmp_path: Path, name: str, what: str) -> None:
    place = write(tmp_path) / PLACE
    (place / name).write_bytes((place / "0002_01.png").read_bytes())
    with pytest.raises(DataError, match=what) as caught:
        omniglot(tmp_path, False, 0)
    assert str(PLACE) in str(caught.value.where)


def test_damaged_images_are_named(tmp_path: Path) -> None:
    path = write(tmp_path) / PLACE / "0002_07.png"
    content = path.read_bytes()
    for damaged, what in ((b"", "cannot be decoded"), (content[:60], "cannot be decoded")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=what) as caught:
            omniglot(tmp_path, False, 0)
        assert caught.value.where == str(path)
    Image.new("1", (105, 104)).save(path)
    with pytest.raises(DataError, match="the image is 105 x 104, and 105 x 105 is expected"):
        omniglot(tmp_path, False, 0)


def test_empty_folders_are_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "Greek" / "character09").mkdir()
    with pytest.raises(DataError, match="the folder of a character has no images") as caught:
        omniglot(tmp_path, False, 0)
    whole = tmp_path / "omniglot-py" / "images_background"
    assert caught.value.hint == f"remove {whole} and get it again, for example with --download"
    (tmp_path / "empty" / "omniglot-py" / "images_background").mkdir(parents=True)
    (tmp_path / "empty" / "omniglot-py" / "images_background" / "readme.txt").touch()
    with pytest.raises(DataError, match="there are no alphabets"):
        omniglot(tmp_path / "empty", False, 0)


def test_a_download_is_unpacked_and_the_archive_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "there").parent
    monkeypatch.setattr(dataset_files, "fetch", zipped(source))
    data = omniglot(tmp_path, True, 0)
    assert len(data.train) == 80
    assert [path.name for path in (tmp_path / "omniglot-py").iterdir()] == ["images_background"]
