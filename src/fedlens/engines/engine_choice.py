"""The base of engines that choose another engine before the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedlens.core.engine_base import EngineBase
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.devices import ON_CPU, Computing
from fedlens.engines.forwarding import Forwarding
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import vectorized

KNOWN: dict[str, Callable[..., EngineBase]] = {
    "inline": inline, "vectorized": vectorized, "processes": processes,
}  # fmt: skip


class Chosen(Forwarding):
    """Starts as `inline`; `choose` replaces it by another engine, whose settings go to the run's config.toml.

    Args:
        settings: further settings, passed to the engines that have them.
    """

    def __init__(
        self,
        state_memory: int = STATE_MEMORY,
        computing: Computing = ON_CPU,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.common = {"device": computing.device, "precision": computing.precision, **(settings or {})}
        self.state_memory, self.computing = state_memory, computing
        self._take("inline", {}, "")

    def _take(self, name: str, table: Mapping[str, Any], why: str) -> str:
        """Uses this engine; returns one line with the choice and the reason."""
        defaults = {key: p.default for key, p in inspect.signature(KNOWN[name]).parameters.items()}
        given = {**self.common, **table, "state_memory": self.state_memory}
        given = {key: value for key, value in given.items() if key in defaults}
        self.engine = KNOWN[name](**given)
        # A setting that is None is left unset: TOML has no such value.
        self.table = {"name": name, **{k: v for k, v in {**defaults, **given}.items() if v is not None}}
        return f"engine: {name} ({why})"
