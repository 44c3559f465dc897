"""A dataset and a partition of it, made from settings alone: no run, no model, no import of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, option_example
from fedlens.base.registry import Registry, settings_model
from fedlens.base.shell_command import setting
from fedlens.core.dataset_info import Kind
from fedlens.core.random import derive
from fedlens.data.dataset import Dataset, refuse_features
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.formats.folder_check import own_dataset
from fedlens.data.loading import loaded
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.registry import PARTITIONS
from fedlens.settings.config import DataSettings
from fedlens.settings.config_source import Source, override
from fedlens.settings.resolve import Resolved, resolve
from fedlens.tasks.registry import TASKS

_ARGUMENTS = {"name": "PARTITION", "dataset.name": "DATASET"}


@dataclass(frozen=True)
class Made:
    """A partition, and facts about its dataset.

    Args:
        kind: the task that the data are for.
        data_seed: the seed of random data or of a random choice of test data; None if nothing was drawn and no seed
            was given.
    """

    partition: Partition
    kind: Kind
    data_seed: int | None

    def run_settings(self, path: Path) -> list[str] | None:
        """The settings with which a run uses the partition saved at `path`; None if no model can be trained."""
        return run_settings(path, self.data_seed) if self.kind in TASKS else None


def make_partition(
    dataset: str,
    partition: str,
    changes: Sequence[str] = (),
    *,
    seed: int = 0,
    data_seed: int | None = None,
    root: Path,
    download: bool = False,
) -> Made:
    """Makes the partition of the whole training split, with its census.

    It equals that of a run with the same settings, `seeds.partition = seed` and no validation data.

    Args:
        dataset, partition: names in the registries, or `file.py:function`.
        changes: `key=value`, a setting of the partition; `dataset.key=value`, one of the dataset.
        data_seed: the run's `seeds.data`, for datasets that draw something; by default that of a run with seed 0.
        root: the data folder.

    Raises `ConfigError` if a name or a setting is wrong, `DataError` if the data are missing or corrupt.

    >>> p = make_partition("digits", "iid", ["clients=4"], root=Path()).partition
    >>> len(p), p.dataset, p.spec["seed"], int(p.census.totals().sum())
    (4, 'digits', 0, 1437)
    """
    source = override(Source({}), changes)
    settings, of_dataset = _tables(source)
    chosen_dataset = _resolve(DATASETS, dataset, of_dataset, "dataset", source)
    chosen = _resolve(PARTITIONS, partition, settings, "", source)
    seed_of_data = derive(0, "seeds", "data") if data_seed is None else data_seed
    data = _read(chosen_dataset, root, download, seed_of_data)
    table = data.table()
    drawn: Partition = chosen(table, seed)
    refuse_features(data, drawn)
    partition_made = replace(drawn, dataset=data.name).counted(table)
    return Made(partition_made, data.kind, seed_of_data if data.seeded or data_seed is not None else None)


def read_dataset(
    name: str,
    changes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    *,
    data_seed: int | None = None,
    root: Path,
    download: bool = False,
) -> Dataset:
    """The dataset of this name, or the user's own data in a folder, whose format is guessed.

    Args:
        name: in the registry, `file.py:function`, or a folder.
        changes: `key=value`, on top of the `settings` of the dataset, or its name.
        data_seed, root, download: as in `make_partition`.

    Raises `ConfigError` if the name or a setting is wrong, `DataError` if the data are missing or corrupt.

    >>> len(read_dataset("digits", [], root=Path()).test)
    360
    """
    source = override(Source({"name": name, **(settings or {})}), changes)
    given = {key: value for key, value in source.values.items() if key != "name"}
    name = source.values["name"]
    if name not in DATASETS and Path(str(name)).is_dir():
        name, given = own_dataset(Path(name), given)
    chosen = _resolve(DATASETS, name, given, "", source, {"name": "NAME"})
    return _read(chosen, root, download, derive(0, "seeds", "data") if data_seed is None else data_seed)


def _read(chosen: Resolved, root: Path, download: bool, seed: int) -> Dataset:
    data: Dataset = chosen(root, download, seed)
    if data.on_error != "skip":
        return data
    # What cannot be decoded is left out of a run, and the positions are those of the rest.
    return loaded(data, int(DataSettings.model_fields["cache"].default * 2**30))


def check_free(path: Path, force: bool) -> None:
    """Raises `ConfigError` where a partition cannot be saved at `path` without losing what is there."""
    if path.is_dir():
        raise ConfigError(
            "the path is a directory", where=str(path), hint="name a file in it, e.g. split.npz"
        )
    if path.exists() and not force:
        raise ConfigError(
            "the file already exists",
            where=str(path),
            hint="choose another name, or pass --force to replace it",
        )


def run_settings(path: Path, data_seed: int | None = None) -> list[str]:
    """The settings of a run that takes the partition in a file, as `--set` takes them.

    >>> run_settings(Path("my split.npz"))
    ['data.partition={name = "file", path = "my split.npz"}']
    """
    changes = [setting("data.partition", {"name": "file", "path": str(path)})]
    return changes if data_seed is None else [*changes, setting("seeds.data", data_seed)]


def _tables(source: Source) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the partition, and those of the dataset."""
    settings = dict(source.values)
    of_dataset = settings.pop("dataset", {})
    if not isinstance(of_dataset, Mapping):
        raise ConfigError(
            f"'dataset' is {of_dataset!r}, but the first argument names the dataset",
            where="--set dataset",
            hint="a setting of the dataset is e.g. dataset.path=DIR",
        )
    for key, table in (("name", settings), ("dataset.name", of_dataset)):
        if "name" in table:
            raise ConfigError(
                f"unknown setting '{key}'",
                where=f"--set {key}",
                hint=f"name it as the argument {_ARGUMENTS[key]}",
            )
    return settings, dict(of_dataset)


def _resolve(
    registry: Registry,
    name: str,
    settings: Mapping[str, Any],
    key: str,
    source: Source,
    arguments: Mapping[str, str] = _ARGUMENTS,
) -> Resolved:
    def locate(setting: str) -> str:
        return arguments.get(setting) or source.locate(setting)

    _refuse_missing(registry, name, settings, key)
    return resolve(registry, {"name": name, **settings}, key, source, locate)


def _refuse_missing(registry: Registry, name: str, settings: Mapping[str, Any], key: str) -> None:
    """Raises `ConfigError` that names all the settings which have to be given, and says what they are."""
    try:
        fields = settings_model(registry.find(name)).model_fields
    except Exception:  # a wrong name, or a broken factory: `resolve` says so
        return
    missing = [field for field, info in fields.items() if info.is_required() and field not in settings]
    if missing and set(settings) <= set(fields):
        told = [f"'{field}' ({fields[field].description or 'not described'})" for field in missing]
        options = [
            option_example(f"{key}.{field}" if key else field, fields[field].annotation) for field in missing
        ]
        raise ConfigError(
            f"the {registry.kind} '{name}' needs {' and '.join(told)}", hint=f"add {' '.join(options)}"
        )
