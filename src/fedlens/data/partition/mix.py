"""A partition inside another: an inner partition divides each client of an outer one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.registry import Factory, read_settings, settings_model
from fedlens.core.random import derive
from fedlens.data.partition.feature import NEUTRAL
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.registry import PARTITIONS
from fedlens.data.table import Table


@dataclass(frozen=True)
class Recipe:
    """A partition with its checked settings, as given in the setting `key`."""

    factory: Factory
    name: str
    settings: Mapping[str, Any]
    key: str

    def __call__(self, table: Table, seed: int) -> Partition:
        """The partition of `table`. Raises `ConfigError` that names the setting below `key`."""
        try:
            partition = self.factory(table, seed, **self.settings)
        except ConfigError as error:
            where = ".".join(filter(None, [self.key, error.where]))
            raise ConfigError(error.what, where=where, hint=error.hint) from error
        if not isinstance(partition, Partition):
            raise ConfigError(
                f"the partition '{self.name}' returned a {type(partition).__name__}; it must return a Partition",
                where=f"{self.key}.name",
            )
        return partition

    def table(self) -> dict[str, Any]:
        """The table with all settings, in types of TOML and JSON."""
        plain = {
            key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()
        }
        return {"name": self.name, **plain}


def read_recipe(given: Mapping[str, Any] | str, key: str) -> Recipe:
    """Reads a table such as {name = "iid", clients = 4}, or a name alone.

    Raises `ConfigError` that names the setting below `key`.

    >>> read_recipe({"name": "shards", "clients": 4}, "inner").settings["classes_per_client"]
    2
    """
    table = {"name": given} if isinstance(given, str) else dict(given)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            "the table has no 'name' (a string)",
            where=f"{key}.name",
            hint=f'write {key} = {{name = "iid", clients = 4}}',
        )
    factory = PARTITIONS.find(name, where=f"{key}.name")
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        name = f"{Path(file).expanduser().resolve()}:{attribute}"
    _check_names(factory, name, table, key)
    settings = read_settings(factory, table, key)
    for setting, value in table.items():
        read = settings[setting]
        if isinstance(value, bool) and isinstance(read, int | float) and not isinstance(read, bool):
            raise ConfigError(
                f"'{setting}' is {str(value).lower()}, but must be a number", where=f"{key}.{setting}"
            )
    return Recipe(factory, name, settings, key)


def _check_names(factory: Factory, name: str, table: Mapping[str, Any], key: str) -> None:
    """Raises `ConfigError` for an unknown setting, and for a missing one."""
    try:
        model = settings_model(factory)
    except Exception as error:
        raise ConfigError(
            f"the signature of '{name}' cannot be read: {type(error).__name__}: {error}",
            where=f"{key}.name",
        ) from error
    for setting in table:
        if setting not in model.model_fields:
            known = (
                nearest(setting, model.model_fields)
                if model.model_fields
                else "it has no settings: remove it"
            )
            raise ConfigError(
                f"the partition '{name}' has no setting '{setting}'", where=f"{key}.{setting}", hint=known
            )
    for setting, field in model.model_fields.items():
        if field.is_required() and setting not in table:
            raise ConfigError(
                f"the setting '{setting}' is missing",
                where=f"{key}.{setting}",
                hint=f'write {key} = {{name = "{name}", {setting} = ...}}',
            )


def _filled(given: dict[str, Any] | str) -> dict[str, Any] | str:
    """The table with all settings and absolute paths, for a run's config.toml."""
    try:
        return read_recipe(given, "").table()
    except ConfigError:
        return given  # `mix` raises the same error, and names the setting


_Table = Annotated[dict[str, Any] | str, AfterValidator(_filled)]


@partitioner
def mix(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    outer: Annotated[
        _Table,
        Field(description='a partition: a table such as {name = "natural", column = "city"}, or a name'),
    ],
    inner: Annotated[
        _Table, Field(description='how each part is partitioned, e.g. {name = "iid", clients = 4}')
    ],
    small: Annotated[
        Literal["stop", "whole", "drop"],
        Field(
            description="for a part that is too small for the inner partition: an error, a single "
            "client, or leave it out"
        ),
    ] = "stop",
) -> Partition:
    """Partitions all examples by `outer`, and the examples of each of its clients by `inner`.

    Not from a paper. Examples: cities, and a Dirichlet partition within each city,

        outer = {name = "natural", column = "city"}, inner = {name = "dirichlet", clients = 4, alpha = 0.1};

    label skew and feature skew together, with different image features for each client of the Dirichlet partition,

        outer = {name = "dirichlet", clients = 100, alpha = 0.1}, inner = {name = "feature", clients = 1};

    or the same with four clients per set of features: outer = feature with 25 clients, inner = dirichlet with 4.
    `mix` can itself be outer or inner.

    The outer partition uses `seed` itself, so it is the same as on its own. The inner partition of client i uses a
    seed derived from (`seed`, "inner", i), so that one more city does not change the others. The clients have the
    names "i/j", where j is the inner id. Both partitions can set image features (`Partition.features`); a client
    without a value for a feature that other clients have gets the neutral value.

    What `outer` or `inner` discards is discarded. A part is too small if `inner` refuses it with a `ConfigError` but
    accepts another part. `small` decides what happens then: "stop" raises an error that names the part, "whole" keeps
    the part as one client with the name "i", and "drop" discards it. It is an error if `inner` accepts no part.

    Raises `ConfigError` if a setting in `outer` or `inner` is invalid, both set the same feature, or two clients
    would have the same name.

    >>> table = Table.of([0, 1] * 40, {"city": ["Ulm"] * 30 + ["Bern"] * 50})
    >>> outer = {"name": "shards", "clients": 2, "classes_per_client": 1}
    >>> p = mix(table, 0, outer=outer, inner={"name": "iid", "clients": 2})
    >>> p.ids, p.sizes().tolist()
    (('0/0', '0/1', '1/0', '1/1'), [20, 20, 20, 20])
    """
    table = Table.of(labels)
    outside, inside = read_recipe(outer, "outer"), read_recipe(inner, "inner")
    first = outside(table, seed)
    if not len(first):
        raise ConfigError(f"the partition '{outside.name}' made no client", where="outer.name")
    parts, refused = _parts(table, first, inside, seed)
    if len(refused) == len(first):
        raise next(iter(refused.values()))
    if refused and small == "stop":
        raise _too_small(first, refused)
    if small == "whole":
        for k in refused:
            parts[k] = Partition.of_owners(np.zeros(len(first[k]), np.int64), [""])
    parts = dict(sorted(parts.items()))
    names = [_name(first.ids[k], client, k in refused) for k, part in parts.items() for client in part.ids]
    spec = {"outer": outside.table(), "inner": inside.table()}
    return replace(
        _joined(first, parts, names), spec=spec, features=_features(first, parts), dataset=first.dataset
    )


def _parts(
    table: Table, first: Partition, inside: Recipe, seed: int
) -> tuple[dict[int, Partition], dict[int, ConfigError]]:
    """The inner partition of each outer client by its number, and the error of each that was refused."""
    parts, refused = {}, {}
    for k, name in enumerate(first.ids):
        try:
            parts[k] = inside(table.take(first[k]), derive(seed, "inner", name))
        except ConfigError as error:
            refused[k] = error
    return parts, refused


def _too_small(first: Partition, refused: Mapping[int, ConfigError]) -> ConfigError:
    k, error = next(iter(refused.items()))
    more = f" (and {len(refused) - 1} others)" if len(refused) > 1 else ""
    ways = "small = 'whole' leaves such a client whole, 'drop' leaves it out"
    return ConfigError(
        f"'{first.ids[k]}'{more}, with {len(first[k])} examples, cannot be partitioned: {error.what}",
        where=error.where,
        hint=f"{error.hint}; or {ways}" if error.hint else ways,
    )


def _name(outer: str, inner: str, whole: bool) -> str:
    return outer if whole else f"{outer}/{inner}"


def _joined(first: Partition, parts: Mapping[int, Partition], names: Sequence[str]) -> Partition:
    ordered = sorted(names)
    twice = next((one for one, other in pairwise(ordered) if one == other), None)
    if twice is not None:
        raise ConfigError(
            f"two clients would have the name '{twice}'",
            where="outer",
            hint="use outer client names without '/'",
        )
    sizes = np.concatenate([part.sizes() for part in parts.values()])
    rows = [first[k][part.indices] for k, part in parts.items()]
    return Partition(tuple(names), np.concatenate(rows), np.concatenate([[0], np.cumsum(sizes)]))


def _features(first: Partition, parts: Mapping[int, Partition]) -> dict[str, NDArray[np.float64]]:
    """float64 [clients] by name: the features of outer and inner together."""
    features: dict[str, NDArray[np.float64]] = {}
    each = [len(part) for part in parts.values()]
    for name, values in first.features.items():
        features[name] = np.repeat(values[list(parts)], each)
    for name in sorted({name for part in parts.values() for name in part.features}):
        if name in features:
            raise ConfigError(
                f"outer and inner both set the clients' '{name}'",
                where="inner",
                hint=f"set {name} = 0 in one of them",
            )
        features[name] = np.concatenate([_values(part, name) for part in parts.values()])
    return features


def _values(part: Partition, name: str) -> NDArray[np.float64]:
    if name not in part.features and name not in NEUTRAL:
        raise ConfigError(
            f"some clients have a '{name}' and others do not, and it has no neutral value", where="inner"
        )
    return part.features.get(name, np.full(len(part), NEUTRAL.get(name, 0.0)))
