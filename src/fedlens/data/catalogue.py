"""Facts about every dataset, from catalogue.toml, where its files are, and whether its images are shown."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

State = Literal["here", "partly", "absent", "built in", "your own"]


Patterns = tuple[str, ...]


@dataclass(frozen=True)
class Archive:
    """A published file that `--download` fetches.

    Args:
        urls: where it is, the most trusted address first. The last part of the first one is its file name.
        md5: of its bytes, as published.
        folder: below the data folder, where it is saved and unpacked.
        take: what is unpacked: the folder in a tar archive, or glob patterns with "|" between them for the
            members of a zip archive. Empty if the file is used as it is.
        gives: a glob pattern for the entries of `DatasetFacts.files` that the archive provides.
    """

    urls: tuple[str, ...]
    md5: str
    folder: str = "."
    take: str = ""
    gives: str = "*"


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about one dataset. A fact that could not be verified is None.

    Args:
        title: its published name, for messages; empty if that is `name`.
        task: classification, segmentation, detection or language.
        summary: its content, in a few words.
        how: how to get it, in one or two sentences.
        train, test: examples of the two splits, with the reader's default settings.
        classes: how many; of text, the tokens that may be predicted.
        labels: the names of the classes, if they are few and fixed; a label is a position in it.
        mean, std: of the training images scaled to [0, 1], one number per channel, if they are published.
        clients, unit: how many natural clients the training split has, and what one is.
        licence: in a few words, and more after a semicolon; the publisher's own words count.
        source: the publication, or an address.
        download: how much there is to fetch.
        files: what is searched below the data folder: one or more sets of glob patterns. Each set is enough to
            read the dataset; "|" separates patterns of which one is enough. Empty if no files are needed.
        archives: what `--download` fetches.
        own: whether it is a format for a user's own data.
    """

    name: str
    task: str
    summary: str
    how: str
    title: str = ""
    train: int | None = None
    test: int | None = None
    classes: int | None = None
    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    clients: int | None = None
    unit: str | None = None
    licence: str | None = None
    source: str | None = None
    download: str | None = None
    files: tuple[Patterns, ...] = ()
    archives: tuple[Archive, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class Presence:
    """Whether a dataset is on this machine.

    Args:
        state: "here" if every pattern of a set matches, "partly" if some do, "absent" if none does.
        found: a file or folder for each pattern that matches, of the set with most matches.
        lacking: the patterns of that set that match nothing.
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
    return search(facts.files, root) if facts.files else Presence("built in")


def search(files: Sequence[Patterns], root: Path) -> Presence:
    """The first set of patterns in `files` with the largest share of matches below `root`.

    >>> search([("a.txt", "b.txt")], Path("nowhere")).lacking
    ('a.txt', 'b.txt')
    """
    matches = [[(pattern, _first(root, pattern)) for pattern in patterns] for patterns in files]
    best = max(matches, key=lambda pairs: sum(path is not None for _, path in pairs) / len(pairs))
    found = tuple(path for _, path in best if path is not None)
    lacking = tuple(pattern for pattern, path in best if path is None)
    return Presence("here" if not lacking else "partly" if found else "absent", found, lacking)


def _first(root: Path, pattern: str) -> Path | None:
    """The first path that matches one of the patterns, which "|" separates. An empty folder does not count."""
    for path in itertools.chain.from_iterable(_matches(root, one) for one in pattern.split("|")):
        if path.is_file() or _holds_something(path):
            return path
    return None


def _matches(root: Path, pattern: str) -> Iterable[Path]:
    """The paths that match: lists in sorted order, those in CSV in any letter case; all others lazily, in no order."""
    if pattern.endswith(".csv"):
        folder, _, name = pattern.rpartition("/")
        files = root.glob(f"{folder}/*") if folder else root.iterdir()
        return sorted(path for path in files if fnmatchcase(path.name.lower(), name.lower()))
    return sorted(root.glob(pattern)) if pattern.endswith(".json") else root.glob(pattern)


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _read_catalogue() -> dict[str, DatasetFacts]:
    tables = tomllib.loads((files("fedlens.data") / "catalogue.toml").read_text(encoding="utf-8"))
    facts = {"": tables.pop("defaults")}
    for title, table in tables.items():
        facts[title.lower()] = facts[table.pop("like", "")] | table | {"title": title}
    names = [title.lower() for title in tables]
    return {name: _facts(name, _filled(facts[name], name)) for name in names}


def _filled(value: Any, name: str) -> Any:
    """`value` with tuples for lists, and with the name and its end in place of `{name}` and `{limit}`."""
    if isinstance(value, str):
        return value.replace("{name}", name).replace("{limit}", name.rpartition("-")[2])
    if isinstance(value, list):
        return tuple(_filled(one, name) for one in value)
    return {key: _filled(one, name) for key, one in value.items()} if isinstance(value, dict) else value


def _facts(name: str, table: dict[str, Any]) -> DatasetFacts:
    archives = tuple(Archive(**archive) for archive in table.pop("archives", ()))
    if "labels" in table:
        table["classes"] = len(table["labels"])
    # In the file 0 stands for a count that is not published, to override the count that `like` brings.
    stated = {key: value for key, value in table.items() if value != 0 or key == "own"}
    return DatasetFacts(name, archives=archives, **stated)


CATALOGUE = _read_catalogue()


UNKNOWN = "not stated"
_RESTRICTED = re.compile(
    r"passed on|non-?commercial|not for commerce|\bNC\b|\bresearch\b|terms of use|LDC", re.I
)


def restriction(dataset: str, licence: str) -> str | None:
    """A sentence that has to go with a model trained on these data; None if their licence asks for nothing more.

    It is given for data that may not be passed on, are for research only, or not for commerce.

    >>> restriction("digits", "CC BY 4.0")
    >>> restriction("camvid", CATALOGUE["camvid"].licence)
    'This model was trained on CamVid, whose licence is "CC BY-NC 4.0; for research only, never to be passed on, nor
    anything trained on it".'
    """
    if not _RESTRICTED.search(licence):
        return None
    facts = CATALOGUE.get(dataset)
    title = facts.title if facts and facts.title else dataset
    return f'This model was trained on {title}, whose licence is "{licence}".'


def data_directory(given: Path | None) -> Path:
    """`--data-dir`, else FEDLENS_DATA, else ~/.cache/fedlens.

    >>> data_directory(Path("here")).as_posix()
    'here'
    """
    if given is not None:
        return given.expanduser()
    return Path(os.environ.get("FEDLENS_DATA") or "~/.cache/fedlens").expanduser()


AUTO = "auto"


def is_published(dataset: object) -> bool:
    """Whether this name, or function, of a dataset is one of the catalogue and not a user's own data.

    >>> is_published("cifar10"), is_published("image-folder"), is_published("mine.py:scans"), is_published(len)
    (True, False, False, False)
    """
    facts = CATALOGUE.get(dataset) if isinstance(dataset, str) else None
    return facts is not None and not facts.own


def keeps_images(setting: object, dataset: object) -> bool:
    """Whether a run keeps images of the test data: as `record.images` says, with "auto" of published data alone.

    Args:
        setting: `record.images`: true, false or "auto".
        dataset: `data.dataset.name`: a name, or a function of the user.

    >>> keeps_images("auto", "digits"), keeps_images("auto", "coco-json"), keeps_images(True, "coco-json")
    (True, False, True)
    """
    return is_published(dataset) if setting == AUTO else setting is True
