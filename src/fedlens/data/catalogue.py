"""Facts about every dataset, from catalogue.toml, and whether its files are on this machine."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

State = Literal["here", "partly", "absent", "built in", "your own"]


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about one dataset. A fact that could not be verified is None.

    Args:
        task: classification, segmentation, detection or language.
        summary: its content, in a few words.
        how: how to get it, in one or two sentences.
        train, test: examples of the two splits, with the reader's default settings.
        classes: the number of classes; of text, of tokens that may be predicted.
        clients, unit: how many natural clients the training split has, and what one is.
        licence: in a few words, and more after a semicolon; the publisher's own words count.
        source: the publication, or an address.
        download: the size of the download.
        files: sets of glob patterns below the data folder. The files of one set are enough to read the dataset;
            of patterns with "|" between them one is enough. Empty if the dataset needs no files.
        own: whether it is a format for a user's own data.
    """

    name: str
    task: str
    summary: str
    how: str
    train: int | None = None
    test: int | None = None
    classes: int | None = None
    clients: int | None = None
    unit: str | None = None
    licence: str | None = None
    source: str | None = None
    download: str | None = None
    files: tuple[tuple[str, ...], ...] = ()
    own: bool = False


@dataclass(frozen=True)
class Presence:
    """Whether a dataset is on this machine.

    Args:
        state: "here" if every pattern of a set has a match, "partly" if some have, "absent" if none has.
        found: a file or folder for each pattern with a match.
        lacking: the patterns without a match, of the most complete set.
    """

    state: State
    found: tuple[Path, ...] = ()
    lacking: tuple[str, ...] = ()


def presence(facts: DatasetFacts, root: Path) -> Presence:
    """Looks for the files of the dataset below `root`. No file is opened, and a large folder is not listed in full.

    >>> presence(DatasetFacts("digits", "classification", "digits", "comes along"), Path("nowhere")).state
    'built in'
    """
    if facts.own:
        return Presence("your own")
    if not facts.files:
        return Presence("built in")
    looked = [[(pattern, _first(root, pattern)) for pattern in patterns] for patterns in facts.files]
    best = max(looked, key=lambda one: sum(path is not None for _, path in one) / len(one))
    found = tuple(path for _, path in best if path is not None)
    lacking = tuple(pattern for pattern, path in best if path is None)
    return Presence("here" if not lacking else "partly" if found else "absent", found, lacking)


def _first(root: Path, pattern: str) -> Path | None:
    """One path that matches the pattern, or one of several with "|" between. Empty folders do not count."""
    for path in itertools.chain.from_iterable(root.glob(one) for one in pattern.split("|")):
        if path.is_file() or _holds_something(path):
            return path
    return None


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _read_catalogue() -> dict[str, DatasetFacts]:
    tables = tomllib.loads((files("fedlens.data") / "catalogue.toml").read_text(encoding="utf-8"))
    facts = {"": tables.pop("defaults")}
    for name, table in tables.items():
        facts[name] = facts[table.pop("like", "")] | table
    return {name: _facts(name, **facts[name]) for name in tables}


def _facts(name: str, files: Sequence[Sequence[str]] = (), **table: Any) -> DatasetFacts:
    return DatasetFacts(name, files=tuple(tuple(patterns) for patterns in files), **table)


CATALOGUE = _read_catalogue()
