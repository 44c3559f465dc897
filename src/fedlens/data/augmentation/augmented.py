"""Augmentations in sequence: what each is called with and returns, and how targets follow the pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError, told
from fedlens.base.signatures import METHODS, check_signature, name_of
from fedlens.vision.change import Change


class Augmented(NamedTuple):
    """The images and targets of a batch after an augmentation.

    Attributes:
        images: uint8 [n, C, H, W].
        targets: those of the images, not moved yet.
        change: how pixels moved; None where each pixel stays in its place.
    """

    images: Tensor
    targets: Any
    change: Change | None = None


Step = Callable[[Tensor, Any, torch.Generator], tuple[Any, ...]]  # returns `Augmented`, or a tuple like it
Move = Callable[[Any, Change], Any]  # (targets, change) to the targets of the changed images


class Augmentation(ABC):
    """Base class of augmentations that draw from `generator` alone.

    They may run in another thread while a training step runs. An augmentation that is no subclass runs in the thread
    of the step, because it may draw from PyTorch's global generator, as the step does.

    Attributes:
        combines: whether an image of the result shows parts of several images. Tasks whose targets have no place in
            the image refuse it, and those that change the size of images: see `Task.placed`.
    """

    combines: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        """The images uint8 [n, C, H, W] and targets after a random change, and how pixels moved."""

    def output_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """(C, H, W) of the augmented images, from the shape of the given ones: the same by default."""
        return tuple(input_shape)

    def note(self, input_shape: Sequence[int]) -> str | None:
        """A sentence for the notes of a run on images of this shape; None for none."""
        return None


def unmoved(targets: Any, change: Change) -> Any:
    """The same targets, for tasks whose targets have no place in the image."""
    return targets


@dataclass(frozen=True)
class Chain:
    """Several augmentations in sequence. After each geometric one, `move` moves the targets.

    It returns the images and their targets. Raises `ConfigError` if an augmentation returns something else than
    images and targets.

    >>> from fedlens.data.augmentation.augment import Crop, Flip
    >>> both = Chain((Crop(pad=1), Flip(p=0.5)))
    >>> images, targets = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([4, 7])
    >>> images, targets = both(images, targets, torch.Generator())
    >>> images.shape, targets.tolist()
    (torch.Size([2, 3, 8, 8]), [4, 7])
    """

    steps: tuple[Step, ...]
    move: Move = field(default=unmoved, compare=False)

    @property
    def apart(self) -> bool:
        """Whether all of them may run in another thread than the training step."""
        return all(isinstance(step, Augmentation) for step in self.steps)

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        for step in self.steps:
            n = len(images)
            images, targets, change = _checked(step, step(images, targets, generator), n)
            if change is not None:
                targets = self.move(targets, change)
        return images, targets

    def output_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """(C, H, W) of the augmented images, from the shape of the given ones, as far as the steps declare it."""
        shape = tuple(input_shape)
        for step in self.steps:
            shape = step.output_shape(shape) if isinstance(step, Augmentation) else shape
        return shape

    def attempt(self, images: Tensor, targets: Any) -> list[tuple[str, Augmented]]:
        """Calls augmentations of a user's own once, so that their errors show before the run.

        Returns the name and the result of each. Raises `ConfigError` if one takes other arguments, fails, or returns
        something else than images and targets.
        """
        results = []
        for step in self.steps:
            if isinstance(step, Augmentation):
                continue
            who = f"the augmentation {name_of(step)}"
            check_signature(step, METHODS["augmentation"]["__call__"], who, "data.augment")
            try:
                result = step(images.clone(), targets, torch.Generator().manual_seed(0))
            except Exception as error:
                raise ConfigError(f"{who} failed: {told(error)}", where="data.augment") from error
            results.append((name_of(step), _checked(step, result, len(images))))
        return results


def _checked(step: Step, result: Any, n: int) -> Augmented:
    """The result of an augmentation. Raises `ConfigError` if it has another form."""
    if isinstance(step, Augmentation) and isinstance(result, Augmented):
        return result
    name = name_of(step)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(
            f"the augmentation {name} returned {_form(result)}, but must return (images, targets)",
            where="data.augment",
            hint="write: return images, targets; or, if it moves pixels: return images, targets, change",
        )
    images, targets, change = (*result, None)[:3]
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4 or len(images) != n:
        raise ConfigError(
            f"the augmentation {name} returned {_form(images)} as images, but must return uint8 [{n}, C, H, W]",
            where="data.augment",
        )
    if len(targets) != n:
        raise ConfigError(
            f"the augmentation {name} returned {len(targets)} targets for {n} images", where="data.augment"
        )
    if change is not None and not isinstance(change, Change):
        raise ConfigError(
            f"the augmentation {name} returned {_form(change)} as its change",
            where="data.augment",
            hint="return a fedlens.vision.change.Change, or None if no pixel moves",
        )
    return Augmented(images, targets, change)


def _form(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
    return f"a tuple of {len(thing)}" if isinstance(thing, tuple) else f"a {type(thing).__name__}"
