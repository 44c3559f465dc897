"""Where settings come from: a recipe or a TOML file, and what is set on top of it."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.parse_text import TooDeepError, parse_toml, read_text
from fedlens.base.setting_errors import NOT_SET, RECIPE, RENAMED
from fedlens.base.shell_command import quoted_command
from fedlens.core.random import derive
from fedlens.files.regular_file import open_regular
from fedlens.settings.toml_lines import key_lines

_RECIPES = Path(__file__).resolve().parent.parent / "recipes"
_STUDIES = _RECIPES / "studies"

# The tables of one component, for which its name alone is short.
_INSTEAD_OF = {"data.parties": "partition", "data.partition": "parties"}  # one takes the place of the other
_COMPONENTS = {
    "data.dataset", "data.partition", "model", "algorithm", "select", "aggregate", "server", "engine"
}  # fmt: skip
_DEEPEST = 32  # tables and lists in each other; the settings need six


@dataclass(frozen=True)
class Source:
    """Settings as they were given, and where each of them stands."""

    values: dict[str, Any]
    path: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()
    renamed: frozenset[str] = frozenset()  # tables that an override gave another name

    def locate(self, key: str) -> str:
        """Where a person finds this key: the option, or the file and line.

        >>> Source({"local": {"lr": 0.1}}, Path("my.toml"), {"local.lr": 12}).locate("local.lr")
        'my.toml, line 12: local.lr'
        """
        parts = key.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        if not self.overridden.isdisjoint(prefixes):
            return f"--set {key}"
        below = sorted(given for given in self.overridden if given.startswith(f"{key}."))
        changed = f"--set {below[0]}" if below else None
        if changed and key not in self.lines:
            return changed
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        file = self._file()
        if line is not None and file is not None:
            more = f", with {changed}" if changed else "" if self._has(parts) else NOT_SET
            return f"{file}, line {line}: {key}{more}"
        return f"{file}: {key}" if file else key

    def _file(self) -> str | None:
        return None if self.path is None else _in_words(self.path)

    def _has(self, parts: Sequence[str]) -> bool:
        found: Any = self.values
        for part in parts:
            if isinstance(found, str | list):
                return True  # short for a table, or a list of them: all that is said stands there
            if not isinstance(found, Mapping) or part not in found:
                return False
            found = found[part]
        return True


@lru_cache(maxsize=1024)  # asked for each setting of each run of a study
def _in_words(path: Path) -> str:
    """A file of settings in words: an installed recipe has its name, since nobody should edit it."""
    if not path.is_relative_to(_RECIPES):
        return str(path)
    return RECIPE + path.relative_to(_RECIPES).with_suffix("").as_posix()


def recipes() -> dict[str, Path]:
    """Every recipe by name, such as `fashion-mnist/fedavg-iid`. The files of studies are none."""
    return dict(_recipes_in(_RECIPES))


@lru_cache  # a study reads a recipe for each of its methods
def _recipes_in(folder: Path) -> Mapping[str, Path]:
    found = [path for path in sorted(folder.rglob("*.toml")) if _STUDIES not in path.parents]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def recipe_path(name: str) -> Path:
    """The file of a recipe; raises `ConfigError` with the nearest name where there is none."""
    known = recipes()
    if name not in known:
        raise ConfigError(f"unknown recipe '{name}'", hint=nearest(name, known))
    return known[name]


def read_source(recipe_or_file: str, overrides: Sequence[str] = ()) -> Source:
    """The settings of a recipe or of a TOML file, with `key=value` overrides on top.

    The paths of a dataset and of a saved partition start at the current folder, or else at the folder of the file.

    Raises `ConfigError` where the file is not there or is no TOML (with the line), or an override is not `key=value`.
    """
    path = Path(recipe_or_file)
    directory = os.path.isdir(path)  # False, too, where the name is too long for a file
    if directory and recipe_or_file not in recipes():
        run = (path / "config.toml").is_file()
        raise ConfigError(
            f"{path} is a directory, not a recipe or a file",
            hint=f"{quoted_command('resume', path)} resumes the run in it"
            if run
            else "name a TOML file in it",
        )
    looks_like_file = path.suffix == ".toml" or (os.path.exists(path) and not directory)
    if not looks_like_file:
        path = recipe_path(recipe_or_file)
    text, values = read_toml(path, "pass the path of a TOML file, or a recipe ('fedlens list recipes')")
    find_beside(values, path.parent)
    return override(Source(values, path, key_lines(text)), overrides)


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """The settings in a run directory of an earlier version, by the names of this one.

    >>> with_new_names({"evaluation": {"every": 2, "beside": True}})
    {'evaluation': {'every': 2, 'overlap': True}}
    """
    for old, new in RENAMED.items():
        table, _, key = old.partition(".")
        if isinstance(settings := values.get(table), dict) and key in settings:
            settings[new.partition(".")[2]] = settings.pop(key)
    return values


def read_toml(path: Path, hint: str) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and its values.

    Raises `ConfigError` if the file does not exist (with `hint`), cannot be read, or is not valid TOML.
    """
    try:
        with open_regular(path) as file:
            text = read_text(file).decode()
        return text, _parsed(text, str(path))
    except FileNotFoundError:
        raise ConfigError(f"the file {path} does not exist", hint=hint) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file is not valid TOML: {error}", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=str(path)) from None


def find_beside(values: dict[str, Any], folder: Path, absolute: bool = False) -> None:
    """Changes relative paths of data and weights that exist beside the TOML file, and not here, to lead there.

    A table is looked for in the folder of the data before.

    Args:
        folder: that of the file.
        absolute: make all paths that exist absolute, so that they mean the same from every folder.
    """
    model = values.get("model")
    given = model.get("weights") if isinstance(model, dict) else None
    if isinstance(given, str) and given and given != "imagenet":
        kind = "run:" if given.startswith("run:") else ""
        values["model"]["weights"] = kind + _existing(given.removeprefix(kind), folder, absolute)
    data = values.get("data")
    tables = (
        {key: data.get(key) for key in ("dataset", "partition", "parties")} if isinstance(data, dict) else {}
    )
    for table in (tables.get("dataset"), tables.get("parties")):
        if isinstance(table, dict) and isinstance(table.get("files"), list):
            table["files"] = [
                _existing(file, folder, absolute) if isinstance(file, str) else file
                for file in table["files"]
            ]
    for kind, key in (("dataset", "path"), ("partition", "path"), ("dataset", "table")):
        table = tables.get(kind)
        if not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        inside = Path(table["path"]).expanduser() if isinstance(table.get("path"), str) else None
        if key == "path" or inside is None or not os.path.exists(inside / table[key]):
            table[key] = _existing(table[key], folder, absolute)


def _existing(given: str, folder: Path, absolute: bool) -> str:
    """The path, from the current folder or else from `folder`; unchanged where neither has it."""
    if not given or given.startswith("~"):
        return given
    found = next((str(path) for path in (Path(given), folder / given) if os.path.exists(path)), None)
    if found is None:
        return given
    return os.path.abspath(found) if absolute else given if os.path.exists(given) else found


def _parsed(text: str, where: str) -> dict[str, Any]:
    """The values in a TOML text. Raises `ConfigError` for what is nested too deeply or has too many digits."""
    try:
        values = parse_toml(text)
    except tomllib.TOMLDecodeError:
        raise
    except TooDeepError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where, hint="use a smaller one") from None
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        tables = [item for item in level if isinstance(item, dict | list)]
        level = [item for table in tables for item in (table.values() if isinstance(table, dict) else table)]
        if not level:
            return values
    raise _too_deep(where)


def _too_deep(where: str) -> ConfigError:
    what = f"tables or lists are nested more than {_DEEPEST} deep"
    return ConfigError(what, where=where, hint="the page on settings lists what each table contains")


def override(source: Source, overrides: Sequence[str]) -> Source:
    """The same settings with `key=value` on top, the value being TOML, or else a plain word.

    The name of a component, given for its table, changes the `name` in the table.

    >>> override(Source({"local": {"lr": 0.1}}), ["local.lr=0.5", "engine.name=processes"]).values
    {'local': {'lr': 0.5}, 'engine': {'name': 'processes'}}
    >>> override(Source({"data": {"partition": {"name": "iid", "clients": 9}}}), ["data.partition=shards"]).values
    {'data': {'partition': {'name': 'shards', 'clients': 9}}}
    """
    values, keys, renamed = copy.deepcopy(source.values), set(source.overridden), set(source.renamed)
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if len(value.strip().splitlines()) > 1 or len(key.splitlines()) > 1:
            raise ConfigError(
                f"{_short(text)!r} has more than one line",
                where="--set",
                hint="give each setting a --set of its own, e.g. --set rounds=3 --set seed=4",
            )
        if not equals or not key:
            raise ConfigError(
                f"'{text}' is not key=value", where="--set", hint="write e.g. --set local.lr=0.1"
            )
        path, new = key.split("."), _value(key, value.strip())
        if len(path) > _DEEPEST:
            raise _too_deep(f"--set {_short(key)}")
        keys.add(put_setting(values, key, new, renamed, f"--set {text}"))
    return Source(values, source.path, source.lines, frozenset(keys), frozenset(renamed))


def put_setting(values: dict[str, Any], key: str, new: Any, renamed: set[str], where: str) -> str:
    """Changes one setting in place, and returns its full key: the name of a component changes its table's `name`.

    Args:
        renamed: tables that got another name; added to.
        where: what an error names as the place.

    >>> values, renamed = {"model": {"name": "mlp", "hidden": 9}}, set()
    >>> put_setting(values, "model", "linear", renamed, "--set"), values, renamed
    ('model.name', {'model': {'name': 'linear', 'hidden': 9}}, {'model'})
    """
    path = key.split(".")
    if key in _COMPONENTS and isinstance(new, str) and isinstance(_at(values, path), dict):
        path, key = [*path, "name"], f"{key}.name"
    if path[-1] == "name" and len(path) > 1:
        renamed.add(".".join(path[:-1]))
    if key == "seed":
        _forget_derived_seeds(values)
    if key == "model.weights" and isinstance(values.get("model"), dict):
        values["model"].pop("weights_sha256", None)  # of the file that a run began with
    if (other := _INSTEAD_OF.get(".".join(path[:2]))) and isinstance(values.get("data"), dict):
        values["data"].pop(other, None)
    _put(values, path, new, where)
    return key


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _at(values: Any, path: Sequence[str]) -> Any:
    """The value at a path of keys; None if there is none."""
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _put(values: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    table = values
    for index, part in enumerate(path[:-1]):
        if isinstance(table.get(part), str):
            table[part] = {"name": table[part]}  # data.dataset = "digits" is short for a table
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            key = ".".join(path[: index + 1])
            raise ConfigError(f"'{key}' is a value, not a table, so it has no settings", where=where)
        table = inner
    table[path[-1]] = value


def _forget_derived_seeds(values: dict[str, Any]) -> None:
    """A run's own config.toml has every seed written out; those that came from the old `seed` give way to the new."""
    seeds, old = values.get("seeds"), values.get("seed", 0)
    if isinstance(seeds, dict) and isinstance(old, int):
        values["seeds"] = {name: n for name, n in seeds.items() if n != derive(old, "seeds", name)}


def _value(key: str, text: str) -> Any:
    try:
        return _parsed(f"x = {text}", f"--set {key}")["x"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith(("{", "[")):
            raise ConfigError(
                f"{_short(text)} is neither a table nor a list of TOML: {error}",
                where=f"--set {key}",
                hint="quote strings, and quote the whole argument for your shell, e.g. "
                """--set 'client=[{name = "proximal", mu = 0.1}]'""",
            ) from None
        return text
