"""What engines declare about themselves, by the function that makes them. No import of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fedlens.base.errors import FedlensError
from fedlens.base.registry import import_name
from fedlens.engines.registry import ENGINES

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class EngineTraits:
    """What distinguishes an engine from the others.

    Attributes:
        exact: whether results equal those of `inline` to the bit, for equal settings of device, number format, threads
            and group. `resume` accepts one exact engine in place of another.
        place: where clients train: in this process, in `workers` of this machine that are sent the operations with
            their code, or on a cluster that is sent the data too; None if it depends on the run.
        groups: whether several clients train as one computation by default.
        chooses: whether the engine is chosen by time before the run, and its settings replace the request.
    """

    exact: bool = False
    place: Literal["process", "workers", "cluster"] | None = None
    groups: bool = False
    chooses: bool = False

    @property
    def has_workers(self) -> bool:
        """Whether clients train in several processes at the same time."""
        return self.place in ("workers", "cluster")


_DECLARED: dict[str, EngineTraits] = {}  # by the import name of the function


def declares(traits: EngineTraits) -> Callable[[Made], Made]:
    """Decorates a function that makes an engine with its traits; the default is `EngineTraits()`.

    >>> @declares(EngineTraits(exact=True, place="workers"))
    ... def dask() -> object: ...
    >>> traits_of({"name": dask}).has_workers
    True
    """

    def declared(factory: Made) -> Made:
        _DECLARED[import_name(factory)] = traits
        return factory

    return declared


def traits_of(engine: Mapping[str, Any]) -> EngineTraits:
    """What the engine of a table `[engine]` declares; the defaults if there is no such engine.

    >>> traits_of({"name": "ray"}).place, traits_of({}).exact
    ('cluster', True)
    """
    name = engine.get("name", "default")
    name = import_name(name) if callable(name) else name
    with suppress(FedlensError):  # an unknown name is reported where the settings are checked
        return _DECLARED.get(name) or _DECLARED.get(import_name(ENGINES.find(name)), EngineTraits())
    return EngineTraits()
