"""One sentence for a wrong setting: what is wrong, where it stands, what to write instead. No import of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedlens.base.errors import ConfigError, list_example, nearest, needs_list, option_example
from fedlens.base.shell_command import shell_command

NOT_SET = ", which is not set there"
RECIPE = "recipe "  # what the place of a key in an installed recipe begins with
RENAMED = {"evaluation.beside": "evaluation.overlap"}  # settings of earlier versions, and what they are now

Locate = Callable[[str], str]
M = TypeVar("M", bound=BaseModel)

_SHOULD = re.compile(r"input should be (?:a |an )?(.*?)(?:, (?:unable|got|but) .*)?", re.IGNORECASE)
_SHOWN = 80  # characters of a value
_NEAR = "did you mean"
_MISSPELLED = 0.8  # similarity of two names, of 1
_LARGEST_INT = 2**63 - 1
_LARGEST_FLOAT = 3.4028234663852886e38  # of 32 bits, in which models are trained
_PLAINER = {
    "valid integer": "a whole number",
    "valid number": "a number",
    "finite number": "a finite number",
    "valid boolean": "true or false",
    "valid string": "a string",
    "valid dictionary": "a table",
    "valid list": "a list",
    "valid tuple": "a list",
}
_BOUNDS = {"greater than or equal to": "at least", "less than or equal to": "at most"}


def validated(
    model: type[M],
    values: Mapping[str, Any],
    key: str,
    locate: Locate = str,
    known: Callable[[str], list[str]] | None = None,
    elsewhere: Callable[[str], list[str]] = lambda name: [],
    strict: bool | None = None,
) -> M:
    """The checked values; the arguments are those of `explained`. Raises the `ConfigError` that it returns."""
    try:
        return model.model_validate(dict(values), strict=strict)
    except ValidationError as error:
        known = known or (lambda table: fields_at(model, table))
        raise explained(error, values, key, locate, known, elsewhere, model.model_fields) from None


def fields_at(model: type[BaseModel], table: str) -> list[str]:
    """The settings of a table below a model, by its key, such as `data.partition`; empty for one of a named thing."""
    for part in table.split(".") if table else ():
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        tables = [each for each in (annotation, *get_args(annotation)) if _is_table(each)]
        if not tables:
            return []
        model = tables[0]
    return list(model.model_fields)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def explained(
    error: ValidationError,
    values: Mapping[str, Any],
    key: str,
    locate: Locate,
    known: Callable[[str], list[str]],
    elsewhere: Callable[[str], list[str]] = lambda name: [],
    fields: Mapping[str, FieldInfo] = MappingProxyType({}),
) -> ConfigError:
    """The most telling part of a pydantic error, as one sentence.

    Args:
        values: the checked values.
        key: their table, such as `data.partition`; empty for all settings.
        locate: turns a key into its file and line, or the option that sets it.
        known: the settings of a table, by its key below `key`.
        elsewhere: the full keys of settings of this name in other tables.
        fields: the settings of the table, for examples of values.
    """
    faults = error.errors()
    # A misspelled key that is required is also missing: what was written says more than what was not.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    path = _path(first["loc"], values)
    full = ".".join(filter(None, [key, *path]))
    last = path[-1] if path else key.rpartition(".")[2]
    if first["type"] == "extra_forbidden" and full in RENAMED:
        what = f"the setting '{full}' is now '{RENAMED[full]}'"
        return ConfigError(what, where=locate(full), hint="write the new name")
    if first["type"] == "extra_forbidden":
        names, above = known(".".join(path[:-1])), full.removesuffix(last)
        below = [f"{above}{name}.{last}" for name in names if last in known(".".join([*path[:-1], name]))]
        return no_such_setting(last, locate(full), names, others=below or elsewhere(last))
    if first["type"] == "missing" and len(path) == len(first["loc"]):
        where = locate(full).removesuffix(NOT_SET)  # said already
        name = where.removeprefix(RECIPE).partition(",")[0]
        other = f"copy the recipe and edit it: {shell_command('show', name)} > my.toml"
        example = option_example(full, fields[last].annotation if last in fields else None)
        hint = f"pass {example}" if where.startswith("--set") else f"add it there, or pass {example}"
        if where.startswith(RECIPE):
            hint = f"add {example}, or {other}"
        return ConfigError(f"the setting '{last}' is missing", where=where, hint=hint)
    value = _at(values, path)
    messages = [fault["msg"] for fault in faults if _path(fault["loc"], values) == path]
    told = _told(messages, first["loc"][len(path) :])
    what = f"'{last}' is {_shown(value)}, but {told}"
    if isinstance(value, Mapping) and (first["type"] == "value_error" or "the table" in told):
        what = told.replace("the table", f"the table [{full}]", 1)
    place, meant = locate(full), _meant(value, messages)
    here = [fault["type"] for fault in faults if _path(fault["loc"], values) == path]
    if meant is None and path and needs_list(value, here):
        option = place.startswith("--set")
        meant = list_example(full if option else last, value, option)
    return ConfigError(what, where=place, hint=meant)


def no_such_setting(
    name: str, where: str, known: list[str], thing: str = "", others: Sequence[str] = (), hint: str = ""
) -> ConfigError:
    """The error for an unknown key.

    Args:
        known: the settings of its table.
        thing: what the table belongs to.
        others: full keys of this name, which come before names of `known` that are not close; one without a table is
            outside of all tables.
        hint: what to say instead of the known settings if none is near.

    >>> print(no_such_setting("alpha", "my.toml, line 3: data.partition.alpha", ["clients"], "the partition 'iid'"))
    the partition 'iid' has no setting 'alpha' (my.toml, line 3: data.partition.alpha); known: clients.
    """
    what = f"{thing} has no setting '{name}'" if thing else f"unknown setting '{name}'"
    near = nearest(name, known) if known else "it has no settings: remove it"
    # The same name in another table is nearer than any name in this one but a misspelled one.
    if others and not get_close_matches(name, known, 1, _MISSPELLED):
        listed = [f"'{key}'" if "." in key else f"'{key}' outside of any table" for key in others]
        near = f"{_NEAR} {' or '.join(listed)}"
    elif not near.startswith(_NEAR):
        near = hint or near
        if thing and name != "name" and nearest(name, ["name"]).startswith(_NEAR):
            near = f"{_NEAR} 'name'"
    return ConfigError(what, where=where, hint=near)


def refuse_loose(values: Mapping[str, Any], checked: Any, key: str, locate: Locate, *, finite: bool) -> None:
    """Raises `ConfigError` for `true` in place of a number, and for numbers that no computation can use.

    These are whole numbers beyond 64 bits and, with `finite`, those that are not finite or beyond 32-bit floats.
    """
    for name, value in values.items():
        full = ".".join(filter(None, [key, name]))
        read = checked.get(name) if isinstance(checked, Mapping) else getattr(checked, name, None)
        if isinstance(value, bool) and isinstance(read, int | float) and not isinstance(read, bool):
            raise ConfigError(f"'{name}' is {_shown(value)}, but must be a number", where=locate(full))
        if finite and isinstance(read, float) and not math.isfinite(read):
            raise ConfigError(f"'{name}' is {read}, but must be a finite number", where=locate(full))
        for number in _numbers(read):
            most: float | None = None
            if isinstance(number, int) and abs(number) > _LARGEST_INT:
                most = _LARGEST_INT
            elif finite and isinstance(number, float) and _LARGEST_FLOAT < abs(number) < math.inf:
                most = _LARGEST_FLOAT
            if most is not None:
                limit = f"{most:.2g}, the largest 32-bit float" if isinstance(most, float) else str(most)
                bound = f"at most {limit}" if number > 0 else f"at least -{limit}"
                raise ConfigError(f"'{name}' is {_shown(number)}, but must be {bound}", where=locate(full))
        if isinstance(value, Mapping) and isinstance(read, BaseModel):
            refuse_loose(value, read, full, locate, finite=finite)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


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
            text = _PLAINER.get(match[1], match[1])
            for words, plain in _BOUNDS.items():
                text = text.replace(words, plain)
            wanted.append(text)
        else:
            others.append(message.removeprefix("Value error, "))
    index = next((part for part in rest if isinstance(part, int)), None)
    if wanted:
        part = f"number {index + 1} in it must" if index is not None else "must"
        return f"{part} be {' or '.join(dict.fromkeys(wanted))}"
    if others[0] == "Field required":
        return "must contain more numbers"
    if "exceeded maximum size" in others[0]:
        return f"must be a whole number of at most {_LARGEST_INT}"
    if others[0].startswith("String should match pattern"):
        return "it contains a character that is not allowed here, or has the wrong form"
    other = re.sub(r"^(List|String|Tuple) should have", "must have", others[0]).replace(
        " after validation", ""
    )
    return other[0].lower() + other[1:]


def _shown(value: Any) -> str:
    """A value as it is written in TOML, shortened."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        return f"a number of {value.bit_length()} bits"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _meant(value: Any, messages: list[str]) -> str | None:
    """The nearest of the words that would have been right, if one is near; for an object, what to pass instead."""
    words = [
        word for message in messages for word in re.findall(r"'([^']*)'", message) if "should be" in message
    ]
    if not isinstance(value, str | int | float | list | tuple | Mapping | None):
        return f"pass a function that returns it, or the class, instead of the {type(value).__name__} itself"
    if not isinstance(value, str) or not words:
        return None
    hint = nearest(value, words)
    return hint if hint.startswith("did you mean") else None
