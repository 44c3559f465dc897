"""Names to factories, and the settings of a factory read off its signature.

A *factory* is a plain function. Its positional parameters are handed in by whoever builds it; its keyword-only
parameters are the user's settings, with their types, bounds and defaults. So a setting is written down once:

>>> from typing import Annotated
>>> from pydantic import Field
>>> def disc(image: object, *, radius: Annotated[float, Field(gt=0)] = 1.0) -> float:
...     return 3 * radius**2
>>> settings_model(disc).model_validate({"radius": 2}).model_dump()
{'radius': 2.0}
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from fedlens.base.errors import (
    ConfigError,
    FedlensError,
    nearest,
    renamed,
)
from fedlens.base.setting_errors import Locate, validated

Factory = Callable[..., Any]
INSTANCE = "instance"  # the name of a model that was given as an object in Python
USER_MODULE_PREFIX = "fedlens_user_"


@dataclass(frozen=True)
class Entry:
    """One row of a registry: where the factory is, and one line on what it is."""

    target: str
    summary: str


@dataclass(frozen=True)
class Feeds:
    """Stands in a setting's annotation: which slot of an algorithm it is for, so that the slot's table replaces it.

    >>> from typing import Annotated
    >>> def paper(parts: object, *, lr: Annotated[float, Feeds("server")] = 1.0, mu: float = 0.1) -> None: ...
    >>> feeding(paper, "server")
    ['lr']
    """

    slot: str


class OwnSettings(ABC):
    """A factory that says itself what its settings are."""

    @abstractmethod
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """What the factory makes."""

    @abstractmethod
    def settings_model(self) -> type[BaseModel]:
        """The pydantic model of its settings."""


@dataclass(frozen=True)
class Registry:
    """A table of names, imported only when asked for.

    Besides its own rows a registry finds factories that a user names as `path/to/file.py:function` or
    `package.module:function`, and those that an installed package offers under the entry point group
    `fedlens.<kind>s`; not in a block of `own_names`.
    """

    kind: str
    entries: Mapping[str, Entry]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def rows(self) -> list[tuple[str, str]]:
        """Each name with its one-line summary, installed plug-ins included; imports no factory."""
        own = [(name, entry.summary) for name, entry in self.entries.items()]
        return own + [(p.name, f"from {p.value}") for p in self._plugins() if p.name not in self.entries]

    def find(self, name: str, where: str | None = None) -> Factory:
        """The factory called `name`; raises `ConfigError` with the nearest right name where there is none."""
        if name in self.entries:
            return _load(self.entries[name].target)
        if (approved := _approved.get()) is not None:
            return _callable(self._of_approved(name, approved, where), name, self.kind, where)
        for plugin in self._plugins():
            if plugin.name == name:
                return _callable(plugin.load(), name, self.kind, where)
        if ":" in name:
            return _callable(load_target(name, where=where), name, self.kind, where)
        known = [row for row, _ in self.rows()]
        raise ConfigError(f"unknown {self.kind} '{name}'", where=where, hint=nearest(name, known))

    def given(self, thing: Any) -> tuple[Factory, str]:
        """A factory that was given in Python, and the name that config.toml has for it."""
        return thing, import_name(thing)

    def _of_approved(self, name: str, approved: Mapping[str, bytes], where: str | None) -> Any:
        """What `name` is in an approved file. Raises `ConfigError` for any other name."""
        file, _, attribute = name.rpartition(":")
        if file not in approved:
            raise ConfigError(
                f"the {self.kind} '{name}' is not fedlens's own",
                where=where,
                hint=nearest(name, self.entries),
            )
        module = _approved_module(file, approved[file], where)
        own = {key: value for key, value in vars(module).items() if _is_of(value, module)}
        if attribute not in own:  # what it imports, such as `os.system`, was not approved as a factory
            raise ConfigError(
                f"{file} does not define '{attribute}'", where=where, hint=nearest(attribute, own)
            )
        return own[attribute]

    def _plugins(self) -> list[EntryPoint]:
        path = tuple(str(place) for place in sys.path)
        return _installed(f"fedlens.{self.kind}s", path, tuple(map(_modified, path)))


_approved: ContextVar[Mapping[str, bytes] | None] = ContextVar("approved", default=None)


@contextmanager
def own_names(approved: Mapping[str, bytes]) -> Iterator[None]:
    """In this block, and in this thread, names resolve in fedlens's own tables alone, and in approved files.

    A site computes what others wrote down: a name of theirs must not import a module.

    Args:
        approved: the code of each Python file that names may lead to, by its name in them.

    >>> models = Registry("model", {"linear": Entry("fedlens.models.simple:linear", "")})
    >>> with own_names({}):
    ...     models.find("subprocess:getoutput")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: the model 'subprocess:getoutput' is not fedlens's own; known: linear.
    """
    before = _approved.set(approved)
    try:
        yield
    finally:
        _approved.reset(before)


def _is_of(value: Any, module: ModuleType) -> bool:
    return callable(value) and import_name(value).startswith(f"{module.__name__}:")


def _approved_module(file: str, code: bytes, where: str | None) -> ModuleType:
    """The module that this code makes, once a process: not read again from its file, and not from a cache of Python."""
    name = "fedlens_approved_" + hashlib.sha256(file.encode() + b"\0" + code).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # before it runs: a dataclass looks its module up
    try:
        exec(compile(code, file, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        what = f"importing {file} failed: {type(error).__name__}: {error}"
        raise ConfigError(
            what, where=where, hint="a file that is approved cannot import files beside it"
        ) from error
    return module


@lru_cache(maxsize=64)
def _installed(group: str, path: tuple[str, ...], changed: tuple[int, ...]) -> list[EntryPoint]:
    """The entry points of the packages on `path`, read again once a folder of it has changed.

    Reading them takes 10 ms, and a study looks up thousands of names.
    """
    return list(entry_points(group=group))


def _modified(place: str) -> int:
    try:
        return os.stat(place or os.curdir).st_mtime_ns
    except OSError:
        return 0


def import_name(thing: Any) -> str:
    """`module:name` of a function or class; of another object, that of its class.

    >>> from functools import partial
    >>> import_name(load_file), import_name(partial(load_file))
    ('fedlens.base.registry:load_file', 'functools:partial')
    """
    named = thing if isinstance(thing, type) or inspect.isroutine(thing) else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


def _load(target: str) -> Factory:
    module, _, attribute = target.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


def _callable(found: object, name: str, kind: str, where: str | None) -> Factory:
    if not callable(found):
        raise ConfigError(
            f"'{name}' is of type {type(found).__name__}, but must be a function that makes the {kind}",
            where=where,
        )
    return found


def load_target(target: str, where: str | None = None) -> Any:
    """The object behind `file.py:name` or `package.module:name`.

    Raises `ConfigError` where the file, the module or the name is not there, or importing it fails.
    """
    source, _, attribute = target.rpartition(":")
    try:
        module = load_file(Path(source)) if source.endswith(".py") else _import(source)
    except FileNotFoundError:
        relative = not Path(source).expanduser().is_absolute()
        raise ConfigError(
            f"the file {source} does not exist",
            where=where,
            hint=f"give its path, relative to the current directory {Path.cwd()}"
            if relative
            else "correct its path",
        ) from None
    except FedlensError:
        raise
    except Exception as error:
        raise ConfigError(
            f"importing {source} failed: {type(error).__name__}: {error}{renamed(error)}",
            where=where,
            hint=_how_to_find(source, error),
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        if "<" in attribute or source == "__main__":
            raise ConfigError(
                f"'{target}' was passed as a Python object and cannot be imported from here",
                where=where,
                hint="move it to a file and name it as FILE.py:NAME, or resume from the script that defines it",
            ) from None
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"{source} does not define '{attribute}'", where=where, hint=nearest(attribute, public)
        ) from None


def _import(source: str) -> Any:
    """The module of this name. The current folder is searched too, as Python does for scripts."""
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        if error.name is None or not f"{source}.".startswith(f"{error.name}.") or here in sys.path:
            raise
    sys.path.append(here)
    importlib.invalidate_caches()
    return importlib.import_module(source)


def _how_to_find(source: str, error: Exception) -> str | None:
    """A hint for a module that was not found."""
    if not isinstance(error, ModuleNotFoundError) or source.endswith(".py"):
        return None
    return "run the command in the folder of the module, or set PYTHONPATH to that folder"


def load_file(path: Path) -> Any:
    """The module in a user's own file, once a process, under a name that depends on its path alone.

    Its folder is appended to `sys.path`, so it can import the modules beside it.
    """
    path = path.expanduser().resolve()
    name = USER_MODULE_PREFIX + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        importlib.invalidate_caches()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def user_files() -> list[str]:
    """The files that `load_file` has loaded: a worker loads them before it unpickles what they define."""
    found = [m for n, m in sys.modules.items() if n.startswith(USER_MODULE_PREFIX)]
    return [str(m.__file__) for m in found]


@cache
def settings_model(factory: Factory) -> type[BaseModel]:
    """The pydantic model of a factory's settings: its keyword-only parameters, and nothing else allowed."""
    if isinstance(factory, OwnSettings):
        return factory.settings_model()
    signature = inspect.signature(factory)
    hints = get_type_hints(factory, include_extras=True)
    settings = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if isinstance(factory, type) and any(parameter.name not in hints for parameter in settings):
        hints |= get_type_hints(factory.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {}
    for parameter in settings:
        required = parameter.default is inspect.Parameter.empty
        if parameter.name not in hints:
            raise TypeError(f"the parameter '{parameter.name}' has no type")
        fields[parameter.name] = (hints[parameter.name], Field(... if required else parameter.default))
    config = ConfigDict(extra="forbid", frozen=True, validate_default=True, arbitrary_types_allowed=True)
    name = getattr(factory, "__name__", type(factory).__name__)
    return create_model(f"{name}_settings", __config__=config, **fields)


def feeding(factory: Factory, slot: str) -> list[str]:
    """The settings of an algorithm that are for this slot."""
    fields = settings_model(factory).model_fields
    return [name for name, field in fields.items() if Feeds(slot) in field.metadata]


def read_settings(
    factory: Factory, values: Mapping[str, Any], where: str, locate: Locate = str
) -> dict[str, Any]:
    """The settings of `factory` in `values`, checked and with the defaults filled in.

    Raises `ConfigError` that names the key below `where`, as `locate` gives it.
    """
    model = settings_model(factory)
    checked = validated(model, values, where, locate)
    return {name: getattr(checked, name) for name in model.model_fields}


def checked_kind(
    what: str,
    kinds: Mapping[str, Factory],
    common: Factory,
    entry: Mapping[str, Any],
    where: str,
    strict: bool | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of an entry of a list of tables, such as one of [[tables]]: those of every kind, and of its own.

    Args:
        what: the word for an entry, "table".
        kinds: a function for each kind. Its keyword-only parameters and those of `common` are the settings.
        where: the place of the entry, for messages.

    Raises `ConfigError` for an unknown kind or setting, one that is missing, and a value of another type.

    >>> def bars(*, width: int = 1) -> None: ...
    >>> def common(*, kind: str, title: str = "") -> None: ...
    >>> checked_kind("figure", {"bars": bars}, common, {"kind": "bars", "width": 2}, "figures[0]")
    ({'kind': 'bars'}, {'width': 2})
    >>> checked_kind("figure", {"bars": bars}, common, {"kind": "bar"}, "figures[0]")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: unknown kind of figure 'bar' (figures[0].kind); did you mean 'bars'.
    """
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        found = f"a {what} has no kind" if kind is None else f"unknown kind of {what} '{kind}'"
        raise ConfigError(found, where=f"{where}.kind", hint=nearest(str(kind), kinds))
    shared, own = settings_model(common), settings_model(kinds[kind])
    known = [*shared.model_fields, *own.model_fields]
    given = {key: value for key, value in entry.items() if key in shared.model_fields}
    more = {key: value for key, value in entry.items() if key not in given}
    first, second = (
        validated(model, values, where, known=lambda _: known, strict=strict).model_dump(exclude_unset=True)
        for model, values in ((shared, given), (own, more))
    )
    return first, second
