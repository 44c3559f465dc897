"""Checks the data of a site: `site.toml`, the images, and whether they fit the experiments that it approved."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import time

from fedlens.base.errors import FedlensError
from fedlens.base.format import many
from fedlens.base.printable import printable
from fedlens.data.catalogue import data_directory
from fedlens.data.dataset import Dataset
from fedlens.identity.private_files import write_private
from fedlens.settings.make_partition import read_dataset
from fedlens.site.approvals import Approvals
from fedlens.site.contract import Contract, read_contract
from fedlens.site.local_data import COUNTED, LocalData, counted_clients, left_out
from fedlens.site.network_check import Step
from fedlens.site.policy import refusals
from fedlens.site.settings import SITE_FILE, SiteSettings

_SHOWN = 20  # classes or clients that are named


def check_data(folder: Path, site: str) -> Iterator[Step]:
    """The steps from `site.toml` to the approved experiments, up to the first that fails. Sends nothing.

    Args:
        folder: that of the site.
        site: the name of the site.
    """
    name = SITE_FILE
    try:
        settings = SiteSettings.read(folder / SITE_FILE)
        settings.check_names()
        yield Step(name, True, f"it describes a dataset '{settings.data.dataset['name']}'")
        name = "data"
        dataset, given = settings.dataset()
        read = read_dataset(dataset, [], given, root=data_directory(None))
        yield Step(name, True, _data(read))
        if settings.data.exclude is not None:
            name = "exclude"
            words, all_named = left_out(settings, read.train)
            yield Step(name, all_named or None, printable(words, line_feeds=False))
        name = "clients"
        counted = _clients(*counted_clients(settings, read, site))
        write_private(folder / COUNTED, counted.encode())
        yield Step(name, True, counted)
        for path in sorted((folder / "approved").glob("*.toml")):
            name = f"experiment {path.stem[:12]}"
            contract = read_contract(path.read_text("utf-8"), settings)
            missing = Approvals.of(folder, settings).last_missing(path.stem, time())
            against = refusals(contract, settings)
            if missing or against:
                yield Step(name, None, "; ".join(filter(None, (missing, *against))))
            else:
                yield Step(name, True, _experiment(contract, site))
    except FedlensError as error:
        where = f" ({error.where})" if error.where else ""
        yield Step(name, False, f"{error.what}{where}", error.hint or "")


def _data(read: Dataset) -> str:
    """What is in the data, whatever the experiment; labels are the site's own."""
    classes = ", ".join(read.classes[:_SHOWN]) + (" ..." if len(read.classes) > _SHOWN else "")
    return printable(
        f"{many(len(read.train), 'image')} of {many(len(read.classes), 'class', 'classes')}: {classes}",
        line_feeds=False,
    )


def _experiment(contract: Contract, site: str) -> str:
    """The clients that an approved experiment has here. What is counted for a run stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalData.open(contract, site, Path(scratch), "check")
    return _clients(local.counted, local.notes)


def _clients(counted: Mapping[str, str], notes: Sequence[str]) -> str:
    """How many images each client has, and notes."""
    named = [f"{name} {size}" for name, size in counted.items()]
    more = " ..." if len(named) > _SHOWN else ""
    clients = f"{many(len(named), 'client')}: {', '.join(named[:_SHOWN])}{more}"
    return printable("; ".join((clients, *notes)), line_feeds=False)
