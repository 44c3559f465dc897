"""Files in the caches of the user: fedlens's own folder, and that of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedlens.base.errors import ConfigError, DataError, one_line, text_of

HUB = "hub:"
"""What a setting begins with that names a repository: 'hub:OWNER/NAME'."""


def hub_file(repository: str, names: Sequence[str], what: str, where: str, download: bool) -> Path:
    """The path of the first of these files that the cache has, or else of the first one, downloaded.

    Args:
        repository: OWNER/NAME.
        names: names of files, the preferred one first.
        what: what they are, in the plural, for sentences.
        where: the setting that asks for them.
        download: whether a download is allowed.

    Raises `ConfigError` if the repository's name is malformed, huggingface_hub is not installed, or no file is in the
    cache and downloads are not allowed; and `DataError` if the download fails.

    >>> hub_file("a/b/c", ["vocab.txt"], "the tokens", "data.dataset.tokenizer", download=False)
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: 'a/b/c' is not a repository, OWNER/NAME (data.dataset.tokenizer).
    """
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", repository):
        raise ConfigError(f"'{repository}' is not a repository, OWNER/NAME", where=where)
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise ConfigError(
            f"{what} {repository} need huggingface_hub, which is not installed",
            where=where,
            hint="run: pip install 'fedlens[text]'",
        ) from None
    for name in names:
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return Path(cached)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    if not download:
        raise ConfigError(
            f"{what} {repository} ({names[0]}) are not in the cache {folder}",
            where=where,
            hint=f"download them with --download, or run(download=True); or set {where} to a file",
        )
    try:
        return Path(hf_hub_download(repository, names[0]))
    except Exception as error:  # of any kind: the network's, the disk's, the server's
        reason = f"{type(error).__name__}: {one_line(next(iter(text_of(error).splitlines()), ''))}"
        raise DataError(
            f"{what} {repository} ({names[0]}) cannot be downloaded: {reason}",
            where=where,
            hint=f"check the network, or put the file into {folder}, or set {where} to a file",
        ) from error


def user_cache(name: str) -> Path:
    """The folder `name` of fedlens in the user's cache, by the XDG convention; it need not exist.

    >>> user_cache("fractals").parts[-2:]
    ('fedlens', 'fractals')
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedlens" / name
