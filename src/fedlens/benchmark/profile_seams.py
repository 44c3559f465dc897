"""Where the clock looks in: functions and methods of the product, replaced while a round is timed and put back after.

Nothing here is in the way of a run: outside of a `Watch` every function is the product's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from fedlens.benchmark.profile_clock import Clock, timed, timed_maker, timed_steps
from fedlens.core.modules import Loadable

Wrap = Callable[[Clock, str, Callable[..., Any]], Callable[..., Any]]


class Seam(NamedTuple):
    """A function of a module, or a method of a class (`module:Class`); what it does, and how it is timed."""

    owner: str
    name: str
    part: str
    wrap: Wrap = timed


def _timed_at_anchor(clock: Clock, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of a group of clients: those at the weights that they started from are asked for by the rule."""

    @wraps(function)
    def call(train: Any, model: Any, weights: Any, batch: Any, visits: Any, *given: Any) -> Any:
        if weights[0].data_ptr() != visits[0].anchor[0].data_ptr():
            return function(train, model, weights, batch, visits, *given)
        with clock.part(part):
            return function(train, model, weights, batch, visits, *given)

    return call


# What its users have imported by name has to be replaced where they have it.
SEAMS = (
    Seam("fedlens.data.client_datasets:ClientDatasets", "holder", "client.set-up"),
    Seam("fedlens.data.client_datasets:ClientDataset", "batches", "data.gathering", timed_steps),
    Seam("fedlens.data.client_datasets:ClientDataset", "gather", "data.gathering"),
    Seam("fedlens.data.client_datasets:ClientDataset", "orders", "data.gathering"),
    Seam("fedlens.data.client_datasets:ClientDataset", "stretch", "data.gathering"),
    Seam("fedlens.data.client_datasets:ClientDataset", "take", "data.gathering"),
    Seam("fedlens.data.client_datasets:ClientDataset", "labels", "data.gathering"),
    Seam("fedlens.data.client_datasets", "normalize", "data.normalization"),
    Seam("fedlens.data.augment:Chain", "__call__", "data.augmentation"),
    Seam("fedlens.local.vectorized.steps", "batches", "data.padding", timed_steps),
    Seam("fedlens.local.vectorized.full_gradient", "stretches", "data.padding", timed_steps),
    Seam("fedlens.local.vectorized.model", "vmap", "forward", timed_maker),
    Seam("fedlens.local.training", "gradients_of", "backward"),
    Seam("fedlens.local.leafwise:Leafwise", "__call__", "backward"),
    Seam("fedlens.local.leafwise:Leafwise", "_step", "optimizer"),
    Seam("fedlens.local.vectorized.steps", "gradients_of", "backward"),
    Seam("fedlens.local.vectorized.steps", "differentiated", "backward"),
    Seam("fedlens.local.problem", "gradients_of", "backward"),
    Seam("fedlens.local.training", "optimizer", "optimizer", timed_maker),
    Seam("fedlens.local.vectorized.steps", "optimizer", "optimizer", timed_maker),
    Seam("fedlens.local.training", "clip", "optimizer.clipping"),
    Seam("fedlens.local.vectorized.steps", "descend", "optimizer"),
    Seam("fedlens.local.vectorized.steps", "_clipped", "optimizer.clipping"),
    Seam("fedlens.local.training", "_replayed", "rule"),
    Seam("fedlens.local.vectorized.steps:Steps", "_bent", "rule"),
    Seam("fedlens.local.vectorized.steps", "gradients", "rule", _timed_at_anchor),
    Seam("fedlens.local.vectorized.full_gradient", "gradients", "rule"),
    Seam("fedlens.engines.executor:Executor", "_call", "client.set-up"),
    Seam("fedlens.local.training:Train", "context", "client.set-up"),
    Seam("fedlens.local.vectorized.batched_train", "train_together", "client.set-up"),
    Seam("fedlens.local.vectorized.steps:Steps", "__init__", "client.set-up"),
    Seam("fedlens.local.training:Train", "_steps", "client.loop"),
    Seam("fedlens.local.vectorized.steps:Steps", "run", "client.loop"),
    Seam("fedlens.local.training:Train", "__call__", "client.reply"),
    Seam("fedlens.local.training:Train", "outcome", "client.reply"),
    Seam("fedlens.engines.executor", "_checked", "client.checks"),
    Seam("fedlens.engines.executor", "copied", "client.reply"),
    Seam("fedlens.engines.executor:Fold", "take", "aggregation.folding"),
    Seam("fedlens.engines.executor:Fold", "result", "aggregation.folding"),
    Seam("fedlens.aggregate.mean", "fold", "aggregation.folding"),
    Seam("fedlens.core.driver:Tally", "asked", "other.counting"),
    Seam("fedlens.core.driver:Driver", "_settle", "other.counting"),
    Seam("fedlens.engines.processes:Processes", "answer", "waiting.sending"),
    Seam("fedlens.engines.processes:Processes", "_send", "waiting.sending"),
    Seam("fedlens.engines.worker_pool:Worker", "receive", "waiting.receiving"),
)
HOOKS = ("start", "risk", "loss", "grad", "solve", "finish")  # of a client rule


class Place(NamedTuple):
    """An attribute that is replaced meanwhile."""

    owner: Any
    name: str
    before: Any
    instead: Any

    def put(self, value: Any) -> None:
        # A client rule is a frozen dataclass, whose own way of setting an attribute refuses.
        plain = isinstance(self.owner, type | ModuleType)
        (setattr if plain else object.__setattr__)(self.owner, self.name, value)


class Watch:
    """Times what happens inside of some operations and around them, while it is entered.

    Everything is put back at the end, however it comes. It may be entered again, and not twice at once.
    """

    def __init__(self, clock: Clock, ops: Iterable[Any]) -> None:
        self.clock, ops = clock, list(ops)
        self.places = [
            Place(owner, seam.name, own, _wrapped(seam, clock, own))
            for seam in SEAMS
            for owner in [owner_of(seam)]
            for own in [vars(owner)[seam.name]]
        ]
        for rule in _rules(ops):
            self._add(rule, HOOKS, "rule")
        for task in {type(op.task) for op in ops if hasattr(op, "task")}:
            self._add(task, ("loss", "losses"), "forward.loss")
        self.places.append(Place(Loadable, "load", Loadable.load, self._load))
        self._hooked: dict[int, tuple[RemovableHandle, ...]] = {}

    def _add(self, owner: Any, names: Iterable[str], part: str) -> None:
        there = vars(owner)
        self.places += [
            Place(owner, name, there[name], timed(self.clock, part, there[name]))
            for name in names
            if there.get(name) is not None
        ]

    @property
    def _load(self) -> Callable[[Loadable, Any], None]:
        own = Loadable.load

        def load(learner: Loadable, tree: Any) -> None:
            with self.clock.part("client.set-up"):
                self._hook(learner.module)
                own(learner, tree)

        return load

    def _hook(self, module: nn.Module) -> None:
        """Times the forward pass of a module that weights are loaded into."""
        if id(module) not in self._hooked:
            self._hooked[id(module)] = (
                module.register_forward_pre_hook(lambda *_: self.clock.enter("forward")),
                module.register_forward_hook(lambda *_: self.clock.leave(), always_call=True),
            )

    def __enter__(self) -> None:
        for place in self.places:
            place.put(place.instead)

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            place.put(place.before)
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()


def _wrapped(seam: Seam, clock: Clock, own: Any) -> Any:
    """The function, timed; a static method stays one."""
    if isinstance(own, staticmethod):
        return staticmethod(seam.wrap(clock, seam.part, own.__func__))
    return seam.wrap(clock, seam.part, own)


def owner_of(seam: Seam) -> Any:
    """The module or the class."""
    module, _, name = seam.owner.partition(":")
    found: Any = import_module(module)
    return getattr(found, name) if name else found


def _rules(ops: Iterable[Any]) -> list[Any]:
    """The client rules of the operations, each once."""
    rules = (getattr(getattr(op, "train", op), "rule", None) for op in ops)
    return list({id(rule): rule for rule in rules if rule is not None}.values())
