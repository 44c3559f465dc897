"""Checks objects that a user's own file has made against the members that fedlens uses. No import of torch."""

from __future__ import annotations

from collections.abc import Iterable

from fedlens.core.errors import ConfigError


def offered(thing: object, names: Iterable[str]) -> list[str]:
    """Those of `names` that are members of `thing`.

    For objects of a user's own file, which may be of any class. What fedlens's own classes have is declared.

    >>> offered("text", ["upper", "open"])
    ['upper']
    """
    return [name for name in names if hasattr(thing, name)]


def refuse_undeclared(thing: object, kind: str, base: type, least: type) -> None:
    """Raises `ConfigError` if `thing` has a member that `base` adds to `least`, and does not inherit from `base`.

    Such a member would never be called: only subclasses of `base` are asked for more than `least` has.
    """
    undeclared = offered(thing, [name for name in vars(base) if name[0] != "_" and name not in vars(least)])
    if undeclared:
        raise ConfigError(
            f"the {kind} {type(thing).__name__} has '{undeclared[0]}', which is only used if its class inherits from "
            f"{base.__name__}",
            where=f"{kind}.name",
            hint=f"inherit from {base.__module__}.{base.__name__}, or rename '{undeclared[0]}'",
        )
