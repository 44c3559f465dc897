"""Sentiment140: tweets by user, in LEAF's JSON files, positive or negative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import published
from fedlens.data.datasets.leaf import Converted, User, by_user, split_folders
from fedlens.data.datasets.text import words
from fedlens.data.partition.settings import whole_path
from fedlens.files.caches import HUB, hub_file

PADDING, UNKNOWN, FIRST = 0, 1, 2  # the ids that are no word, and that of the most frequent word
_FILL = -1
_VOCABULARY = 10_000
TEXT = 4  # the position of a tweet's text: id, date, query, user, text

_WHERE = "data.dataset.tokenizer"
_FILES = ("tokenizer.json", "vocab.txt")


def whole_source(source: str | None) -> str | None:
    """The absolute path of a tokenizer; a repository of the Hub as it is."""
    return source if source is None or source.startswith(HUB) else whole_path(source)


def sent140(
    root: Path,
    download: bool,
    seed: int,
    *,
    vocabulary: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000,
            description="number of the most frequent training words in the vocabulary, by default 10,000",
        ),
    ] = None,
    length: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="words or word pieces per tweet: longer ones are cut, shorter ones padded",
        ),
    ] = 25,
    tokenizer: Annotated[
        str | None,
        Field(
            min_length=1,
            description="tokenizer that cuts tweets into word pieces, for `distilbert`: a folder with tokenizer.json "
            "or vocab.txt, such a file, or 'hub:OWNER/NAME'; by default words are counted",
        ),
        AfterValidator(whole_source),
    ] = None,
) -> Dataset:
    """Sent140 from `root/sent140/{train,test}/*.json`: the sentiment of tweets, by user; `seed` plays no part.

    A tweet is split into words as LEAF splits it, in small letters: runs of letters, digits, underscores and
    apostrophes, and each of . , ! ? ; alone. The `vocabulary` most frequent words of the training tweets have
    the ids 2, 3, ... by how often they come (equally frequent ones by the alphabet); 1 is any other word, 0
    fills a tweet up at its end. The first `length` words count (25 is LEAF's default). So ids are below
    `vocabulary` + 2. LEAF itself uses the vocabulary of published embeddings, which these files do not hold.

    Inputs int32 [n, length], targets int64 [n]: 0 negative, 1 positive (a polarity of 4, which the original
    files have, is positive too). Columns: `client` and `user`, both the tweeting user. LEAF's whole set has
    660,120 users and 1,600,498 tweets.

    With `tokenizer`, a tweet is its word pieces instead, between the tokens that begin and end it; 0 fills it up, and
    the vocabulary is the tokenizer's. chen2022 (appendix C.1) fine-tunes DistilBERT, which needs its own.

    Source: Go, Bhayani, Huang 2009, Twitter sentiment classification using distant supervision; Caldas et al.
    2018, LEAF, arXiv 1812.01097.

    Raises `DataError` if the files are missing (they are made by LEAF's script, not fetched) or broken, an
    input is not a list with the text in fifth place, or a target is none of 0, 1 and 4; and `ConfigError` for a
    tokenizer beside a vocabulary.

    >>> words("Lyx is cool!")
    ['lyx', 'is', 'cool', '!']
    """
    if tokenizer is not None and vocabulary is not None:
        raise ConfigError(
            "a tokenizer has a vocabulary of its own, so no words are counted",
            where="data.dataset.vocabulary",
            hint="remove data.dataset.vocabulary, or data.dataset.tokenizer",
        )
    train_folder, test_folder = split_folders(root, "sent140")
    if tokenizer is not None:
        pieces, size = word_pieces(tokenizer, length, download)
        splits = [
            by_user(folder, _converter(length, pieces), "user") for folder in (train_folder, test_folder)
        ]
        for split in splits:
            split.inputs[split.inputs == _FILL] = PADDING
        return published("sent140", splits, vocabulary=size)
    vocabulary = vocabulary or _VOCABULARY
    count = _Count()
    # A word's number is the order of its first occurrence until all training words are counted.
    train = by_user(
        train_folder, _converter(length, lambda text: list(map(count.number, words(text)))), "user"
    )
    ids = count.ids(vocabulary)
    # The last number is for -1, which fills tweets up.
    numbers = np.array([*(ids.get(word, UNKNOWN) for word in count.numbers), PADDING], np.int32)
    known = _converter(length, lambda text: [ids.get(word, UNKNOWN) for word in words(text)])
    test = by_user(test_folder, known, "user")
    test.inputs[test.inputs == _FILL] = PADDING
    train = Examples(numbers[train.inputs], train.targets, train.columns)
    return published("sent140", (train, test), notes=count.note(ids), vocabulary=vocabulary + FIRST)


@dataclass(frozen=True)
class _Count:
    """The words of the training tweets: a number for each, in the order of coming, and how often it came."""

    numbers: dict[str, int] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)

    def number(self, word: str) -> int:
        """The number of a word, which is counted."""
        number = self.numbers.setdefault(word, len(self.times))
        if number == len(self.times):
            self.times.append(0)
        self.times[number] += 1
        return number

    def ids(self, vocabulary: int) -> dict[str, int]:
        """The ids of the `vocabulary` most frequent words, the most frequent one first."""
        ranked = sorted(self.numbers, key=lambda word: (-self.times[self.numbers[word]], word))
        return {word: FIRST + rank for rank, word in enumerate(ranked[:vocabulary])}

    def note(self, ids: Mapping[str, int]) -> tuple[str, ...]:
        """A note on what the vocabulary leaves out, if anything."""
        if len(ids) == len(self.numbers):
            return ()
        share = sum(self.times[self.numbers[word]] for word in ids) / sum(self.times)
        return (
            f"the {len(ids):,} most frequent of {len(self.numbers):,} words are known, "
            f"{share:.1%} of the words of the training tweets",
        )


def _converter(length: int, numbers: Callable[[str], Sequence[int]]) -> Callable[[User], Converted]:
    """What makes (int32 [n, length], int64 [n]) of one user, filled up with -1."""

    def convert(user: User) -> Converted:
        tokens = np.full((len(user.x), length), _FILL, np.int32)
        for at, tweet in enumerate(user.x):
            text = tweet[TEXT] if isinstance(tweet, list) and len(tweet) > TEXT else None
            if not isinstance(text, str):
                raise user.fault(at, "is not a list of id, date, query, user and text")
            row = numbers(text)[:length]
            tokens[at, : len(row)] = row
        for at, polarity in enumerate(user.y):
            if type(polarity) is not int or polarity not in (0, 1, 4):
                raise user.fault(at, f"has the polarity {polarity!r}, and 0, 1 or 4 is expected")
        return tokens, (np.array(user.y, np.int64) > 0).astype(np.int64)

    return convert


def word_pieces(source: str, length: int, download: bool) -> tuple[Callable[[str], Sequence[int]], int]:
    """(the ids of a text, the size of the vocabulary) of a tokenizer of the library tokenizers, as BERT's.

    A text has at most `length` ids, with those that begin and end it. Id 0 must be the padding, `[PAD]`.

    Args:
        source: a folder with `tokenizer.json` or `vocab.txt`, such a file, or 'hub:OWNER/NAME'. A `vocab.txt`, a piece
            a line, is that of an uncased BERT; `tokenizer.json` says itself what it does.
        length: largest number of ids of a text.
        download: whether the file may be downloaded.

    Raises `ConfigError` if tokenizers is not installed or `length` leaves no room for a text, and `DataError` if the
    file is missing or no tokenizer, or the padding is not 0.
    """
    try:
        from tokenizers import Tokenizer
        from tokenizers.implementations import BertWordPieceTokenizer
    except ImportError:
        raise ConfigError(
            "a tokenizer needs tokenizers, which is not installed",
            where=_WHERE,
            hint="run: pip install 'fedlens[text]'",
        ) from None
    if source.startswith(HUB):
        path = hub_file(source.removeprefix(HUB), _FILES, "the tokens of", _WHERE, download)
    else:
        path = next((file for name in _FILES if (file := Path(source, name)).is_file()), Path(source))
    read = Tokenizer.from_file if path.suffix == ".json" else BertWordPieceTokenizer
    try:
        tokenizer = read(str(path))
    except Exception as error:  # the library raises bare Exceptions
        hint = "name a folder with tokenizer.json or vocab.txt, such a file, or hub:OWNER/NAME"
        raise DataError(f"no tokenizer can be read: {error}", where=str(path), hint=hint) from error
    if (padding := tokenizer.token_to_id("[PAD]")) != 0:
        what = f"[PAD] has the id {padding}, but must have 0, which fills texts up"
        raise DataError(what, where=str(path), hint="take a tokenizer of BERT's kind")
    if length <= tokenizer.num_special_tokens_to_add(False):
        what = f"{length} ids leave no room for a text between the ids that begin and end it"
        raise ConfigError(what, where="data.dataset.length", hint="set it higher, to 64 for tweets")
    tokenizer.enable_truncation(length)
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text).ids, tokenizer.get_vocab_size()
