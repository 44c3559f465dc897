from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets.penn_treebank import penn_treebank, windows
from fedlens.data.datasets.shakespeare import shakespeare
from fedlens.data.datasets.text import LETTERS
from fedlens.data.download import Resource
from tests.unit.data.datasets.small_files import leaf, write_leaf

# As the published files are: a blank at each end of a line.
TRAIN = " mr. <unk> is chairman of <unk> n.v. the dutch publishing group \n rudolph <unk> N years old $ N \n"
TEST = " no it was n't black monday \n"
TEXT = "mr. [unk] is chairman of [unk] n.v. the dutch publishing group\nrudolph [unk] N years old   N\n"


def write(root: Path, folder: str = "PennTreebank", form: str = "ptb") -> None:
    (root / folder).mkdir(parents=True)
    for split, text in (("train", TRAIN), ("test", TEST)):
        if form == "ptb.char":
            lines = [line.strip().replace(" ", "_") for line in text.splitlines()]
            text = "".join(f" {' '.join(line)} \n" for line in lines)
        (root / folder / f"{form}.{split}.txt").write_text(text)


def decoded(row: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in row)


@pytest.mark.parametrize("folder", ["PennTreebank", "penn-treebank", "simple-examples/data"])
@pytest.mark.parametrize("form", ["ptb", "ptb.char"])
def test_windows_of_the_text_and_the_next_character(tmp_path: Path, folder: str, form: str) -> None:
    write(tmp_path, folder, form)
    data = penn_treebank(tmp_path, False, 0, length=20, stride=7)
    starts = range(0, len(TEXT) - 20, 7)
    assert [decoded(row) for row in data.train.inputs] == [TEXT[at : at + 20] for at in starts]
    assert decoded(data.train.targets) == "".join(TEXT[at + 20] for at in starts)
    assert decoded(data.test.inputs[0]) == "no it was n't black "
    assert (data.train.inputs.dtype, data.train.targets.dtype) == (np.int16, np.int64)
    assert (data.kind, data.mean, data.train.columns) == ("language", (), {})
    assert data.notes == ("read 1 characters that the vocabulary lacks as spaces",)


def test_it_fits_a_model_for_shakespeare(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "PennTreebank" / "ptb.test.txt").write_text(TRAIN)
    for split in ("train", "test"):
        write_leaf(tmp_path / "shakespeare" / split, leaf({"r": (["a" * 80], ["b"])}))
    here, there = penn_treebank(tmp_path, False, 0), shakespeare(tmp_path, False, 0)
    assert here.input_shape == there.input_shape == (80,)
    assert here.classes == there.classes


@pytest.mark.parametrize(("length", "stride"), [(3, 1), (3, 2), (3, 3), (3, 5), (1, 1), (9, 4)])
def test_each_window_is_whole_and_followed_by_its_target(length: int, stride: int) -> None:
    ids = np.arange(10)
    inputs, targets = windows(ids, length, stride)
    starts = [at for at in range(0, 10, stride) if at + length < 10]
    assert inputs.tolist() == [list(range(at, at + length)) for at in starts]
    assert targets.tolist() == [at + length for at in starts]
    assert inputs.flags.owndata


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match="has 27 characters, and an input with its target takes 81") as caught:
        penn_treebank(tmp_path, False, 0)
    assert str(caught.value.where).endswith("ptb.test.txt")
    with pytest.raises(DataError, match="takes 28"):
        penn_treebank(tmp_path, False, 0, length=27)
    assert len(penn_treebank(tmp_path, False, 0, length=26).test) == 1


def test_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "PennTreebank" / "ptb.test.txt").unlink()
    with pytest.raises(DataError, match=r"is incomplete in .*: missing PennTreebank/ptb\.test\.txt"):
        penn_treebank(tmp_path, False, 0)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "PennTreebank" / "ptb.train.txt").write_bytes(b"\xff\xfe\x00a" * 99)
    with pytest.raises(DataError, match="cannot be read"):
        penn_treebank(tmp_path, False, 0)


def test_a_download_puts_both_files_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(resource: Resource, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / resource.name
        path.write_text(TRAIN if "train" in resource.name else TEST)
        return path

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    assert len(penn_treebank(tmp_path, True, 0, length=20, stride=100).train) == 1
    assert (tmp_path / "PennTreebank" / "ptb.train.txt").is_file()
