"""The part of an experiment that sites approve: what they compute, without a name that could run code of others."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from fedlens.algorithms.registry import ALGORITHMS, RULES
from fedlens.base.errors import ConfigError, nearest
from fedlens.base.parse_text import parse_toml
from fedlens.base.printable import printable
from fedlens.base.registry import Registry
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.files.caches import HUB
from fedlens.models.registry import MODELS
from fedlens.models.weights_setting import IMAGENET, NONE, RUN
from fedlens.settings.config import AT_SITES, NETWORK, Config, plain, read_config, sums_moments
from fedlens.settings.config_source import Source
from fedlens.settings.plan import SLOT_REGISTRIES, Plan, plan
from fedlens.site.settings import SiteSettings
from fedlens.tasks.registry import TASKS

LARGEST = 2**18
"""The longest text of an experiment that a site reads, in bytes."""

WHERE = "experiment"
_ALL = None

# The settings that a site gets, by table: `_ALL` of a table whose keys the named thing decides.
_SENT: Mapping[str, tuple[str, ...] | None] = {
    "": (
        *("name", "rounds", "seed", "data", "model", "algorithm", "task", "local", "select", "client"),
        *("aggregate", "server", "privacy", "evaluation", "seeds"),
    ),
    "data": ("dataset", "validation", "validation_from", "augment", "normalize", "prefetch"),
    "data.dataset": ("name", "classes", "input_shape", "kind", "mean", "std"),
    "evaluation": ("batch_size", "size", "clients", "test_peers"),
    **dict.fromkeys(("model", "algorithm", "task", "local", "select", "client", "aggregate"), _ALL),
    **dict.fromkeys(("server", "privacy", "seeds", "data.augment"), _ALL),
}

# Where an experiment names a thing of a table of fedlens; of a list, each of its items.
NAMED: Mapping[str, Registry] = {
    "model": MODELS,
    "model.base": MODELS,
    "algorithm": ALGORITHMS,
    "algorithm.client": MODELS,
    "task": TASKS,
    "client": RULES,
    "data.augment": AUGMENTS,
    **SLOT_REGISTRIES,
}
INNER = {"projection": "base", "fedgkt": "client"}
"""Things with a model as a setting, and its name. A server writes it out, so that a person sees it."""
_WEIGHTS = "model.weights"
_SAME = "ask the server for its file, look at it, and change the line under [files]"
_SELF_MADE = "ask the server for the text that it makes itself"
_FREE = ("name", "data.dataset.classes")  # words for people, which no code reads as a place
_PLACE = re.compile(r"[:/\\~]|^\.|\.(py|toml|json|csv|npz|npy|pth?|ckpt|bin|tar|safetensors)$", re.IGNORECASE)


def site_part(config: Config) -> str:
    """TOML of the settings that a site needs: those of a plan, without what the server alone does.

    Engine, observers, records, checkpoints, and the test data and their evaluation stay at the server. Files are named
    without their folders.

    Raises `ConfigError` for weights in a run or a repository, which sites cannot open.
    """
    return tomli_w.dumps(_sent(plain(config), ""))


def _sent(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    sent: dict[str, Any] = {}
    for name, value in table.items():
        below = f"{key}.{name}" if key else name
        if name not in (_SENT[key] or (name,)):
            continue
        tabled = isinstance(value, Mapping) and _SENT.get(below) is not None
        sent[name] = _sent(value, below) if tabled else _without_folders(value, below)
    return sent


def _without_folders(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item, key) for item in value]
    if key == _WEIGHTS and value.startswith((RUN, HUB)):
        raise ConfigError(
            "sites have no such run or repository",
            where=key,
            hint="save the weights as a file, name it, and give it to the sites",
        )
    named = key == _WEIGHTS or (key.endswith(".name") and ".py:" in value)
    return Path(value).name if named else value


@dataclass(frozen=True)
class Contract:
    """An experiment as a site reads it: each name is in a table of fedlens, or in `[files]` of `site.toml`.

    Attributes:
        text: TOML, as the server sent it.
        settings: the text, parsed.
        site: the settings of the site.
    """

    text: str
    settings: Mapping[str, Any]
    site: SiteSettings

    @property
    def digest(self) -> str:
        """SHA-256 of the text in hexadecimal: what a site approves."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def dataset(self) -> Mapping[str, Any]:
        """The form of the data: classes, input_shape, kind; mean and std if the sites do not sum them."""
        form: Mapping[str, Any] = self.settings["data"]["dataset"]
        return form

    @property
    def sums_moments(self) -> bool:
        """Whether the site sums its images, for the mean and the deviation of each channel."""
        return sums_moments(self.dataset, self.settings["data"].get("normalize", "standard"))

    def lines(self) -> list[str]:
        """The settings for a person, one a line, without characters that a terminal would obey."""
        # Not the text itself: a comment, or lines in a string, could look like settings.
        lines = printable(tomli_w.dumps(self.settings)).splitlines()
        return lines + [f"# approved file: {line} {self.site.files[line]}" for line in self.files().values()]

    def files(self) -> dict[str, str]:
        """The files that the experiment names, each with its line in `[files]`."""
        named = {_file_of(value) for _, value in _texts(self.settings, "")}
        found = {name: self.site.file(name) for name in sorted(named)}
        return {name: line for name, line in found.items() if line is not None}

    def names(self, registry: Registry) -> list[str]:
        """The names in the settings of things of this registry."""
        tables = [one for _, each, one in _named(self.settings) if each is registry]
        return [str(one.get("name") if isinstance(one, Mapping) else one) for one in tables]

    def code(self) -> dict[str, bytes]:
        """The Python files among them, by name. Raises `ConfigError` for one that is missing or another one."""
        return {name: self.site.content(line) for name, line in self.files().items() if name.endswith(".py")}

    def plan(self) -> Plan:
        """Resolves all names; for an approved experiment alone. Call it in a block of `own_names(contract.code())`.

        Raises `ConfigError` for a wrong name or setting.
        """
        values = {**self.settings, "engine": {"name": NETWORK}}
        model = self.settings.get("model")
        line = self.site.file(str(model.get("weights"))) if isinstance(model, Mapping) else None
        if isinstance(model, Mapping) and line is not None:
            given = {"weights": str(self.site.place(line)), "weights_sha256": self.site.files[line]}
            if model.get("weights_sha256", given["weights_sha256"]) != given["weights_sha256"]:
                raise _refused(
                    _WEIGHTS, f"the experiment and {self.site.path} name different files '{line}'", _SAME
                )
            values["model"] = {**model, **given}
        source = Source(values)
        return plan(read_config(values, source.locate), source)


def read_contract(text: str, site: SiteSettings) -> Contract:
    """Reads the site's part of an experiment as text: nothing that it names is imported or opened.

    Raises `ConfigError` with the key for text that is no such part, a setting that is not for sites, and a name, path
    or URL that is neither fedlens's own nor in `[files]` of `site.toml`.
    """
    try:
        if len(text.encode()) > LARGEST:
            raise ValueError(f"it is longer than {LARGEST // 1024} KiB")
        settings = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"it is not readable: {printable(str(error))}", where=WHERE) from None
    _check_keys(settings, "")
    dataset = settings.get("data", {}).get("dataset", {})
    if dataset.get("name") != AT_SITES:
        raise _refused(
            "data.dataset.name", f"the dataset is not '{AT_SITES}'", "the data of a site are its own"
        )
    for key, registry, table in _named(settings):
        _check_name(table, key, registry, site)
    for key, value in _texts(settings, ""):
        _check_text(key, value, site)
    return Contract(text, settings, site)


def _check_keys(table: Mapping[str, Any], key: str) -> None:
    """Raises `ConfigError` for a setting that no site gets."""
    for name, value in table.items():
        below = f"{key}.{name}" if key else name
        known = _SENT[key]
        if known is not None and name not in known:
            raise _refused(below, "this setting is not for sites", "ask the server to leave it out")
        if _SENT.get(below) is None:
            continue
        if not isinstance(value, Mapping):
            raise _refused(below, "this must be a table", _SELF_MADE)
        _check_keys(value, below)


def _named(settings: Mapping[str, Any]) -> Iterator[tuple[str, Registry, Any]]:
    """Every table or name of a thing in the settings, with its key and its registry; models also in a `base`."""
    for key, registry in NAMED.items():
        waiting = [(key, table) for table in _tables(settings, key)]
        while waiting:
            place, table = waiting.pop(0)
            yield place, registry, table
            below = f"{place}.base"
            if registry is MODELS and isinstance(table, Mapping) and below not in NAMED:
                waiting += [(below, base) for base in _tables(table, "base")]


def _tables(settings: Mapping[str, Any], key: str) -> list[Any]:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_name(table: Any, key: str, registry: Registry, site: SiteSettings) -> None:
    """Raises `ConfigError` if a table names a thing that is neither fedlens's own nor in an approved file."""
    name = table.get("name") if isinstance(table, Mapping) else table
    if name is None and key == "task":
        return
    if not isinstance(name, str):
        raise _refused(f"{key}.name", f"the {registry.kind} has no name", "ask the server to name it")
    file = _file_of(name)
    if name not in registry and not (file.endswith(".py") and file != name and site.file(file)):
        raise _refused(
            f"{key}.name", f"the {registry.kind} '{name}' is not fedlens's own", nearest(name, registry)
        )
    if (
        (inner := INNER.get(name))
        and registry in (MODELS, ALGORITHMS)
        and (table is name or inner not in table)
    ):
        raise _refused(f"{key}.{inner}", f"the {registry.kind} '{name}' names no model", _SELF_MADE)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in the settings with its key, and every key with that of its table."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield key, name
            yield from _texts(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value


def _file_of(text: str) -> str:
    """The file in a text: of FILE.py:NAME the file, else all of it."""
    file, _, name = text.rpartition(":")
    return file if file.endswith(".py") and name.isidentifier() else text


def _check_text(key: str, value: str, site: SiteSettings) -> None:
    """Raises `ConfigError` for a path, a URL or foreign code that `site.toml` does not name."""
    if key in _FREE or site.file(_file_of(value)):
        return
    weights = key == _WEIGHTS and value not in (IMAGENET, NONE)
    if weights or _PLACE.search(value):
        raise _refused(
            key,
            f"'{value}' may be a path, a URL or code",
            f'approve the file with a line under [files] in {site.path}: "{value}" = its SHA-256',
        )


def _refused(key: str, what: str, hint: str) -> ConfigError:
    where, clean = printable(f"{WHERE}: {key}", line_feeds=False), partial(printable, line_feeds=False)
    return ConfigError(clean(what)[:300], where=where[:200], hint=clean(hint)[:400])
