"""`fedlens data show`: what its pictures show, for every kind of dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.studies.reproductions import left_out
from fedlens.tasks.picture import boxes_drawn, class_colour
from tests.unit.cli.printed import parsed
from tests.unit.data.pictures import write

OWN = '''
"""Images in one grey for each class."""
import numpy as np
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples

def _dataset(images, targets, classes, **more):
    split = Examples(images, targets)
    plain = more.pop("text", False)
    return Dataset("own", split, split, tuple(classes), *(((), ()) if plain else ((0.0,), (1.0,))), "", "", **more)

def greys(root, download, seed, *, classes: int = 3, brighter: int = 0):
    labels = np.arange(8 * classes) % classes
    grey = (20 + brighter + labels * (200 // classes)).astype(np.uint8)
    return _dataset(np.tile(grey[:, None, None, None], (1, 1, 4, 4)), labels, map(str, range(classes)))

def noise(root, download, seed):
    images = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4)).astype(np.uint8)
    return _dataset(images, np.arange(40) % 2, "ab")

def masks(root, download, seed):
    rows = np.zeros((6, 4, 4), np.uint8)
    rows[1:3, :2] = 1
    return _dataset(np.full((6, 1, 4, 4), 90, np.uint8), rows, ("road", "sky"))

def boxes(root, download, seed):
    corners = np.array([[0, 0, 3, 3], [1, 1, 4, 4]], np.float32)
    return _dataset(np.zeros((4, 1, 4, 4), np.uint8), Boxes(corners, np.array([0, 1]), np.array([0, 1, 1, 2, 2])), "ab")

def letters(root, download, seed):
    names = ("a", "b", "space", "newline")
    tokens = np.array([[0, 1, 2, 0]] * 3, np.int16)
    return _dataset(tokens, np.array([3, -1, 1]), names, vocabulary=4, text=True)

def words(root, download, seed):
    return _dataset(np.zeros((3, 4), np.int16), np.array([0, 1, 0]), "ab", vocabulary=9, text=True)
'''


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def show(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", "show", *map(str, arguments)])


def shown(*arguments: object) -> np.ndarray:
    """The picture, int64 [H, W, 3]."""
    answer = show(*arguments)
    assert answer.exit_code == 0, answer.output
    return np.asarray(Image.open(answer.stdout.splitlines()[-1])).astype(np.int64)


def said(answer: Result) -> str:
    assert answer.exit_code == 2
    return " ".join(answer.stderr.split())


def test_each_class_is_a_row_of_its_own_images() -> None:
    picture = shown("own.py:greys", "--per-class", 2)
    assert Path("own.png").is_file()
    rows = picture[65, 65:780:130, 0]  # images of 128 pixels with gaps of two, and rows beside each other
    assert rows.tolist() == [20, 20, 86, 86, 152, 152]


def test_a_seed_draws_the_same_examples_and_another_one_others() -> None:
    first, again, other = (shown("own.py:noise", "--seed", seed) for seed in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()


def test_of_many_classes_a_hundred_are_shown_and_the_picture_says_so() -> None:
    answer = show("own.py:greys", "--set", "classes=150", "--out", "few.png")
    assert answer.stdout.splitlines()[0] == (
        "own: 4 random training images of each of 100 of 150 classes, evenly spread; seed 0"
    )


def test_masks_lie_over_the_image_beside_it() -> None:
    picture = shown("own.py:masks", "--per-class", 2)
    assert (picture[:168, :224] == 90).all()
    grey = np.ptp(picture[60, 224:448], axis=-1)
    assert grey.min() > 0  # a colour everywhere


def test_boxes_have_the_names_of_their_classes_without_a_score() -> None:
    picture = shown("own.py:boxes", "--per-class", 1)
    for label in range(2):
        assert (picture == class_colour(label)).all(axis=-1).any()
    image, box = np.zeros((1, 40, 40), np.uint8), np.array([[5, 15, 30, 30.0]])
    named = boxes_drawn(image, box, np.array([0]), classes=["cell"])
    scored = boxes_drawn(image, box, np.array([0]), np.array([0.5]), classes=["cell"])
    blue = [(drawn == class_colour(0)).all(axis=-1).sum() for drawn in (named, scored)]
    assert blue[0] < blue[1]  # the score makes the label wider


def test_a_folder_of_ones_own_is_read_in_its_format() -> None:
    for name, grey in (("cat", 40), ("dog", 200)):
        for k in range(5):
            write(Path("pets", name, f"{k}.png"), np.full((8, 8), grey + k, np.uint8))
    picture = shown("pets", "--per-class", 1)
    assert (picture[65, [65, 195], 0] // 40).tolist() == [1, 5]
    table = "".join(f"{name}/{k}.png,{name}\n" for name in ("cat", "dog") for k in range(5))
    Path("pets", "pets.csv").write_text(f"path,label\n{table}")
    assert (shown("pets", "--per-class", 1)[65, [65, 195], 0] // 40).tolist() == [1, 5]


def test_rows_of_several_settings_and_pairs_of_views() -> None:
    rows = shown("own.py:greys", "--each", "brighter=0", "--each", "brighter=35", "--per-class", 1)
    assert rows[65, 195, 0] - rows[65, 65, 0] == 35  # the same image in both
    small = (
        "fractals",
        *(w for key in ("size=8", "train=4", "test=1", "codes=20", "iterations=20") for w in ("--set", key)),
    )
    one, two = (
        shown(*small, "--each", f"pairs={pairs}", "--per-class", 1).shape for pairs in ("false", "true")
    )
    assert two[0] - one[0] == 130  # the second drawing is below the first
    assert shown(*small, "--each", "pairs=false", "--augment", "flip", "--per-class", 1).shape == two
    labelled = (*small, "--each", 'labels="several"', "--augment", "flip", "--per-class", 1)
    assert shown(*labelled).shape == one


def test_augmentations_move_masks_and_boxes() -> None:
    flip = '{name="flip", p=1.0}'
    for name in ("masks", "boxes"):
        plain, flipped = (
            shown(f"own.py:{name}", "--seed", 3),
            shown(f"own.py:{name}", "--seed", 3, "--augment", flip),
        )
        assert plain.shape == flipped.shape
        assert (plain == flipped).all() == (name == "masks")  # whose rows are symmetric


def test_texts_are_printed_or_written() -> None:
    answer = show("own.py:letters")
    assert sorted(answer.stdout.splitlines()) == ['"ab a"', '"ab a" -> "\\n"', '"ab a" -> "b"']
    show("own.py:letters", "--out", "texts.txt", "--per-class", 2)
    assert len(Path("texts.txt").read_text().splitlines()) == 2


def test_what_cannot_be_shown_is_said() -> None:
    assert "the texts of 'own' are numbers of tokens" in said(show("own.py:words"))
    assert "'own' is text, which is not augmented" in said(show("own.py:letters", "--augment", "flip"))
    assert "unknown augmentation 'flipp' (--augment); did you mean 'flip'" in said(
        show("digits", "--augment", "flipp")
    )
    assert "'digits.jpg' does not end in .png" in said(show("digits", "--out", "digits.jpg"))
    assert "unknown dataset 'digit' (NAME); did you mean 'digits'" in said(show("digit"))
    assert "needs 'path'" in said(show("image-folder"))


@pytest.mark.parametrize(("figure", "rows"), [("fig5", 3), ("fig9", 3)])
def test_the_figures_of_fractals_without_a_study_name_their_command(figure: str, rows: int) -> None:
    verbs, options = parsed(left_out()[f"chen2022/{figure}"].split("`")[1])
    assert (verbs, options["name"], len(options["each"])) == ("data show", "fractals", rows)
