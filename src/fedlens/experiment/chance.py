"""What accuracy a model that has learned nothing reaches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedlens.data.client_datasets import ClientDatasets


@dataclass(frozen=True)
class Chance:
    """What a model that has learned nothing reaches: n examples of C classes, `share` of them of the most frequent.

    >>> chance = Chance(classes=10, examples=1000, share=0.25)
    >>> chance.has(0.117), chance.has(0.2), chance.has(0.25), chance.has(0.3)
    (True, False, True, False)
    """

    classes: int
    examples: int
    share: float

    def has(self, accuracy: float) -> bool:
        """At most 1/C within two standard errors, or the share of the most frequent class."""
        p = 1 / self.classes
        error = math.sqrt(p * (1 - p) / self.examples)
        return accuracy <= p + 2 * error or abs(accuracy - self.share) * self.examples < 0.5


def chance_levels(data: ClientDatasets) -> dict[str, Chance]:
    """What chance is for the accuracy on each split of held-out data.

    None where examples have no single class, or all have the same.
    """
    levels: dict[str, Chance] = {}
    for split, size in data.held().items():
        counts = data.class_counts(split) if split != "@train" and size else None
        if counts is not None and (counts > 0).sum() > 1:
            share = int(counts.max()) / size
            levels[f"{split[1:]}_accuracy"] = Chance(len(counts), size, share)
    return levels
