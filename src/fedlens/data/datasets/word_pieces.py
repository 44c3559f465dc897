"""Text as numbers by a published tokenizer, which cuts words into pieces of a fixed vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedlens.base.errors import ConfigError, DataError
from fedlens.files.caches import HUB, hub_file

_WHERE = "data.dataset.tokenizer"
_FILES = ("tokenizer.json", "vocab.txt")


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
