"""The examples of a site's clients in the classes of the contract, what is left out, and their census."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.format import many
from fedlens.base.parse_text import parse_json, read_text
from fedlens.base.printable import printable
from fedlens.base.registry import settings_model
from fedlens.core.dataset_info import VOID
from fedlens.core.wire.census import ChannelSums, CountedClient, SiteCensus
from fedlens.data.boxes import Boxes
from fedlens.data.catalogue import data_directory
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.datasets.sites import sites
from fedlens.data.images import ImageFiles
from fedlens.data.loading import loaded
from fedlens.data.table import is_missing, unit_numbers
from fedlens.files.atomic_files import read_regular
from fedlens.files.regular_file import open_regular
from fedlens.identity.private_files import private_folder, read_private, write_private
from fedlens.run.trial_round import versions_here
from fedlens.settings.make_partition import read_dataset
from fedlens.site.contract import Contract
from fedlens.site.settings import SiteSettings

COUNTED = "counted"
"""The file in the folder of a site with the words of the last check on its clients and images."""
_FORMAT = "fedlens examples 1"
_BLOCK = 1024  # images that are summed at once
_LONGEST = 128  # characters of a client's name


@dataclass(frozen=True, eq=False)
class LocalData:
    """The examples of the clients of one site, in the classes and the shape of a contract.

    Attributes:
        site: the name of the site.
        settings: `site.toml`.
        contract: the experiment.
        dataset: all examples that can be read now; its test split is empty.
        clients: for each client by name, int64, the positions of the examples that were counted at the first census
            of the run, in their order; -1 for one that is excluded or is no longer there.
        notes: sentences for the people at the site, on clients and lines of the exclusion list that count for nothing.
        persons: int64, the number of the person of each example of the dataset; None if no column names them.
    """

    site: str
    settings: SiteSettings
    contract: Contract
    dataset: Dataset = field(repr=False)
    clients: Mapping[str, NDArray[np.int64]] = field(repr=False)
    notes: tuple[str, ...]
    _ids: Sequence[str] = field(repr=False)
    _record: Path = field(repr=False)
    _list: tuple[str, frozenset[str]] = field(repr=False)  # of `exclusion_list`
    _gone: frozenset[str] = field(repr=False)
    persons: NDArray[np.int64] | None = field(repr=False, default=None)

    @property
    def folder(self) -> Path:
        """That of the site."""
        return self._record.parent.parent

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its clients, sorted: SITE, or SITE/VALUE for each value of the column `clients`."""
        return tuple(sorted(self.clients))

    @property
    def counted(self) -> dict[str, str]:
        """How many examples each client has, and of how many persons if that is known, as words."""
        return {name: _size(self.clients[name], self.persons) for name in self.names}

    @classmethod
    def open(cls, contract: Contract, site: str, folder: Path, run: str) -> LocalData:
        """Reads the data that `site.toml` describes, for an approved contract.

        `folder` is that of the site: a file there keeps which examples the first census of the run counted, so that
        one that is excluded, deleted or added later changes nothing for the others.

        Raises `ConfigError` or `DataError` with place and fix for a label or a shape outside the contract, a local
        label that maps to nothing, a client without examples, and a file that is missing.
        """
        settings = contract.site
        dataset = _read(settings, contract)
        ids = _ids(dataset.train)
        key = hashlib.sha256(f"{run}\0{contract.digest}\0{site}".encode()).hexdigest()[:32]
        record = private_folder(folder / "approved") / f"{key}.examples.json"
        owners, persons = _owners(dataset.train, settings, site), _persons(dataset.train, settings)
        listed, kept = exclusion_list(settings), _kept_record(record)
        gone, unknown = _excluded(dataset.train, ids, listed[1])
        notes = [f"{settings.data.exclude}: {_named_nothing(unknown)}"] if unknown else []
        if kept is None:
            enough, few = _enough(owners, ids, gone, settings, persons)
            examples = {name: [ids[i] for i in rows] for name, rows in enough.items()}
            notes += few
        else:
            examples, before = kept
            gone |= frozenset(before)
        at = {name: i for i, name in enumerate(ids) if name not in gone}
        clients = {
            name: np.array([at.get(each, -1) for each in named], np.int64)
            for name, named in sorted(examples.items())
        }
        of_site = site, settings, contract, dataset, clients, tuple(notes)
        opened = cls(*of_site, ids, record, listed, gone, persons)
        opened._write(examples)
        return opened

    @property
    def excluded(self) -> dict[str, Any]:
        """The line of the log on the exclusion list as it was read last, and how many images the run is without."""
        digest, lines = self._list
        return {"lines": len(lines), "images_left_out": len(self._gone), "sha256": digest}

    def check_division(self, division: str) -> None:
        """Notes, at the first time, how the images of the site are divided into those to train on and to measure.

        The sizes of all clients decide that, and the server tells them. With other sizes it would get sums over other
        images, and the difference of two sums tells a single image.

        Args:
            division: a digest of the sizes.

        Raises `DataError` if they are not those of the first time in this run.
        """
        path = self._record.with_name(self._record.name.replace(".examples.json", ".division"))
        if not path.exists():
            write_private(private_folder(path.parent) / path.name, division.encode())
        elif read_private(path) != division.encode():
            raise DataError(
                "the server has other clients or sizes than before, so other images of this site would be held out",
                where="roster",
                hint="ask the server for a new run",
            )

    def reread(self) -> LocalData:
        """The same with the exclusion list as it is now. What was left out stays out, so that data only shrink.

        Raises `DataError` if the list cannot be read: then nothing may be computed.
        """
        listed = exclusion_list(self.settings)
        if listed == self._list:
            return self
        gone = self._gone | _excluded(self.dataset.train, self._ids, listed[1])[0]
        if gone == self._gone:
            return replace(self, _list=listed)
        out = np.array([i for i, name in enumerate(self._ids) if name in gone], np.int64)
        clients = {
            name: np.where(np.isin(positions, out), -1, positions) for name, positions in self.clients.items()
        }
        found = replace(self, clients=clients, _list=listed, _gone=gone)
        if (kept := _kept_record(self._record)) is not None:
            found._write(kept[0])
        return found

    def census(self) -> SiteCensus:
        """What the site tells before the first round: sizes, versions, contract, and channel sums if they are needed.

        A client's `examples` are all that it has, `held_out` is 0: the server divides them as a simulation does, once
        the sizes of all are known; see `fedlens.data.sites.with_held_out`.
        """
        return SiteCensus(
            self.site,
            [CountedClient(name, len(self.clients[name])) for name in self.names],
            versions_here(),
            self.contract.digest,
            self._sums() if self.contract.sums_moments else None,
        )

    def _sums(self) -> ChannelSums:
        """The sums over the images of all clients; of integers, so they do not depend on the machine."""
        images = self.dataset.train.inputs
        positions = np.sort(np.concatenate(list(self.clients.values())))
        positions = positions[positions >= 0]
        channels = images.shape[1]
        total, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
        for start in range(0, len(positions), _BLOCK):
            at = positions[start : start + _BLOCK]
            block = np.asarray(images[at] if isinstance(images, np.ndarray) else images.take(at), np.uint16)
            total += block.sum(axis=(0, 2, 3), dtype=np.int64)
            squares += np.square(block).sum(axis=(0, 2, 3), dtype=np.int64)
        pixels = len(positions) * int(np.prod(images.shape[2:]))
        values, products = (total / 255).tolist(), (squares / 255**2).tolist()
        return ChannelSums(len(positions), pixels, tuple(values), tuple(products))

    def _write(self, examples: Mapping[str, Sequence[str]]) -> None:
        content = {"format": _FORMAT, "clients": dict(examples), "gone": sorted(self._gone)}
        write_private(self._record, json.dumps(content).encode())


def _kept_record(path: Path) -> tuple[dict[str, list[str]], list[str]] | None:
    """(examples of each client, those that are gone) of the first census; None if there was none."""
    if not path.exists():
        return None
    try:
        content = parse_json(read_regular(path))
        if content["format"] != _FORMAT:
            raise ValueError
        return {name: list(map(str, ids)) for name, ids in content["clients"].items()}, content["gone"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            "the list of the examples of this run is damaged",
            where=str(path),
            hint="copy it back from a backup, or let the run go on without this site",
        ) from error


def _read(settings: SiteSettings, contract: Contract) -> Dataset:
    """All training examples of the site, in the classes of the contract."""
    form = contract.dataset
    wanted = sites(Path(), False, 0, **{key: value for key, value in form.items() if key != "name"})
    name, given = settings.dataset()
    fields = settings_model(DATASETS.find(name)).model_fields if name in DATASETS else {}
    channels, *size = wanted.input_shape
    given = {key: value for key, value in (("size", size), ("channels", channels)) if key in fields} | given
    dataset = read_dataset(name, [], given, root=data_directory(None))
    where = f"{settings.path}: data.dataset"
    if dataset.kind != wanted.kind:
        what = f"the data are for {dataset.kind}, and the experiment for {wanted.kind}"
        raise ConfigError(what, where=where, hint="describe data with such labels, or refuse the experiment")
    if dataset.input_shape != wanted.input_shape:
        found, needed = list(dataset.input_shape), list(wanted.input_shape)
        raise ConfigError(
            f"the images are {found} (channels, height, width), and those of the experiment {needed}",
            where=where,
            hint=f"set size = {needed[1:]} and channels = {needed[0]} in it",
        )
    train = in_classes(dataset, wanted.classes, settings)
    data = replace(wanted, train=train, notes=dataset.notes, on_error=dataset.on_error)
    return loaded(data, int(settings.data.cache * 2**30))


def _ids(examples: Examples) -> list[str]:
    """A name for each example that stays when others leave: its file, with a number if several are of one."""
    files = examples.files
    if files is None:
        return [f"#{i}" for i in range(len(examples))]
    seen: dict[str, int] = {}
    ids: list[str] = []
    for i in range(len(examples)):
        name = files[i]
        seen[name] = seen.get(name, 0) + 1
        ids.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return ids


def _owners(examples: Examples, settings: SiteSettings, site: str) -> dict[str, list[int]]:
    """The positions of each client's examples, by the name of the client."""
    column = settings.data.clients
    if column is None:
        return {site: list(range(len(examples)))}
    where = f"{settings.path}: data.clients"
    if column not in examples.columns:
        hint = nearest(column, examples.columns) if examples.columns else "give a table with such a column"
        raise ConfigError(f"the data have no column '{column}'", where=where, hint=hint)
    owners: dict[str, list[int]] = {}
    for i, value in enumerate(examples.columns[column].tolist()):
        name = f"{site}/{value}"
        if is_missing(value) or not name.isprintable() or len(name) > _LONGEST:
            raise DataError(
                f"example {i} has {printable(repr(value))} in the column '{column}', which names its client",
                where=where,
                hint=f"write a name of at most {_LONGEST - len(site) - 1} printable characters",
            )
        owners.setdefault(name, []).append(i)
    return owners


def _persons(examples: Examples, settings: SiteSettings) -> NDArray[np.int64] | None:
    """int64: the number of the person of each example; None if no column names them."""
    column = settings.data.persons
    return unit_numbers(examples.columns, column, f"{settings.path}: data.persons").get(column or "")


def count_persons(rows: Any, persons: NDArray[np.int64] | None) -> int:
    """How many persons the examples at these positions are of, but for those at -1; 0 if that is not known."""
    if persons is None:
        return 0
    positions = np.asarray(rows, np.int64)
    return len(np.unique(persons[positions[positions >= 0]]))


def _size(rows: Sequence[int] | NDArray[np.int64], persons: NDArray[np.int64] | None) -> str:
    """How many examples these are, and of how many persons if that is known, as words."""
    if persons is None:
        return f"{len(rows):,}"
    return f"{many(len(rows), 'image')} of {many(count_persons(rows, persons), 'person')}"


def _enough(
    owners: Mapping[str, Sequence[int]],
    ids: Sequence[str],
    gone: frozenset[str],
    settings: SiteSettings,
    persons: NDArray[np.int64] | None,
) -> tuple[dict[str, Sequence[int]], list[str]]:
    """The clients with `min_examples` and `min_persons` or more that are not gone, and a note on the others.

    Raises `DataError` if there is none.
    """
    least, fewest = settings.allow.min_examples, settings.allow.min_persons or 0
    counted = {name: [i for i in rows if ids[i] not in gone] for name, rows in owners.items()}
    enough: dict[str, Sequence[int]] = {name: rows for name, rows in counted.items() if len(rows) >= least}
    if fewest:
        enough = {name: rows for name, rows in enough.items() if count_persons(rows, persons) >= fewest}
    if not enough:
        most = max(counted.values(), key=len, default=[])
        wanted = f"{least} examples" + (f" of {many(fewest, 'person')}" if fewest else "")
        raise DataError(
            f"no client has {wanted}; the largest has {_size(most, persons)}",
            where=f"{settings.path}: allow.{'min_persons' if fewest and len(most) >= least else 'min_examples'}",
            hint="add examples, or set a smaller number, which says more about each of them",
        )
    few = len(counted) - len(enough)
    said = f"{least} examples" + (f" or {many(fewest, 'person')}" if fewest else "")
    return enough, [f"{few} of {len(counted)} clients have fewer than {said}: left out"] if few else []


def left_out(settings: SiteSettings, examples: Examples) -> tuple[str, bool]:
    """What the exclusion list leaves out, and whether each of its lines names something. Raises `DataError`."""
    _, listed = exclusion_list(settings)
    gone, unknown = _excluded(examples, _ids(examples), listed)
    odd = f"; {_named_nothing(unknown)}" if unknown else ""
    return (
        f"{many(len(listed), 'line')} of {settings.data.exclude}: {many(len(gone), 'image')} left out{odd}",
        not unknown,
    )


def counted_clients(settings: SiteSettings, dataset: Dataset, site: str) -> tuple[dict[str, str], list[str]]:
    """The images of each client whatever the experiment, whose classes are those of `[data] labels`; and notes.

    In words, as in `LocalData.counted`.

    Raises `ConfigError` or `DataError` as `LocalData.open` does.
    """
    named = (settings.data.labels.get(label, label) for label in dataset.classes)
    train = in_classes(dataset, list(dict.fromkeys(filter(None, named))), settings)
    ids, listed = _ids(train), exclusion_list(settings)[1]
    gone = _excluded(train, ids, listed)[0]
    persons = _persons(train, settings)
    enough, few = _enough(_owners(train, settings, site), ids, gone, settings, persons)
    left_out = [f"{many(len(gone), 'image')} left out by {settings.data.exclude}"] if listed else []
    return {name: _size(rows, persons) for name, rows in sorted(enough.items())}, few + left_out


def _named_nothing(lines: frozenset[str]) -> str:
    """That lines of the exclusion list name nothing, as words."""
    named = ", ".join(repr(line) for line in sorted(lines)[:3])
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    return f"no image or value here has the name {named}{more}"


def exclusion_list(settings: SiteSettings) -> tuple[str, frozenset[str]]:
    """(SHA-256 of the exclusion list, its lines); empty without one. Raises `DataError` if it cannot be read."""
    if settings.data.exclude is None:
        return "", frozenset()
    path = settings.place(settings.data.exclude)
    try:
        with open_regular(path) as file:
            content = read_text(file)
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"the list of what is left out cannot be read: {why}",
            where=str(path),
            hint="put the file back, in UTF-8 with one name a line; an empty file leaves out nothing",
        ) from None
    return hashlib.sha256(content).hexdigest(), frozenset(line.strip() for line in lines) - {""}


def _excluded(
    examples: Examples, ids: Sequence[str], listed: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The ids of the examples that a list names, by file or by a value of a column; and the lines that name none."""
    if not listed:
        return frozenset(), frozenset()
    out, files = np.zeros(len(ids), bool), examples.files
    used: set[str] = set()
    for i in range(len(ids)):
        name = ids[i] if files is None else files[i]
        named = listed.intersection((name, name.rpartition("/")[2]))
        out[i] = bool(named)
        used |= named
    for column in examples.columns.values():
        values = column.astype(str)
        out |= np.isin(values, sorted(listed))
        used |= listed.intersection(values.tolist())
    return frozenset(ids[i] for i in np.flatnonzero(out).tolist()), listed - used


def in_classes(dataset: Dataset, classes: Sequence[str], settings: SiteSettings) -> Examples:
    """The training examples with labels of these classes, as `[data] labels` says; equal names need no line.

    A label that is mapped to "" leaves its images out; in masks, its pixels have no class.

    Raises `ConfigError` for a local label that maps to nothing, and a line for no label or an unknown class.
    """
    number = _numbers(dataset.classes, classes, settings)
    train, targets = dataset.train, dataset.train.targets
    if dataset.kind == "segmentation":
        lookup = np.full(VOID + 1, VOID, np.uint8)
        lookup[: len(number)] = np.where(number < 0, VOID, number)
        return _same(train, _masks(targets, lookup))
    if isinstance(targets, Boxes):
        rows = np.repeat(np.arange(len(targets)), np.diff(targets.offsets))
        out = np.isin(np.arange(len(targets)), rows[number[targets.labels] < 0])
        relabelled: object = replace(targets, labels=np.maximum(number, 0)[targets.labels])
    elif dataset.kind == "multi-label":
        out = targets[:, number < 0].any(axis=1)
        sets = np.zeros((len(targets), len(classes)), np.uint8)
        for column, label in enumerate(number):
            if label >= 0:
                sets[:, label] |= targets[:, column]
        relabelled = sets
    else:
        out, relabelled = number[targets] < 0, np.maximum(number, 0)[targets]
    relabelled_examples = _same(train, relabelled)
    if not out.any():
        return relabelled_examples
    kept = np.flatnonzero(~out)
    names = None if train.names is None else train.names.take(kept)
    return replace(relabelled_examples.take(kept), names=names)


def _same(examples: Examples, targets: object) -> Examples:
    return replace(examples, targets=targets)


def _masks(masks: object, lookup: NDArray[np.uint8]) -> object:
    """The masks with other ids: of files as they are decoded."""
    if isinstance(masks, ImageFiles):
        return replace(masks, ids=lookup if masks.ids is None else lookup[masks.ids], store=None)
    assert isinstance(masks, np.ndarray)
    return lookup[masks]


def _numbers(local: Sequence[str], classes: Sequence[str], settings: SiteSettings) -> NDArray[np.int64]:
    """int64: the class of each local label, -1 for one that is left out."""
    where, given = f"{settings.path}: data.labels", settings.data.labels
    for label, name in given.items():
        if label not in local:
            what = f"the data have no label '{printable(label)}'"
            raise ConfigError(what, where=where, hint=nearest(label, local))
        if name and name not in classes:
            what = f"the experiment has no class '{printable(name)}'"
            raise ConfigError(what, where=where, hint=nearest(name, classes))
    numbers = []
    for label in local:
        name = given.get(label, label)
        if name and name not in classes:
            shown = printable(label)
            raise ConfigError(
                f"the local label '{shown}' is no class of the experiment",
                where=where,
                hint=f'write "{shown}" = "CLASS", or "{shown}" = "" to leave its images out; classes: '
                + printable(", ".join(classes))[:200],
            )
        numbers.append(classes.index(name) if name else -1)
    return np.array(numbers, np.int64)
