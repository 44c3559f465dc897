"""Checks objects that a user's own file has made against the members that fedlens uses. No import of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedlens.base.errors import ConfigError


def offered(thing: object, names: Iterable[str]) -> list[str]:
    """Those of `names` that are members of `thing`.

    For objects of a user's own file, which may be of any class. What fedlens's own classes have is declared.

    >>> offered("text", ["upper", "open"])
    ['upper']
    """
    # A property of the class is not computed: it may need the real model.
    return [name for name in names if hasattr(type(thing), name) or hasattr(thing, name)]


def methods(thing: object, names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that are members of `thing`, with what they are.

    >>> list(methods("text", ["upper", "open"]))
    ['upper']
    """
    return {name: getattr(thing, name) for name in offered(thing, names)}


def follows_device(component: object, methods: Iterable[str]) -> bool:
    """Whether the class of a component of the server declares that these methods compute where their inputs are.

    The declaration is a class attribute `follows_device`: they make no tensor on the processor to mix with their
    inputs, and convert none to NumPy. A subclass that overrides one of them declares it anew.

    >>> class Sum: follows_device = True; aggregate = sum
    >>> class Own(Sum): aggregate = max
    >>> follows_device(Sum(), ["aggregate"]), follows_device(Own(), ["aggregate"])
    (True, False)
    """
    for kind in type(component).__mro__:
        if "follows_device" in vars(kind):
            return bool(vars(kind)["follows_device"])
        if any(method in vars(kind) for method in methods):
            return False
    return False


def offers_all(thing: object, kind: str, base: type, least: type) -> bool:
    """Whether `thing` has what `base` adds to `least`: it inherits from `base`, or forwards to an object that does.

    Raises `ConfigError` if it has some of these members and not all, since they would never be called.
    """
    if isinstance(thing, base):
        return True
    names = [name for name in vars(base) if name[0] != "_" and name not in vars(least)]
    undeclared = offered(thing, names)
    if len(undeclared) == len(names):
        return True
    if undeclared:
        raise ConfigError(
            f"the {kind} {type(thing).__name__} has '{undeclared[0]}', which is only used if its class inherits from "
            f"{base.__name__}",
            where=f"{kind}.name",
            hint=f"inherit from {base.__module__}.{base.__name__}, or rename '{undeclared[0]}'",
        )
    return False
