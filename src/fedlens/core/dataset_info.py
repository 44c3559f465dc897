"""The facts about a dataset that tasks, models and algorithms may ask for, and how examples of clients are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from fedlens.core.random import Rng

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

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


class GroupExamples(Protocol):
    """The examples of A clients that are read together; `fedlens.data.client_datasets.ClientGroup` is one."""

    @property
    def counts(self) -> Sequence[int]:
        """How many examples each client has."""

    @property
    def device(self) -> torch.device:
        """The device of the examples; `read` accepts positions on it without a copy."""

    def reordered(self, order: Sequence[int], /) -> GroupExamples:
        """The same examples, the clients in this order."""

    def batches(
        self,
        sizes: Sequence[int],
        rngs: Sequence[Rng] | None,
        steps: Sequence[int],
        drop_last: bool = False,
        /,
    ) -> Tensor:
        """The positions of the examples of each client's first batches, int64 [steps, A, size]; -1 is padding.

        With `rngs` = None each client's examples stay in their own order.
        `drop_last` leaves out the last batch of an epoch if it is smaller than the others.
        """

    def read(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """The inputs [k, ...] and targets [k, ...] at these positions, int64 [k]."""


class ClientExamples(Protocol):
    """Interface of a client's data for batched training; `ClientDataset` implements it.

    The defaults suit data that caches nothing and gives each client's batches separately.
    """

    def stretch(self, start: int, stop: int, /) -> tuple[Any, Any]:
        """The inputs and targets at the positions `start` to `stop`, never augmented."""
        ...

    def stretches(self, start: int, stop: int, size: int, /) -> Iterator[tuple[Any, Any]]:
        """The positions from `start` to before `stop` in stretches of `size`, in order."""
        return (self.stretch(at, min(at + size, stop)) for at in range(start, stop, size))

    def held(self, n: int, /) -> int:
        """The bytes of images that `batches` keeps in memory for n examples."""
        return 0

    def group(self, others: Sequence[Any], /) -> GroupExamples | None:
        """The examples of this client and of `others`, to be read together; None where each is read on its own."""
        return None


class Window(NamedTuple):
    """The rectangle of an image that a party sees, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, images: Any) -> Any:
        """The pixels in the window, [..., height, width]: a view of `images`, [..., H, W]."""
        return images[..., self.top : self.top + self.height, self.left : self.left + self.width]


@dataclass(frozen=True)
class PartyFacts:
    """What all parties know of each other before the first round. Their numbers are those of the clients, from 0.

    Attributes:
        names: of the parties.
        shapes: of one input of each party.
        windows: that of each party, where they see parts of the same images; None for data of their own.
        labels_at: the party that holds the labels.
        align: how they find the examples that all of them have: "psi" by private set intersection, "ids" in the open.

    >>> halves = (Window(0, 0, 28, 14), Window(0, 14, 28, 14))
    >>> PartyFacts(("left", "right"), ((1, 28, 14),) * 2, halves, labels_at=0, align="psi").names
    ('left', 'right')
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    windows: tuple[Window, ...] | None
    labels_at: int
    align: Literal["psi", "ids"]


class PartyExamples(Protocol):
    """The examples of a party, in its own order; `held` are those that are not trained on."""

    @property
    def ids(self) -> Sequence[str]:
        """The id of each example."""

    @property
    def held(self) -> Mapping[str, PartyExamples]:
        """The party's examples for evaluation, by name: `@test`, and `@validation` if there are any."""

    def __len__(self) -> int: ...

    def inputs(self, positions: Tensor) -> Tensor:
        """The inputs at these positions, int64 [B]; float [B, ...]."""

    def labels(self, positions: Tensor) -> Tensor:
        """The labels at these positions, int64 [B]; raises at a party without labels."""


@dataclass(frozen=True)
class FederationInfo:
    """What the server knows about its clients: their number, their numbers of examples, and the task."""

    sizes: np.ndarray
    classes: int
    input_shape: tuple[int, ...]
    held: Mapping[str, int] = field(default_factory=dict)  # examples at the server, by name: "@test", ...
    held_out: np.ndarray | None = (
        None  # int64 [clients]: how many each client holds out of its own, where they do
    )
    kind: Kind = "classification"
    counts_of_one: float = 1  # the largest number of occurrences of one class in an example
    parties: PartyFacts | None = None  # where clients hold features of the same examples
    at_sites: bool = False  # whether the examples are at sites, which send nothing of a single one
    contract: str = ""  # SHA-256, in hexadecimal, of the experiment that the sites approved

    @property
    def clients(self) -> int:
        """The number of clients in the population."""
        return len(self.sizes)

    @cached_property
    def eligible(self) -> np.ndarray:
        """The clients that hold at least one example, int64; computed once."""
        return self.sizes.nonzero()[0]

    def eligible_of(self, available: Sequence[int] | None) -> np.ndarray:
        """Those of the eligible clients that are available, int64; all for None.

        >>> import numpy as np
        >>> FederationInfo(np.array([600, 0, 300]), 10, (1, 28, 28)).eligible_of([1, 2]).tolist()
        [2]
        """
        if available is None:
            return self.eligible
        wanted = set(available)
        return self.eligible[[int(client) in wanted for client in self.eligible]]

    @cached_property
    def ends(self) -> np.ndarray:
        """int64: the cumulative numbers of examples of the eligible clients."""
        ends: np.ndarray = self.sizes[self.eligible].cumsum(dtype="int64")
        return ends

    @cached_property
    def holding_out(self) -> np.ndarray:
        """The clients that hold out at least one example of their own, int64; empty where clients do not."""
        return self.eligible[:0] if self.held_out is None else self.held_out.nonzero()[0]

    @property
    def most_counts(self) -> float:
        """The largest number of occurrences of a class that a client can report."""
        return self.largest * self.counts_of_one

    @cached_property
    def largest(self) -> int:
        """The examples of the largest client."""
        return int(self.sizes.max())
