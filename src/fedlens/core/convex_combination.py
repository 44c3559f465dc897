"""Convex combinations of models: K trees of one architecture as a matrix, weighted by one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.tree import Tree


class ModelMatrix:
    """K models of one architecture: their floating-point leaves as a float32 matrix [K, P].

    Combination n of the models has the floating-point leaves `sum_k w_nk theta_k` (chen2022, Eq. 5 and section 4.4).
    Running statistics are combined with the same weights. Integer counters take the largest value, as in averaging.

    Args:
        models: the K trees.

    Raises `ConfigError` without a model, or if the models differ in their leaves or shapes.

    >>> models = ModelMatrix([{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 2.0])}])
    >>> models.combined(torch.tensor([0.75, 0.25]))
    {'w': tensor([1., 2.])}
    """

    def __init__(self, models: Sequence[Tree]) -> None:
        if not models:
            raise ConfigError("no model was given to combine", where="models", hint="give at least one")
        first = models[0]
        form = {name: (value.shape, value.dtype) for name, value in first.items()}
        for place, model in enumerate(models):
            if {name: (value.shape, value.dtype) for name, value in model.items()} != form:
                differing = [
                    name
                    for name in dict.fromkeys([*first, *model])
                    if name not in form
                    or name not in model
                    or (model[name].shape, model[name].dtype) != form[name]
                ]
                raise ConfigError(
                    f"model {place} has other leaves or shapes than model 0, first at '{differing[0]}'",
                    where="models",
                    hint="combine models of one architecture",
                )
        self.names = [name for name, value in first.items() if value.is_floating_point()]
        self._form = {name: (value.shape, value.dtype) for name, value in first.items()}
        self.matrix = torch.stack([self.flattened(model) for model in models])
        self._counters = {
            name: torch.stack([model[name] for model in models]).amax(0)
            for name in first
            if name not in self.names
        }

    def __len__(self) -> int:
        """The number of models, K."""
        return len(self.matrix)

    def flattened(self, tree: Tree) -> Tensor:
        """float32 [P]: the floating-point leaves of a tree, one after the other."""
        parts = [tree[name].detach().reshape(-1).float() for name in self.names]
        return torch.cat(parts) if parts else torch.zeros(0)

    def combined(self, weights: Tensor) -> dict[str, Tensor]:
        """The combination with the weights [K]."""
        return next(self.combinations(weights[None]))

    def combinations(self, weights: Tensor, at_once: int = 64) -> Iterator[dict[str, Tensor]]:
        """The combination of each row of the weights [N, K], computed `at_once` rows at a time."""
        for some in torch.split(weights.float(), at_once):
            for row in some @ self.matrix:
                yield self.unflattened(row)

    def unflattened(self, row: Tensor) -> dict[str, Tensor]:
        """The tree of a row [P], with the largest counters; its leaves are views of the row where they are float32."""
        sizes = [prod(self._form[name][0]) for name in self.names]
        parts = dict(zip(self.names, torch.split(row, sizes), strict=True))
        return {
            name: parts[name].view(shape).to(dtype) if name in parts else self._counters[name]
            for name, (shape, dtype) in self._form.items()
        }


def uniform_simplex(count: int, models: int, generator: torch.Generator) -> Tensor:
    """float32 [count, models]: points drawn uniformly from the simplex, Dirichlet(1, ..., 1).

    They are spacings of exponential variables: `e_k / sum_j e_j` (Devroye 1986, chapter V.2).

    >>> points = uniform_simplex(1000, 3, torch.Generator().manual_seed(0))
    >>> bool((points >= 0).all()), bool(((points.sum(1) - 1).abs() < 1e-6).all())
    (True, True)
    """
    exponentials = torch.empty(count, models, dtype=torch.float64).exponential_(generator=generator)
    return (exponentials / exponentials.sum(1, keepdim=True)).float()
