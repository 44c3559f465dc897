"""Fields of what clients are asked: texts, lists, rows and mappings, which replies do not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class AnyField(Protocol):
    """A field of a payload."""

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        ...


@dataclass(frozen=True)
class TextField:
    """One of these texts.

    >>> TextField(("@server",)).fault("sender", "@test")
    "sender is not '@server'"
    """

    texts: tuple[str, ...]

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        fits = isinstance(value, str) and value in self.texts
        return None if fits else f"{name} is not {' or '.join(map(repr, self.texts))}"


@dataclass(frozen=True)
class SizedField:
    """Any text, or any bytes, of `least` to `most` characters or bytes.

    >>> SizedField(bytes, most=16, least=16).fault("nonce", b"")
    'nonce has a size of 0, outside [16, 16]'
    """

    kind: type[str] | type[bytes]
    most: int
    least: int = 0

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if not isinstance(value, self.kind):
            return f"{name} is {type(value).__name__}, not {self.kind.__name__}"
        fits = self.least <= len(value) <= self.most
        return None if fits else f"{name} has a size of {len(value)}, outside [{self.least}, {self.most}]"


@dataclass(frozen=True)
class ListField:
    """A list of `least` to `most` values, each of which fits one field.

    >>> from fedlens.core.schema import NumberField
    >>> ListField(NumberField(above=0), most=2).fault("to", [1, 0])
    'to[1] is 0, outside (0, inf]'
    """

    each: AnyField
    most: int
    least: int = 0

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if not isinstance(value, list | tuple):
            return f"{name} is {type(value).__name__}, not a list"
        if not self.least <= len(value) <= self.most:
            return f"{name} has {len(value)} items, outside [{self.least}, {self.most}]"
        faults = (self.each.fault(f"{name}[{at}]", item) for at, item in enumerate(value))
        return next((fault for fault in faults if fault is not None), None)


@dataclass(frozen=True)
class RowField:
    """A list with one value for each of these fields, in their order.

    >>> RowField((TextField(("a",)),)).fault("row", [])
    'row has 0 items where 1 are expected'
    """

    fields: tuple[AnyField, ...]

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if not isinstance(value, list | tuple):
            return f"{name} is {type(value).__name__}, not a list"
        if len(value) != len(self.fields):
            return f"{name} has {len(value)} items where {len(self.fields)} are expected"
        pairs = enumerate(zip(self.fields, value, strict=True))
        faults = (field.fault(f"{name}[{at}]", item) for at, (field, item) in pairs)
        return next((fault for fault in faults if fault is not None), None)


@dataclass(frozen=True)
class GroupField:
    """A mapping with exactly these fields.

    >>> GroupField({}).fault("statistics", {"m": 1.0})
    "statistics has other names than []: ['m']"
    """

    fields: Mapping[str, AnyField]

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if not isinstance(value, Mapping):
            return f"{name} is {type(value).__name__}, not a mapping"
        if value.keys() != self.fields.keys():
            return f"{name} has other names than {sorted(self.fields)}: {sorted(map(str, value))}"
        faults = (field.fault(f"{name}.{key}", value[key]) for key, field in self.fields.items())
        return next((fault for fault in faults if fault is not None), None)
