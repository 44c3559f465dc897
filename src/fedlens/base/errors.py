"""Errors that a user can cause, each a sentence that says what, where and what to do."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from fedlens.base.interrupts import from_code
from fedlens.base.shell_command import inline_toml, setting

_LISTED = 3_000  # characters of a list of names
_READ, _SHOWN = 10_000, 200  # characters of a message of a user's exception
_LIST_TYPES = {"list_type", "tuple_type"}  # pydantic's names of the fault
_FEDLENS = str(Path(__file__).parent.parent)
_LIBRARY = str(Path(difflib.__file__).parent)  # Python's own
RENAMED = {
    "Aggregate.fold": "aggregate",
    "Bound.whole": "integer",
    "LocalProblem.whole_batches": "drop_last",
    "Table.whole": "full_identity",
    "client_evaluation.OP": "EVALUATE_OWN",
    "ClientRule.looks": "references",
    "ClientRule.servers": "server_rules",
    "Traits.replaces": "replaces_update",
    "Traits.whole": "all_weights",
    "ClientDataSource.holder": "data_of",
    "Reply.folded": "reduced",
    "Failure.folded": "reduced",
    "Outcome.given": "donated",
    "Reply.given": "donated",
    "Update.given": "donated",
    "ServerSGD.step_given": "step_in_place",
}  # names of earlier versions by their module, class or function, and what they are now
MOVED = {
    "aggregate.one_function": "aggregate.custom",
    "core.errors": "base.errors",
    "core.box_batch": "vision.box_batch",
    "core.change": "vision.change",
    "core.detector": "vision.detector",
    "core.moved_targets": "vision.moved_targets",
    "data.augmented": "data.augmentation.augmented",
    "data.mosaic": "data.augmentation.mosaic",
    "data.scale_crop": "data.augmentation.scale_crop",
    "experiment": "settings, run, observers and use",
    "report": "pages and results",
}  # public modules of earlier versions, and where they are now
_MISSING = (
    r"cannot import name '(?P<name>\w+)' from '(?:\w+\.)*(?P<of>\w+)'",
    r"(?P<of>\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(?P<name>\w+)'",
    r"'(?P<of>\w+)' object has no attribute '(?P<name>\w+)'",
)


class FedlensError(Exception):
    """Base class of errors: a request that cannot be carried out.

    Args:
        what: what is wrong, as a sentence without a full stop.
        where: the file, key or line where it is wrong.
        hint: what to do about it.

    The command line prints it without a traceback and exits with `exit_code`.

    >>> print(FedlensError("alpha is -1, but must be at least 0", where="data.partition.alpha", hint="take 0.1"))
    alpha is -1, but must be at least 0 (data.partition.alpha); take 0.1.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = _without_stop(what)
        self.where = where
        self.hint = _without_stop(hint) if hint else None
        place = f" ({where})" if where else ""
        if "\n" in self.what:  # a list: each line is a sentence
            text = f"{self.what}{place}." + (f"\n{self.hint[0].upper()}{self.hint[1:]}." if self.hint else "")
        else:
            text = f"{self.what}{place}{f'; {self.hint}' if self.hint else ''}"
            text += "" if text.endswith("...") else "."
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would rebuild the error from its finished text and lose the parts.
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _without_stop(sentence: str) -> str:
    return sentence if sentence.endswith("...") else sentence.rstrip(".")


class ConfigError(FedlensError):
    """A setting that is unknown, of the wrong type, or out of range."""


class DataError(FedlensError):
    """Data that are missing, truncated or corrupt."""


class DecodingError(DataError):
    """Bytes that are no payload: damaged, forged, or more than the reader accepts."""


class IdentityError(FedlensError):
    """A key, a certificate, an invitation or a signature that is refused, or a file of secrets that others can read."""


class RunDirectoryError(FedlensError):
    """A run directory that exists already, is not one, or cannot be read."""


class RunFailed(FedlensError):
    """A run that started and could not continue; its directory contains the reason."""

    exit_code = 1


class HookError(RunFailed):
    """A function of the user's own breaks a rule that every engine counts on; it ends the run at once.

    For example a hook that changes its inputs, or that returns nothing. It is not a failure of one client.
    """


class RoundRefused(RunFailed):
    """The aggregate returned a `Refusal` in place of an update; the server state stays that before the round."""


def _rebuild(kind: type[FedlensError], what: str, where: str | None, hint: str | None) -> FedlensError:
    return kind(what, where=where, hint=hint)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest right name, first without regard to case, and otherwise all of them.

    >>> nearest("fedproxy", ["fedavg", "fedavgm", "fedprox"])
    "did you mean 'fedprox'"
    >>> nearest("AdamW", ["adam", "adamw"])
    "did you mean 'adamw'"
    >>> nearest("x", ["fedavg", "fedprox"])
    'known: fedavg, fedprox'
    """
    names = sorted(known)
    close = [known for known in names if known.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'"
    shown, length = 0, 0
    while shown < len(names) and length < _LISTED:
        length += len(names[shown]) + 2
        shown += 1
    more = f", and {len(names) - shown} more" if shown < len(names) else ""
    return f"known: {', '.join(names[:shown])}{more}"


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what running out of memory looks like, on a GPU or not.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("can't allocate memory")), out_of_memory(KeyError())
    (True, True, False)
    """
    import torch  # the command line reads this module without it

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text_of(
        error
    )


def told(error: BaseException) -> str:
    """An exception in one line, with the place in a user's code that was nearest to it, if there is one."""
    place = own_place(error)
    where = f" ({place})" if place else ""
    text = next(iter(text_of(error).splitlines()), "")
    said = f"{': ' if text else ''}{one_line(text)}{renamed(error)}{one_line(where)}"
    return f"{one_line(type(error).__name__)}{said}"


def own_place(error: BaseException) -> str | None:
    """The last place of a traceback that is in a file of the user's own: `bad.py, line 34`; None if there is none.

    >>> import json
    >>> try:
    ...     json.loads("{")
    ... except ValueError as error:  # it is raised in the standard library
    ...     own_place(error.with_traceback(error.__traceback__.tb_next))
    """
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [
        p for p in places if "site-packages" not in p[0] and not p[0].startswith((_FEDLENS, _LIBRARY, "<"))
    ]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else None


def renamed(error: BaseException) -> str:
    """What to write, if an error is about a name of an earlier version; empty for any other error.

    >>> renamed(ImportError("cannot import name 'OP' from 'fedlens.algorithms.client_evaluation'"))
    "; 'OP' is now 'EVALUATE_OWN'"
    >>> renamed(ModuleNotFoundError("No module named 'fedlens.core.errors'", name="fedlens.core.errors"))
    "; 'fedlens.core.errors' is now 'fedlens.base.errors'"
    >>> class Aggregate: ...
    >>> class Mine(Aggregate): ...
    >>> renamed(AttributeError("'Mine' object has no attribute 'fold'", name="fold", obj=Mine()))
    "; 'fold' is now 'aggregate'"
    """
    if isinstance(error, ModuleNotFoundError):
        old = str(error.name).removeprefix("fedlens.")
        return f"; '{error.name}' is now 'fedlens.{MOVED[old]}'" if old in MOVED else ""
    if isinstance(error, ImportError | AttributeError | TypeError):
        for form in _MISSING:
            found = re.search(form, text_of(error))
            if found is None:
                continue
            owners = type(error.obj).__mro__ if isinstance(error, AttributeError) else ()
            for of in (found["of"], *(base.__name__ for base in owners)):
                if new := RENAMED.get(f"{of}.{found['name']}"):
                    return f"; '{found['name']}' is now '{new}'"
    return ""


def defined_as(kind: Any, name: str) -> str | None:
    """The name of an earlier version under which a class defines the method `name`; None if it does not.

    >>> class Aggregate: ...
    >>> class Sum(Aggregate): fold = sum
    >>> defined_as(Sum, "aggregate"), defined_as(Aggregate, "aggregate")
    ('fold', None)
    """
    owners = {base.__name__ for base in kind.__mro__}
    for old, new in RENAMED.items():
        owner, _, was = old.rpartition(".")
        if new == name and owner in owners and was in dir(kind):
            return was
    return None


def text_of(error: BaseException) -> str:
    """The first 10,000 characters of an exception's message, which need not exist: its `__str__` may raise.

    >>> class Mute(Exception):
    ...     def __str__(self) -> str:
    ...         raise RuntimeError
    >>> text_of(Mute())
    '(its message cannot be read)'
    """
    try:
        return str(error)[:_READ]
    except KeyboardInterrupt as stop:
        if not from_code(stop):
            raise
    except BaseException:  # whatever the code of a user raises
        pass
    return "(its message cannot be read)"


def one_line(text: str) -> str:
    """A text of a user's code for a message: its first 200 characters, with control characters escaped.

    >>> one_line("red \\x1b[31m" + 500 * "!")[:22], len(one_line(500 * "!"))
    ('red \\\\x1b[31m!!!!!!!!!!', 203)
    """
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in short)


def option_example(key: str, type: object = None) -> str:
    """The option that sets a setting which is missing, with an example if a list of texts is needed.

    >>> print(option_example("rounds"), option_example("classes", list[str]))
    --set rounds=VALUE --set 'classes=["a", "b"]'
    """
    return f"--set {shlex.quote(setting(key, ['a', 'b']))}" if type == list[str] else f"--set {key}=VALUE"


def needs_list(value: object, faults: Iterable[str]) -> bool:
    """Whether a single value is given where only a list is valid, from the types of pydantic's faults."""
    return isinstance(value, str | int | float) and set(faults) <= _LIST_TYPES


def list_example(key: str, value: object, option: bool = True) -> str:
    """A hint that writes `value`, given where a list is needed, as a list; `option` is whether after `--set`.

    >>> print(list_example("classes", "road, tree"))
    write a list, e.g. --set 'classes=["road", "tree"]'
    >>> list_example("classes", "[a,b]", option=False)
    'write a list, e.g. classes = ["a", "b"]'
    """
    text = str(value).strip("[]() ")
    parts = [part.strip(" '\"") for part in re.split("[,;]" if re.search("[,;]", text) else r"\s+", text)]
    full = [part for part in parts if part]
    numbers = all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", part) for part in full)
    items = [float(part) if "." in part else int(part) for part in full] if numbers else full
    if option:
        return f"write a list, e.g. --set {shlex.quote(setting(key, items))}"
    return f"write a list, e.g. {inline_toml({key: items})[1:-1]}"
