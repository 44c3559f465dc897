"""Where the clock looks in: functions and methods of the product, replaced while a round is timed and put back after.

Nothing here is in the way of a run: outside of `watching` every function is the product's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from fedlens.benchmark.profile_clock import Clock, timed, timed_maker, timed_steps
from fedlens.core.modules import Loadable

Wrap = Callable[[Clock, str, Callable[..., Any]], Callable[..., Any]]


class Seam(NamedTuple):
    """A function of a module, or a method of a class (`module:Class`); what it does, and how it is timed."""

    owner: str
    name: str
    part: str
    wrap: Wrap = timed


# What its users have imported by name has to be replaced where they have it.
SEAMS = (
    Seam("fedlens.data.holders:Holders", "holder", "client.set-up"),
    Seam("fedlens.data.holders:Holding", "batches", "data.gathering", timed_steps),
    Seam("fedlens.data.holders:Holding", "gather", "data.gathering"),
    Seam("fedlens.data.holders:Holding", "orders", "data.gathering"),
    Seam("fedlens.data.holders:Holding", "stretch", "data.gathering"),
    Seam("fedlens.data.holders:Holding", "take", "data.gathering"),
    Seam("fedlens.data.holders:Holding", "labels", "data.gathering"),
    Seam("fedlens.data.holders", "normalize", "data.normalization"),
    Seam("fedlens.data.augment:Chain", "__call__", "data.augmentation"),
    Seam("fedlens.local.together:_Group", "_batches", "data.padding", timed_steps),
    Seam("fedlens.local.together", "vmap", "forward", timed_maker),
    Seam("fedlens.local.training", "gradients_of", "backward"),
    Seam("fedlens.local.together", "gradients_of", "backward"),
    Seam("fedlens.local.bench", "gradients_of", "backward"),
    Seam("fedlens.local.training", "optimizer", "optimizer", timed_maker),
    Seam("fedlens.local.together", "optimizer", "optimizer", timed_maker),
    Seam("fedlens.local.training", "clip", "optimizer.clipping"),
    Seam("fedlens.local.together", "_clipped", "optimizer.clipping"),
    Seam("fedlens.local.training", "_replayed", "rule"),
    Seam("fedlens.local.together:_Group", "_bent", "rule"),
    Seam("fedlens.engines.answering:Site", "_call", "client.set-up"),
    Seam("fedlens.local.training:Train", "visit", "client.set-up"),
    Seam("fedlens.local.together", "train_together", "client.set-up"),
    Seam("fedlens.local.together:_Group", "__init__", "client.set-up"),
    Seam("fedlens.local.training:Train", "_steps", "client.loop"),
    Seam("fedlens.local.together:_Group", "run", "client.loop"),
    Seam("fedlens.local.training:Train", "__call__", "client.reply"),
    Seam("fedlens.local.training:Train", "outcome", "client.reply"),
    Seam("fedlens.engines.answering", "_checked", "client.checks"),
    Seam("fedlens.engines.answering", "copied", "client.reply"),
    Seam("fedlens.engines.inline", "copied", "client.reply"),
    Seam("fedlens.engines.vectorized", "copied", "client.reply"),
    Seam("fedlens.engines.answering:Fold", "take", "aggregation.folding"),
    Seam("fedlens.engines.answering:Fold", "result", "aggregation.folding"),
    Seam("fedlens.aggregate.mean", "fold", "aggregation.folding"),
    Seam("fedlens.core.gate:Tally", "asked", "other.counting"),
    Seam("fedlens.core.gate:Gate", "_settle", "other.counting"),
    Seam("fedlens.engines.processes:Processes", "_publish", "waiting.sending"),
    Seam("fedlens.engines.processes:Processes", "_send", "waiting.sending"),
    Seam("fedlens.engines.workers:Worker", "receive", "waiting.receiving"),
)
HOOKS = ("start", "risk", "loss", "grad", "solve", "finish")  # of a client rule


@contextmanager
def watching(clock: Clock, ops: Iterable[Any]) -> Iterator[None]:
    """Times what happens inside of these operations and around them; puts everything back, however it ends."""
    with ExitStack() as undo:
        for seam in SEAMS:
            owner = owner_of(seam)
            undo.enter_context(_replaced(owner, seam.name, seam.wrap(clock, seam.part, _own(owner, seam))))
        for rule in _rules(ops):
            for hook in HOOKS:
                if (own := getattr(rule, hook, None)) is not None:
                    undo.enter_context(_replaced(rule, hook, timed(clock, "rule", own)))
        for task in {type(op.task) for op in ops if hasattr(op, "task")}:
            for name in ("loss", "losses"):
                if name in vars(task):
                    undo.enter_context(_replaced(task, name, timed(clock, "forward.loss", vars(task)[name])))
        undo.enter_context(_modules_watched(clock))
        yield


def owner_of(seam: Seam) -> Any:
    """The module or the class."""
    module, _, name = seam.owner.partition(":")
    found: Any = import_module(module)
    return getattr(found, name) if name else found


def _own(owner: Any, seam: Seam) -> Callable[..., Any]:
    found: Callable[..., Any] = vars(owner)[seam.name]
    return found


def _rules(ops: Iterable[Any]) -> list[Any]:
    """The client rules of the operations, each once."""
    rules = (getattr(getattr(op, "train", op), "rule", None) for op in ops)
    return list({id(rule): rule for rule in rules if rule is not None}.values())


@contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    # A rule is a frozen dataclass, whose own way of setting an attribute refuses.
    put = setattr if isinstance(owner, type) or hasattr(owner, "__spec__") else object.__setattr__
    before = vars(owner)[name]
    put(owner, name, new)
    try:
        yield
    finally:
        put(owner, name, before)


@contextmanager
def _modules_watched(clock: Clock) -> Iterator[None]:
    """Times the forward pass of every module that weights are loaded into meanwhile."""
    hooked: dict[int, nn.Module] = {}
    with ExitStack() as undo:

        def begin(*_: Any) -> None:
            clock.enter("forward")

        def end(*_: Any) -> None:
            clock.leave()

        own = Loadable.load

        def load(learner: Loadable, tree: Any) -> None:
            with clock.part("client.set-up"):
                if id(learner.module) not in hooked:
                    hooked[id(learner.module)] = learner.module
                    undo.callback(learner.module.register_forward_pre_hook(begin).remove)
                    undo.callback(learner.module.register_forward_hook(end, always_call=True).remove)
                own(learner, tree)

        undo.enter_context(_replaced(Loadable, "load", load))
        yield
