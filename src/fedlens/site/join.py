"""Joins a federation: a site's keys, its first certificate, and a `site.toml` for the data that are there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from time import time

from fedlens.base.errors import ConfigError, FedlensError
from fedlens.base.printable import printable
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import read_csv
from fedlens.data.formats.folder_check import own_dataset
from fedlens.files.atomic_files import write_durably
from fedlens.identity.invitation import Invitation
from fedlens.identity.private_files import private_folder
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.settings.own_data_recipe import dataset_table
from fedlens.site.connection import enrol
from fedlens.site.network_check import check_network
from fedlens.site.settings import SITE_FILE

_TEXT = """\
# The data of the site {name} in the federation {federation}, and what an experiment may use of this machine.
# Lines that begin with # are examples: remove the # and change them. 'fedlens site check' reads all of it.

[data]
# Any dataset of fedlens, with the settings that 'fedlens data check' has shown. Paths are relative to this file.
# Images of a split "test" are not used.
{dataset}
{columns}
# Each value of this column is a client of its own, {name}/VALUE, a name that the server sees: no patient's name.
# Without it the site is one client.
# clients = "scanner"
# Each value of this column is a person, for min_persons and max_epsilon; 'fedlens site check' counts them.
# persons = "patient"
# Labels that are not named as the experiment's classes. "" leaves the images of a label out.
# labels = {{ NV = "nevus", "no finding" = "" }}
# A file with one image, or one value of a column, a line: these are left out. It is read before every round.
# exclude = "withdrawn.txt"
# GiB of decoded images that are kept in memory.
# cache = 2.0

[allow]
# The fewest images of a client behind an update or a result; a class may have fewer.
min_examples = 8
# The fewest persons among the images that a client trains on, or holds out for a result.
# min_persons = 10
# What an experiment may be: 'fedlens site review' says which line refuses it.
# algorithms = ["fedavg", "fedprox"]
# max_rounds = 100
# max_epochs = 5
# secure_sum = "only"
# min_cohort = 3
# How many people must approve an experiment: this site, and those of the table [reviewers].
# reviewers = 2

[compute]
device = "auto"
threads = {threads}
# The largest message that is accepted, in MiB.
max_message = 4096

[keep]
# The days after its last ask until the states and stored answers of a run are removed.
days = 365
# Keep what was sent, for 'fedlens site show': parts of images can be computed back from it.
# sent = false

# Files that an experiment may name, such as weights, each with its SHA-256 (sha256sum FILE).
# [files]
# "weights/resnet18.pth" = "..."

# People who decide on other machines, each with the line of 'fedlens site decide --new-key'.
# [reviewers]
# officer = "..."
"""


def join(
    folder: Path,
    invitation: Invitation,
    data: Path,
    passphrase: bytes | None = None,
    clock: Callable[[], float] = time,
) -> tuple[SiteKeys, str]:
    """Joins with an invitation, and returns the keys and the site's state at the server.

    Again with the same invitation it gets the same certificate, so a call that was cut off may be repeated.

    Args:
        folder: the site's folder; the keys are in `keys`.
        invitation: that of the operator.
        data: the folder of the data, for `site.toml`. A file that is there stays.
        passphrase: of the keys; they are not encrypted without one.
        clock: returns seconds since 1970.

    Raises `IdentityError` for a folder of another site, and `FedlensError` if the server cannot be reached or refuses.
    """
    if not data.is_dir():
        raise ConfigError(
            f"the folder {data} does not exist", where="--data", hint="give the folder of your data"
        )
    keys = SiteKeys.join(private_folder(folder) / "keys", invitation, passphrase)
    context = client_context(keys.folder, passphrase, anonymous=True)
    had_one = (keys.folder / "tls.pem").exists()
    try:
        answer = asyncio.run(enrol(context, (keys.host, keys.port), keys.enrolment(invitation)))
    except FedlensError as error:
        for step in check_network(keys, passphrase, clock):
            if not step.ok and step.name not in ("certificate", "acceptance"):
                raise FedlensError(f"cannot join: {step.what}", where=step.name, hint=step.hint) from error
        if had_one:
            hint = f"a key that was revoked stays revoked: move {folder} away and join anew, or ask for an invitation"
            raise FedlensError(error.what, where=error.where, hint=hint) from error
        raise
    state = keys.install(answer, clock())
    path = folder / SITE_FILE
    if not path.exists():
        write_durably(path, site_text(keys.name, keys.federation, folder, data).encode())
        path.chmod(0o600)
    return keys, state


def site_text(name: str, federation: str, folder: Path, data: Path) -> str:
    """The text of a new `site.toml`, for the data of the format that is recognized in `data`."""
    dataset, columns = _described(folder, data)
    threads = max(1, (os.cpu_count() or 2) // 2)
    text = _TEXT.format(name=name, federation=federation, dataset=dataset, columns=columns, threads=threads)
    return text.replace("\n\n# Each", "\n# Each")


def _described(folder: Path, data: Path) -> tuple[str, str]:
    """The line `dataset` of `site.toml`, and a comment with the columns that its table has."""
    columns = ""
    try:
        name, given = own_dataset(data, {})
        paths = {key: os.path.relpath(given[key], folder) for key in ("path", "table") if key in given}
        dataset = f"dataset = {dataset_table({'name': name} | given | paths)}"
        table = read_csv(Path(given["table"]), Findings(), data) if "table" in given else None
        if table is not None:
            columns = f"# The table has the columns {', '.join(table.columns)}."
    except FedlensError as error:
        path = dataset_table({"name": "image-folder", "path": os.path.relpath(data, folder)})
        dataset = f"# {error.what}: write here which dataset it is.\n# dataset = {path}"
    return printable(dataset), printable(columns, line_feeds=False)
