"""One sentence for a wrong setting: what is wrong, where it stands, what to write instead. No import of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fedlens.core.errors import ConfigError, nearest
from fedlens.experiment.config_source import NOT_SET

Locate = Callable[[str], str]

_SHOULD = re.compile(r"input should be (?:a |an )?(.*?)(?:, (?:unable|got|but) .*)?", re.IGNORECASE)
_PLAINER = {
    "valid integer": "a whole number",
    "valid number": "a number",
    "finite number": "a finite number",
    "valid boolean": "true or false",
    "valid string": "a word",
    "valid dictionary": "a table",
    "valid list": "a list",
    "valid tuple": "a list",
}


def explained(
    error: ValidationError,
    values: Mapping[str, Any],
    key: str,
    locate: Locate,
    known: Callable[[str], list[str]],
) -> ConfigError:
    """The fault of a pydantic error that says most, as one sentence.

    Args:
        values: what was checked.
        key: where that stands, such as `data.partition`; empty for the whole of the settings.
        locate: turns a key into where a person finds it.
        known: the settings that there are in a table, by its key below `key`.
    """
    faults = error.errors()
    # A misspelled key that is required is also missing: what was written says more than what was not.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    path = _path(first["loc"], values)
    full = ".".join(filter(None, [key, *path]))
    last = path[-1] if path else key.rpartition(".")[2]
    if first["type"] == "extra_forbidden":
        return no_such_setting(last, locate(full), known(".".join(path[:-1])))
    if first["type"] == "missing" and len(path) == len(first["loc"]):
        return ConfigError(
            f"the setting '{last}' is missing",
            where=locate(full).removesuffix(NOT_SET),  # said already
            hint=f"write it there, or say --set {full}=VALUE",
        )
    value = _at(values, path)
    messages = [fault["msg"] for fault in faults if _path(fault["loc"], values) == path]
    told = _told(messages, first["loc"][len(path) :])
    what = f"'{last}' is {_shown(value)}, and {told}"
    if isinstance(value, Mapping):
        what = told.replace("the table", f"the table [{full}]", 1)
    return ConfigError(what, where=locate(full), hint=_meant(value, messages))


def no_such_setting(name: str, where: str, known: list[str], thing: str = "") -> ConfigError:
    """What to say of a key that there is not.

    >>> print(no_such_setting("alpha", "my.toml, line 3: data.partition.alpha", ["clients"], "the partition 'iid'"))
    the partition 'iid' has no setting 'alpha' (my.toml, line 3: data.partition.alpha); known: clients.
    """
    what = f"{thing} has no setting '{name}'" if thing else f"there is no setting '{name}' here"
    return ConfigError(what, where=where, hint=nearest(name, known) if known else "it has none: take it out")


def refuse_loose(values: Mapping[str, Any], checked: Any, key: str, locate: Locate, *, finite: bool) -> None:
    """Raises `ConfigError` for `true` where a number is wanted, and with `finite` for a number that is not finite."""
    for name, value in values.items():
        full = ".".join(filter(None, [key, name]))
        read = checked.get(name) if isinstance(checked, Mapping) else getattr(checked, name, None)
        if isinstance(value, bool) and isinstance(read, int | float) and not isinstance(read, bool):
            raise ConfigError(f"'{name}' is {_shown(value)}, and has to be a number", where=locate(full))
        if finite and isinstance(read, float) and not math.isfinite(read):
            raise ConfigError(f"'{name}' is {read}, and has to be a finite number", where=locate(full))
        if isinstance(value, Mapping) and isinstance(read, BaseModel):
            refuse_loose(value, read, full, locate, finite=finite)


def _path(location: tuple[int | str, ...], values: Any) -> list[str]:
    """The keys of a location; what pydantic adds to it below a value (an index, a branch of a union) is left out."""
    path: list[str] = []
    for part in location:
        if not isinstance(values, Mapping):
            break
        path.append(str(part))
        values = values.get(part)
    return path


def _at(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _told(messages: list[str], rest: tuple[int | str, ...]) -> str:
    wanted, others = [], []
    for message in messages:
        match = _SHOULD.fullmatch(message.partition(" or instance of ")[0])
        if match:
            wanted.append(_PLAINER.get(match[1], match[1]))
        else:
            others.append(message.removeprefix("Value error, "))
    index = next((part for part in rest if isinstance(part, int)), None)
    if wanted:
        part = f"number {index + 1} in it has" if index is not None else "has"
        return f"{part} to be {' or '.join(dict.fromkeys(wanted))}"
    if others[0] == "Field required":
        return "has too few numbers in it"
    other = re.sub(r"^(List|String|Tuple) should have", "has to have", others[0]).replace(
        " after validation", ""
    )
    return other[0].lower() + other[1:]


def _shown(value: Any) -> str:
    """A value as it stands in TOML."""
    return {"True": "true", "False": "false"}.get(repr(value), repr(value))


def _meant(value: Any, messages: list[str]) -> str | None:
    """The nearest of the words that would have been right, if one is near."""
    words = [
        word for message in messages for word in re.findall(r"'([^']*)'", message) if "should be" in message
    ]
    if not isinstance(value, str) or not words:
        return None
    hint = nearest(value, words)
    return hint if hint.startswith("did you mean") else None
