"""Leaves of a model that stay at a client, in its state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.tree import tree_of

# The key of these leaves in a client's state; they are stored by name.
PERSONAL = "personal"


def own_leaves(model: ModelSpec, personal: frozenset[str], client: Client) -> Mapping[str, Tensor]:
    """The client's own leaves: from its last visit, or the model's initial ones before the first."""
    if not personal:
        return {}
    kept: Mapping[str, Tensor] | None = client.state.get(PERSONAL)
    return kept if kept is not None else _initial(model, personal, client)


def _initial(model: ModelSpec, personal: frozenset[str], client: Client) -> Mapping[str, Tensor]:
    key = ("initial", id(model.origin or model))
    of, initial = client.scratch.get(key, (None, {}))
    if of != model:
        initial = {name: value.to(client.device) for name, value in tree_of(model.build()).items()}
        client.scratch[key] = model, initial
    return {name: value for name, value in initial.items() if name in personal}
