"""The facts about a dataset that tasks, models and algorithms may ask for, without its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["classification", "multi-label", "segmentation", "detection", "language", "unlabelled"]
VOID = 255  # the id of a mask's pixel without a class


@dataclass(frozen=True)
class DatasetInfo:
    """The facts about a dataset.

    Attributes:
        name: its name in the registry.
        kind: what its targets are for.
        classes: the names of the classes; a label is a position in it.
        input_shape: (C, H, W) of one image, or (T,) of one text.
        vocabulary: the number of different tokens of texts, 0 to `vocabulary` - 1; None for images. It need not be the
            number of classes.
        target_shape: (T,) for texts with T targets each, such as one at each position; () for any other target.
        gaps: whether some target is -1, which counts for nothing; for texts alone.

    >>> DatasetInfo("mine", "classification", ("cat", "dog"), (3, 32, 32)).kind
    'classification'
    """

    name: str
    kind: Kind
    classes: Sequence[str]
    input_shape: tuple[int, ...]
    vocabulary: int | None = None
    target_shape: tuple[int, ...] = ()
    gaps: bool = False
