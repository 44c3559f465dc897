"""Tweets by a published tokenizer: the ids are those of transformers, and what is no tokenizer is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.datasets.sent140 import sent140, whole_source, word_pieces
from tests.unit.data.datasets.test_sent140 import write

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sun", "##ny", "moon", "bad", ",", "rain", "!"]
TEXTS = ["The SUN!", "the sunny moon , bad rain", "", "Thé sun", "a 100 % sunsun"]


def vocabulary(folder: Path, pieces: list[str] = PIECES) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return path


def of_transformers(file: Path, **settings: bool) -> Any:
    """The tokenizer of transformers, whose import takes seconds that collecting tests need not wait."""
    from transformers import DistilBertTokenizer

    return DistilBertTokenizer(str(file), **settings)


def test_the_ids_are_those_of_transformers(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "old")
    theirs = of_transformers(path)
    theirs.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "vocab.txt").exists()
    for source in (path, path.parent, tmp_path / "new"):
        ids, size = word_pieces(str(source), 6, download=False)
        assert size == len(PIECES)
        for text in TEXTS:
            assert ids(text) == theirs(text, truncation=True, max_length=6)["input_ids"]


def test_a_tokenizer_with_small_and_capital_letters_is_taken_as_its_file_says(tmp_path: Path) -> None:
    theirs = of_transformers(vocabulary(tmp_path), do_lower_case=False)
    theirs.save_pretrained(tmp_path / "cased")
    ids, _ = word_pieces(str(tmp_path / "cased"), 6, download=False)
    assert ids("the The") == theirs("the The")["input_ids"] == [2, 5, 1, 3]


def test_tweets_are_filled_up_with_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    vocabulary(tmp_path)
    data = sent140(tmp_path, False, 0, length=8, tokenizer=str(tmp_path))
    assert data.train.inputs.tolist() == [
        [2, 5, 6, 5, 6, 5, 8, 3],
        [2, 9, 10, 9, 8, 3, 0, 0],
        [2, 1, 3, 0, 0, 0, 0, 0],
    ]
    assert data.test.inputs.tolist()[0] == [2, 5, 11, 10, 6, 3, 0, 0]
    assert data.vocabulary == len(PIECES)
    assert data.train.targets.tolist() == [1, 0, 0]
    monkeypatch.chdir(tmp_path)
    assert whole_source("vocab.txt") == str(tmp_path / "vocab.txt")
    assert whole_source("hub:us/tiny") == "hub:us/tiny"


def test_a_vocabulary_beside_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    vocabulary(tmp_path)
    with pytest.raises(ConfigError, match="a tokenizer has a vocabulary of its own"):
        sent140(tmp_path, False, 0, vocabulary=10_000, tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"the\nsun\n", "vocab.txt", "no tokenizer can be read: .*not found in the vocabulary"),
        (b"\xff\xfe", "vocab.txt", "no tokenizer can be read: .*UTF-8"),
        (b"{}", "tokenizer.json", "no tokenizer can be read: Model missing"),
        ("\n".join(["[UNK]", *PIECES]).encode(), "vocab.txt", r"\[PAD\] has the id 1, but must have 0"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(
    tmp_path: Path, content: bytes, name: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        word_pieces(str(tmp_path), 8, download=False)


def test_missing_files_packages_and_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (tmp_path, tmp_path / "nothing.txt"):
        with pytest.raises(
            DataError, match=r"no tokenizer can be read: .*name a folder with tokenizer.json or vocab.t"
        ):
            word_pieces(str(missing), 8, download=False)
    with pytest.raises(ConfigError, match="2 ids leave no room for a text"):
        word_pieces(str(vocabulary(tmp_path)), 2, download=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"the tokens of us/tiny \(tokenizer.json\) are not in the cache"):
        word_pieces("hub:us/tiny", 8, download=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs tokenizers, which is not installed.*fedlens\[text\]"):
        word_pieces(str(tmp_path), 8, download=False)
