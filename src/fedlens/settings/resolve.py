"""Finds the factory that a table of settings names, and checks its settings. No import of torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedlens.base.errors import ConfigError, FedlensError, defined_as, told
from fedlens.base.registry import Factory, OwnSettings, Registry, settings_model
from fedlens.base.setting_errors import Locate, no_such_setting, refuse_loose, validated
from fedlens.base.signatures import accepted, check_methods, methods, needed, offered, place_of
from fedlens.models.prepare import Preparation
from fedlens.settings.config import Config
from fedlens.settings.config_source import Source

# The members that are used of what a factory of each kind makes: a user's own file may make anything.
_MEMBERS = {
    "dataset": ("train", "test", "classes", "mean", "std"),
    "augmentation": ("__call__",),
    "partition": ("ids", "indices", "offsets", "digest"),
    "algorithm": ("ops", "init", "round", "evaluate", "model"),
    "engine": ("open", "answer", "close"),
    "model": ("state_dict", "named_parameters"),
    "task": ("loss", "measure", "metrics"),
    "selection": ("cohort", "size"),
    "client rule": ("loss", "grad", "finish"),
    "aggregate": ("weighting", "exchange", "normalized", "ops"),
    "server step": ("init", "step"),
    "observer": ("round_done",),
}

# What a factory of each kind is called with, besides its settings. A model's is in `fedlens.models`.
_ARGUMENTS = {
    "dataset": ("root", "download", "seed"),
    "augmentation": ("input_shape",),
    "partition": ("table", "seed"),
    "algorithm": ("parts",),
    "engine": (),
    "task": (),
    "selection": (),
    "client rule": (),
    "aggregate": (),
    "server step": (),
    "observer": (),
}

# The kinds for which a setting that another one has is answered with the names of those.
_CHOSEN_BY_SETTING = ("engine", "algorithm", "partition")

_BASES = {
    "aggregate": "fedlens.aggregate.mean.Aggregate",
    "observer": "fedlens.Observer",
    "task": "fedlens.tasks.task.Task",
}


@dataclass(frozen=True)
class Resolved:
    """A factory that the settings name, and its checked settings.

    `key` is the table that they come from, such as `data.partition`; empty if there is no other table.
    """

    factory: Factory
    name: str
    settings: dict[str, Any]
    key: str
    kind: str
    locate: Locate
    by_keyword: Sequence[str] | None = None  # the arguments that the factory takes; None: all, by position
    shared: Preparation | None = None  # the checked keys that any factory of this kind has

    def __call__(self, *arguments: Any) -> Any:
        """The object that the factory makes. Raises `ConfigError` with the key, also if a user's own factory fails."""
        if self.by_keyword is None:
            return self.made(lambda: self.factory(*arguments, **self.settings))
        named = dict(zip(_ARGUMENTS[self.kind], arguments, strict=True))
        taken = {name: named[name] for name in self.by_keyword}
        return self.made(lambda: self.factory(**taken, **self.settings))

    def made(self, make: Callable[[], Any]) -> Any:
        """The result of `make`, which calls the factory; raises the same errors."""
        try:
            made = make()
        except ConfigError as error:
            raise located(error, self.key, self.locate) from error
        except FedlensError as error:
            if error.where is None and ":" in self.name:  # the user's own
                raise type(error)(error.what, where=place_of(self.factory), hint=error.hint) from error
            raise
        except Exception as error:
            raise self._fault(*self._failed(error)) from error
        if made is None:
            raise self._fault("returned None", hint=f"end it with: return the {self.kind}")
        if isinstance(made, type):
            raise self._fault(
                f"returned the class {made.__name__}", hint=f"return an object: {made.__name__}(...)"
            )
        have = offered(made, _MEMBERS[self.kind])
        for member in _MEMBERS[self.kind]:
            if member not in have:
                base = _BASES.get(self.kind)
                what = needed(self.kind, _MEMBERS[self.kind])
                hint = f"inherit from {base}" if base else f"it needs {what}" if what else None
                raise self._fault(f"returned a {type(made).__name__}, which has no '{member}'", hint)
        check_methods(made, self.kind, self.locate(_below(self.key, "name")))
        return made

    def _failed(self, error: Exception) -> tuple[str, str | None]:
        """What went wrong in the factory, and what to do about it."""
        if inspect.isabstract(self.factory):
            missing = sorted(methods(self.factory, ["__abstractmethods__"])["__abstractmethods__"])
            what = needed(self.kind, missing) or ", ".join(missing)
            old = [(was, name) for name in missing if (was := defined_as(self.factory, name))]
            hint = f"rename '{old[0][0]}': it is now '{old[0][1]}'" if old else "define it in the class"
            return f"is an abstract class: it does not define {what}", hint
        return f"failed: {told(error)}", None

    def _fault(self, what: str, hint: str | None = None) -> ConfigError:
        where = self.locate(_below(self.key, "name"))
        return ConfigError(f"the {self.kind} '{self.name}' {what}", where=where, hint=hint)

    @property
    def identity(self) -> tuple[Factory, str]:
        """What it makes depends on, besides its arguments: the factory and the settings, objects by their identity."""

        def named(value: Any) -> str:
            return f"{type(value).__name__} {id(value)}"

        return self.factory, json.dumps(self.settings, sort_keys=True, default=named)

    def table(self) -> dict[str, Any]:
        """The table with every setting filled in, as the run's config.toml has it."""
        shared = self.shared.model_dump(exclude_defaults=True) if self.shared is not None else {}
        return {"name": self.name, **self.settings, **shared}


def resolve(
    registry: Registry,
    table: Mapping[str, Any],
    key: str,
    source: Source,
    locate: Locate | None = None,
    shared: type[Preparation] | None = None,
) -> Resolved:
    """The factory that `table` names, with the table's other settings checked and filled in.

    Args:
        key: the table's key in the settings of `source`.
        locate: turns a key into the file and line, or the option, that sets it; by default `source.locate`.
        shared: keys that any factory of this kind has; a setting of the factory with the same name comes first.

    Raises `ConfigError` if the name or a setting is wrong.
    """
    locate = locate or source.locate
    name = table["name"]
    if callable(name):
        factory, name = registry.given(name)
    elif isinstance(name, str):
        factory = registry.find(name, where=locate(_below(key, "name")))
        file, _, attribute = name.rpartition(":")
        if file.endswith(".py"):
            # Written into the run's config.toml, so that it is found again from any directory.
            name = f"{Path(file).expanduser().resolve()}:{attribute}"
    else:
        where = locate(_below(key, "name"))
        raise ConfigError(f"the name of the {registry.kind} is {name!r}, but must be a string", where=where)
    arguments = _ARGUMENTS.get(registry.kind)
    at = locate(_below(key, "name"))
    by_keyword = None
    if arguments is not None:
        some = registry.kind in ("dataset", "partition", "augmentation")  # which may do without an argument
        by_keyword = accepted(factory, arguments, f"the {registry.kind} '{name}'", at, some)
    model = _settings_model(factory, name, locate(_below(key, "name")))
    values = {setting: value for setting, value in table.items() if setting != "name"}
    shared_fields = {} if shared is None else shared.model_fields
    apart = {n: v for n, v in values.items() if shared is not None and _is_shared(shared, model, n, v)}
    values = {n: v for n, v in values.items() if n not in apart}
    if key in source.renamed:
        # The recipe's settings belong to the thing that it named; those that the new one also has are kept.
        values = {
            setting: value
            for setting, value in values.items()
            if setting in model.model_fields or _below(key, setting) in source.overridden
        }
    # An infinite alpha is the prior itself (hsu2020 appendix B.1).
    finite = registry.kind != "partition"
    _refuse_positional(
        factory, values, model, f"the {registry.kind} '{name}'", lambda n: locate(_below(key, n))
    )
    thing = f"the {registry.kind} '{name}'"
    settings = _settings(model, values, key, thing, locate, finite, registry, tuple(shared_fields))
    checked = None
    if shared is not None:
        checked = shared(**_settings(shared, apart, key, thing, locate, finite, registry))
    return Resolved(factory, name, settings, key, registry.kind, locate, by_keyword, checked)


def _is_shared(shared: type[Preparation], model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a setting is one of `shared`, and not of the factory, whose settings are `model`."""
    if name not in shared.model_fields:
        return False
    declared = name in model.model_fields
    free = model.model_config.get("extra") == "allow" and not declared
    return shared.claims(name, value, free) if declared or free else True


def located(error: ConfigError, key: str, locate: Locate) -> ConfigError:
    """The same error with the file and line of the setting that it names. `key` is the setting's table."""
    name = error.where or ""
    full = name if name.partition(".")[0] in Config.model_fields else ".".join(filter(None, [key, name]))
    return ConfigError(error.what, where=locate(full) if full else None, hint=error.hint)


def _settings_model(factory: Factory, name: str, where: str) -> type[BaseModel]:
    try:
        return settings_model(factory)
    except Exception as error:
        raise ConfigError(
            f"the settings of '{name}' cannot be read from its signature: {type(error).__name__}: {error}",
            where=where,
            hint="a setting is a keyword-only parameter with a type: def make(parts, *, mu: float = 0.1)",
        ) from error


def _refuse_positional(
    factory: Factory, values: Mapping[str, Any], model: type[BaseModel], thing: str, locate: Locate
) -> None:
    """Raises `ConfigError` for a setting that is a parameter of the factory, but not keyword-only."""
    if isinstance(factory, OwnSettings):
        return
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    for name in values:
        parameter = parameters.get(name)
        if parameter is None or name in model.model_fields or parameter.default is parameter.empty:
            continue
        kind = type(parameter.default).__name__
        raise ConfigError(
            f"'{name}' of {thing} is not a setting, because it can be passed by position",
            where=locate(name),
            hint=f"make it keyword-only: *, {name}: {kind} = {parameter.default!r}",
        )


def _settings(
    model: type[BaseModel],
    values: Mapping[str, Any],
    key: str,
    thing: str,
    locate: Locate,
    finite: bool,
    registry: Registry,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    names = list(model.model_fields)
    if model.model_config.get("extra") == "allow":
        names += [name for name in values if name not in names]
    for name in values:
        if name not in names:
            hint = _with_setting(registry, name, key) if registry.kind in _CHOSEN_BY_SETTING else ""
            raise no_such_setting(name, locate(_below(key, name)), [*names, *others], thing, hint=hint)
    checked = validated(model, values, key, locate, lambda _: names)
    settings = {name: getattr(checked, name) for name in names}
    refuse_loose(values, settings, key, locate, finite=finite)
    return settings


def _with_setting(registry: Registry, setting: str, key: str) -> str:
    """A hint that names the factories with this setting; empty if none has it. `key` is the table's key."""
    names = [name for name in registry.entries if setting in settings_model(registry.find(name)).model_fields]
    if not names:
        return ""
    listed = ", ".join(f"'{name}'" for name in names)
    return f"{registry.kind}s with it: {listed}; add --set {_below(key, 'name')}={names[0]}"


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
