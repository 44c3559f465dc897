"""Checks functions and objects of a user's own: the arguments and members that fedlens uses. No import of torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, defined_as

OP = ("payload", "client", "rng")
# The methods that are called of what a factory of each kind makes, and their arguments.
METHODS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "algorithm": {
        "init": ("model", "federation"),
        "round": ("state", "ctx"),
        "evaluate": ("state", "ctx"),
        "model": ("state",),
    },
    "selection": {"cohort": ("ctx",), "size": ("federation",)},
    "aggregate": {
        "init": ("weights", "federation"),
        "aggregate": ("answers", "fields", "ctx"),
        "exchange": ("ask", "fields", "ctx"),
        "reduce": ("cohort", "fields"),
    },
    "server step": {
        "init": ("weights",),
        "step": ("weights", "update", "state"),
        "step_in_place": ("weights", "update", "state"),
    },
    "engine": {"open": ("program", "states"), "answer": ("ask", "round", "exchange"), "close": ()},
    "augmentation": {"__call__": ("images", "targets", "generator")},
    "observer": {
        "started": ("plan",),
        "restore": ("part",),
        "began": ("run",),
        "asks": ("steps", "phase", "round", "state"),
        "working": ("work",),
        "answered": ("ask", "answer", "work"),
        "released": ("round", "state", "tally"),
        "failed": ("round", "tally"),
        "evaluated": ("round", "state", "tally", "metrics"),
        "round_done": ("state", "tally", "metrics"),
        "rows": ("state", "tally", "metrics"),
        "part": (),
        "saved": ("round", "checkpoint"),
        "ended": ("metrics", "states"),
        "note": ("text",),
        "problem": ("text",),
        "finished": ("summary",),
        "summary": (),
    },
}


def check_signature(
    function: Any, arguments: Sequence[str], who: str, where: str | None = None, name: str | None = None
) -> None:
    """Raises `ConfigError` if `function` cannot be called with so many positional arguments.

    Args:
        function: the function; one whose signature Python does not know is accepted.
        arguments: what it is called with, in words.
        who: what errors call it.
        where: where it is set.
        name: its name in the corrected `def` line; by default its own.

    >>> def grad(g, w): return g
    >>> check_signature(grad, ["gradients", "parameters", "context"], "`grad` of MyRule")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: `grad` of MyRule (...) takes (g, w), and fedlens calls it with (gradients, ...
    """
    place = place_of(function)
    who = f"{who} ({place})" if place is not None else who
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(
            f"{who} is a {kind}, and must be a function", where=where, hint=_line(None, arguments, name)
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        takes = ", ".join(str(parameter) for parameter in _bare(signature))
        raise ConfigError(
            f"{who} takes ({takes}), and fedlens calls it with ({', '.join(arguments)})",
            where=where,
            hint=_line(function, arguments, name),
        ) from None


def accepted(
    factory: Any, arguments: Sequence[str], who: str, where: str | None = None, some: bool = True
) -> Sequence[str] | None:
    """Which of these arguments a factory is called with by keyword; None if it takes all of them by position.

    With `some`, a factory whose positional parameters are named like some of the arguments gets those, by keyword.
    Raises `ConfigError` for any other.

    >>> accepted(lambda table, seed, *, most=3: 0, ["table", "seed"], "it") is None
    True
    >>> accepted(lambda seed: 0, ["table", "seed"], "it"), accepted(lambda: 0, ["table", "seed"], "it")
    (['seed'], [])
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if variable or len([p for p in own if p.default is p.empty]) <= len(arguments) <= len(own):
        return None
    names = [p.name for p in own]
    if some and len(own) < len(arguments) and set(names) <= set(arguments):
        return names
    place = place_of(factory)
    takes = ", ".join(str(p) for p in _bare(inspect.signature(factory)) if p.kind is not p.KEYWORD_ONLY)
    with_these = f"({', '.join(arguments)})" if arguments else "no positional argument"
    name = name_of(factory).rpartition(".")[2]
    raise ConfigError(
        f"{who}{f' ({place})' if place else ''} takes ({takes}), and fedlens calls it with {with_these}, and with "
        "settings by keyword",
        where=where,
        hint=f"write: def {name}({', '.join([*arguments, '*', 'setting: float = 0.1'])})",
    )


def needed(kind: str, names: Sequence[str]) -> str | None:
    """The methods that things of this kind need, in words; None where they are not all known."""
    known = METHODS.get(kind, {})
    if not set(names) <= set(known):
        return None
    return " and ".join(f"{name}({', '.join(known[name])})" for name in names)


def check_methods(thing: object, kind: str, where: str | None = None) -> None:
    """Raises `ConfigError` if a method of `thing` cannot be called as things of this kind are; see `METHODS`.

    A method under its name of an earlier version would never be called, and is an error too.
    """
    expected = METHODS.get(kind, {})
    for name in expected:
        if was := defined_as(type(thing), name):
            what = f"the {kind} {type(thing).__name__} defines `{was}`, which is now `{name}`"
            raise ConfigError(what, where=where, hint="rename it")
    for name, method in methods(thing, expected).items():
        check_signature(method, expected[name], f"`{name}` of the {kind} {type(thing).__name__}", where, name)


def _bare(signature: inspect.Signature) -> Sequence[inspect.Parameter]:
    return [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]


def _line(function: Any, arguments: Sequence[str], name: str | None) -> str:
    """The corrected first line of a function."""
    plain = function_of(function)
    if name is None and name_of(plain).endswith("<lambda>"):
        return f"write: lambda {', '.join(arguments)}: result"
    names = (["self"] if inspect.ismethod(plain) else []) + list(arguments)
    return f"write: def {name or name_of(plain).rpartition('.')[2]}({', '.join(names)})"


def function_of(function: Any) -> Any:
    """The function itself, without the arguments that `functools.partial` fixes."""
    while isinstance(function, partial):
        function = function.func
    return function


def place_of(function: Any) -> str | None:
    """The file and line of a function; None if it is not written in Python."""
    plain = inspect.unwrap(function_of(function)) if callable(function) else None
    plain = plain.__func__ if inspect.ismethod(plain) else plain
    code = plain.__code__ if inspect.isfunction(plain) else None
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code is not None else None


def name_of(function: Any) -> str:
    """What errors call a function: its qualified name.

    >>> name_of(partial(max, 1)), name_of(place_of)
    ('max', 'place_of')
    """
    plain = function_of(function)
    known = isinstance(plain, type) or inspect.isroutine(plain)
    name: str = plain.__qualname__ if known else type(plain).__qualname__
    return name


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
