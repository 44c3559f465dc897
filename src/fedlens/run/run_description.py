"""What a run writes before its first round and takes from all data, and whether data are the same on resuming."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedlens.base.errors import RunDirectoryError
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.data.partition.roster import Roster
from fedlens.data.vertical.feature_partition import FeaturePartition, load_partition
from fedlens.data.vertical.vertical_datasets import with_pictures
from fedlens.engines.traits import traits_of
from fedlens.run.build import Built
from fedlens.run.environment import command_words, describe_environment
from fedlens.run.initial_weights import write_initial
from fedlens.run.rundir import FORMAT, RunDir
from fedlens.run.session import Session
from fedlens.settings.config import plain
from fedlens.settings.own_files import OWN_FILES, own_files

_DATA = "data_sha256"  # in environment.json: the digest of the data
_NEIGHBOURS = "neighbours"  # in environment.json: the images of `evaluation.neighbours`


def write_settings(directory: RunDir, built: Built) -> None:
    """Writes config.toml, and before it which of its settings the reader chose, as it looks the same afterwards."""
    directory.write_environment({CHOSEN: chosen_at_start(directory, built)})
    directory.write_config(tomli_w.dumps(plain(built.config)))


def describe(directory: RunDir, built: Built, root: Path, session: Session | None = None) -> None:
    """Writes environment.json, the partition or roster, and the weights from a file; `root` is the data directory."""
    shared = None if session is None else session.machine()
    environment = describe_environment(command_words(sys.argv), built.config.seed, shared)
    environment |= {"layout": built.layout, "device": built.engine.applied(built.program).device}
    data: dict[str, Any] = {
        "data_dir": str(root.resolve()),
        _DATA: data_digest(built),
        "data_licence": built.client_data.dataset.licence,
        CHOSEN: chosen_at_start(directory, built),
    }
    if built.labelled is not None:
        data[_NEIGHBOURS] = built.labelled.description()
    if shown := _shown(built.algorithm):
        data["shown"] = shown
    data[OWN_FILES] = own_files(plain(built.config))
    weights = write_initial(built.unwrapped, directory)
    directory.write_environment({**environment, "format": FORMAT, **data, **weights})
    partition = built.partition
    if isinstance(partition, FeaturePartition) and built.config.keeps_images:
        partition = with_pictures(partition, built.client_data.dataset)
    partition.save(directory.roster_path if isinstance(partition, Roster) else directory.npz_path)


def is_described(directory: RunDir) -> bool:
    """Whether `describe` was completed. It writes the partition last; a server freezes the roster before it."""
    if not directory.roster_path.exists():
        return directory.npz_path.exists()
    return _DATA in (directory.read_environment() or {})


def _shown(algorithm: AlgorithmBase) -> dict[str, Any]:
    """What the page of the run shows of the algorithm, if it declares anything; also of a run that is killed."""
    curves = [curve._asdict() for curve in algorithm.curves]
    graphs, tested = [graph._asdict() for graph in algorithm.graphs], algorithm.tested_model
    declared = curves or graphs or tested != AlgorithmBase.tested_model
    return {"curves": curves, "graphs": graphs, "model": tested} if declared else {}


def check_same_data(directory: RunDir, built: Built, environment: dict[str, Any]) -> None:
    """Raises `RunDirectoryError` if the partition, the data or the images of `evaluation.neighbours` differ.

    They are compared with environment.json; after a change of the settings of `evaluation.neighbours` its images may
    differ.
    """
    what = None
    if load_partition(directory.partition_path).digest != built.partition.digest:
        what = "the data now give a different partition than at the start of the run"
    elif environment.get(_DATA, (now := data_digest(built))) != now:
        what = "the images or labels differ from those at the start of the run"
    elif _changed_neighbours(environment.get(_NEIGHBOURS), built):
        what = "the images or labels of evaluation.neighbours differ from those at the start of the run"
    if what is not None:
        then = environment.get("data_dir", "unknown")
        hint = f"set --data-dir to the original data (it was {then}), or start a new run"
        raise RunDirectoryError(what, where=str(directory.path), hint=hint)


def _changed_neighbours(before: Any, built: Built) -> bool:
    """Whether the same settings now give other labelled images."""
    if built.labelled is None or not isinstance(before, dict):
        return False
    now = built.labelled.description()
    return bool(before.get("settings") == now["settings"] and before.get("sha256") != now["sha256"])


def data_digest(built: Built) -> str:
    """SHA-256 in hexadecimal of the images and labels that are trained and tested on."""
    if built.shared is not None and built.shared.digest is not None:
        return built.shared.digest
    data = built.client_data.dataset
    hashed = hashlib.sha256()
    for split in data.splits:
        split.feed(hashed)
    digest = hashed.hexdigest()
    if built.shared is not None:
        built.shared.digest = digest
    return digest


CHOSEN = "chosen_from_data"  # in environment.json: the settings that the reader chose at the start


def chosen_at_start(directory: RunDir, built: Built) -> Collection[str]:
    """The settings that the reader chose from the data when the run began: a resumed run finds them in config.toml."""
    with suppress(RunDirectoryError):  # a damaged file costs no summary
        kept = (directory.read_environment() or {}).get(CHOSEN)
        if isinstance(kept, list):
            return kept
    return sorted(built.client_data.dataset.chosen)


def pooled_facts(built: Built, chosen: Collection[str]) -> list[str]:
    """Sentences on what the server knows of the clients' data without an ask, for the run's report.

    `chosen` is the result of `chosen_at_start`.
    """
    config, data, federation = built.config, built.client_data.dataset, built.federation
    each = "of each class " if built.partition.census is not None else ""
    held_out = ", and how many it holds out" if federation.held_out is not None else ""
    facts = [f"How many training examples {each}each client holds{held_out}."]
    if federation.at_sites:
        facts.append("The name of each site and of its clients, and the versions of what it computes with.")
    elif data.classes:
        facts.append("The names of the classes, those of all clients together.")
    if federation.parties is not None:
        facts.append(
            "Which test and validation examples all parties have: their ids are compared in the open."
        )
    # These have moments of their own.
    if config.data.normalize == "standard" and data.moments_of and not data.parties:
        facts.append(
            f"The mean and the standard deviation of each channel, of {data.moments_of:,} training images of all "
            'clients together (data.normalize = "standard"). "unit", "half" and "imagenet" need no image of a client.'
        )
    if "size" in chosen:
        facts.append("The size of the images, chosen from the sizes of all images (data.dataset.size).")
    if traits_of(config.engine).place == "cluster":
        facts.append("The training examples themselves: Ray sends them, or their paths, to every node.")
    return facts
