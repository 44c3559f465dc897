"""The data of each client (`client.data`): a view of its examples, read as batches of floats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.base.threads import ReadAhead
from fedlens.core.device_copies import uploaded
from fedlens.core.protocol import ClientDataSource, ClientExamples, ClientId
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.types import is_client
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.normalize import normalize
from fedlens.data.shifts import shifted
from fedlens.data.targets import take

_WHOLE = 2**26  # bytes of floats up to which a client's images are normalized at once, not per batch
_AHEAD = 2**18  # bytes of images in memory from which a batch is worth augmenting in another thread

Batch = tuple[Tensor, Any]


@dataclass(frozen=True)
class ClientDataset(ClientExamples):
    """The examples of one client, or of the server.

    Args:
        examples: what `indices` point into.
        indices: the positions of its examples, int64 [n]; None means all of `examples`.
        mean, std: for `normalize`.
        augment: the augmentation while training.
        features: the shifts of the images at `indices`, float32 [1] for all of them or [n], by name; see
            `fedlens.data.shifts`.
        validation: the examples that this client holds out, if clients do.
        prefetch: how many batches are read ahead, if they are in files or costly to augment; 0 for none.
        views: how many augmentations of each image are in a batch. With 2 or more, inputs are [k, views, C, H, W], and
            targets belong to the image before augmentation. Images that are drawn may have two drawings as views.
    """

    examples: Examples
    indices: Tensor | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Chain | None = None
    features: Mapping[str, Tensor] = field(default_factory=dict)
    validation: ClientDataset | None = None
    prefetch: int = 1
    views: int = 1

    def __len__(self) -> int:
        # `len` of a tensor takes ten times as long, and this is called several times per client.
        return len(self.examples) if self.indices is None else self.indices.numel()

    def read_targets(self, start: int = 0, stop: int | None = None) -> Any:
        """The targets at the positions start to stop, in the order of `indices`; no image is read."""
        stop = len(self) if stop is None else min(stop, len(self))
        return self.examples.targets_at(
            slice(start, stop) if self.indices is None else self.indices[start:stop]
        )

    def units(self, column: str) -> NDArray[np.int64]:
        """int64 [n]: the number of each example's value in the column `[privacy] column`, in the order of `indices`."""
        numbers = self.examples.columns[column]
        return numbers if self.indices is None else numbers[self.indices.numpy()]

    def take(self, at: Tensor) -> ClientDataset:
        """The examples at the positions `at`, int64 [k], which may repeat."""
        features = {name: values[at] if len(values) > 1 else values for name, values in self.features.items()}
        indices = at if self.indices is None else self.indices[at]
        return replace(self, indices=indices, features=features)

    def stretch(self, start: int, stop: int) -> Batch:
        """Normalized images float32 [k, C, H, W] and targets at the positions start to stop, never augmented."""
        if self.indices is None:
            images, targets = self.examples.stretch(start, stop)
        elif self.features:
            images, targets = self._read(torch.arange(start, min(stop, len(self))))
        else:
            images, targets = self.examples.batch(self.indices[start:stop])
        return self._viewed(images), targets

    def stretches(self, start: int, stop: int, size: int, /) -> Iterator[Batch]:
        """The positions from `start` to before `stop` in stretches of `size`; images in files are read ahead."""
        read = super().stretches(start, stop, size)
        ahead = self.prefetch and self.examples.lazy and stop - start > size
        return ReadAhead(read, self.prefetch) if ahead else read

    def batches(self, size: int, rng: Rng, drop_last: bool = False) -> Iterator[Batch]:
        """Endless batches, epoch by epoch, each in a new order; `drop_last` leaves out a last batch that is smaller.

        The order of an epoch is `torch.randperm(n)` from `rng.torch("batches")`. If one batch holds all examples, they
        keep their order and nothing is drawn. Augmentations draw from `rng.torch("augment")`, batch by batch and, with
        several views, one view after the other. Images that are drawn anew draw from `rng.torch("drawing")`.

        Batches that are read ahead (`prefetch`) are a `ReadAhead`, with the same bits.
        """
        n = len(self)
        generator = rng.torch("batches")
        end = n - n % min(size, n) if drop_last and n else n
        if self.held(n):
            kept = self._from_memory(size, generator, end)
            return ReadAhead(kept, self.prefetch) if self.prefetch and self.examples.lazy else kept
        augmenting = rng.torch("augment")
        drawing = rng.torch("drawing") if self.examples.changing else None
        read = self._batches(size, generator, end, drawing)
        if not self._costly(min(size, n)):
            return (self._finished(batch, augmenting) for batch in read)
        finish = partial(self._finished, generator=augmenting)
        if self.augment is None or self.augment.apart:
            return ReadAhead(map(finish, read), self.prefetch)
        return ReadAhead(read, self.prefetch, then=finish)

    def batch(self, positions: Tensor, rng: Rng) -> Batch:
        """The training batch of these examples, with the same bits on every call, worker and engine.

        A protocol that computes forward and backward passes in two operations reads its batch twice. `rng` is then
        that of the client, which both share: see `Rng.of_client`.

        Args:
            positions: int64 [k], the positions of the examples in the order of `indices`; they may repeat.
            rng: where augmentation and drawn images draw from, with the names of `batches`. An augmentation of a user's
                own that draws from PyTorch's global generator finds it started by `rng.seed_torch`, and it is put
                back afterwards.

        Returns:
            Inputs float32 [k, C, H, W], normalized, or [k, views, C, H, W], and the targets. The first batch of
            `batches(size, rng)` is `batch(order[:size], rng)` for the order of its epoch.

        Raises:
            IndexError: for a position below 0, or not below the number of examples.

        Example:
            >>> examples = Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4))
            >>> data = ClientDataset(examples, torch.tensor([3, 1, 2]), (0.0,), (1.0,))
            >>> inputs, targets = data.batch(torch.tensor([0, 2]), Rng((0, "client", 1, 7)))
            >>> inputs.shape, targets.tolist()
            (torch.Size([2, 1, 2, 2]), [3, 2])
        """
        outside = positions[(positions < 0) | (positions >= len(self))]
        if outside.numel():
            raise IndexError(f"position {int(outside[0])} of {len(self)} examples: take 0 to {len(self) - 1}")
        drawing = rng.torch("drawing") if self.examples.changing else None
        with ExitStack() as ending:
            if self.augment is not None and not self.augment.apart:
                device = self.examples.device or torch.device("cpu")
                ending.enter_context(random_state_kept(device))
                rng.seed_torch(device)
            return self._finished(self._read(positions, drawing), rng.torch("augment"))

    def held(self, n: int, /) -> int:
        """The bytes of floats that `batches` keeps for n examples: in their own order and in that of an epoch.

        0 if it normalizes each batch on its own: if examples are augmented, drawn anew, or too many.
        """
        whole = n * self.examples.values * 4 * self.views
        return 0 if self.augment is not None or self.examples.changing or whole > _WHOLE else 2 * whole

    def group(self, others: Sequence[Any], /) -> ClientGroup | None:
        """The examples of this client and of `others`, to be read together.

        None where they are augmented, shifted or drawn anew, which differs between clients, come from several
        datasets, or have several views.
        """
        if self.examples.changing:
            return None
        clients = (self, *others)
        for each in clients:
            plain = type(each) is ClientDataset and each.augment is None and not each.features
            if not plain or each.views > 1 or each.indices is None or each.examples is not self.examples:
                return None
        indices = [each.indices for each in clients]
        counts = [len(each) for each in clients]
        starts = [0, *accumulate(counts[:-1])]
        return ClientGroup(self.examples, torch.cat(indices), starts, counts, self.mean, self.std)

    def _costly(self, size: int) -> bool:
        """Whether a batch of this size is worth reading ahead, in another thread."""
        if not self.prefetch:
            return False
        if self.examples.lazy:
            return True
        on_processor = self.examples.device is None or self.examples.device.type == "cpu"
        apart = self.augment is not None and self.augment.apart
        return apart and on_processor and size * self.examples.values * self.views >= _AHEAD

    def _read(self, at: Tensor, drawing: torch.Generator | None = None) -> Batch:
        """The images uint8, with this client's shifts, and targets at the positions `at`."""
        positions = at if self.indices is None else self.indices[at]
        images, targets = self.examples.batch(positions, drawing)
        if not self.features:
            return images, targets
        features = {
            name: values[at] if len(values) > 1 else values.expand(len(at))
            for name, values in self.features.items()
        }
        views = [shifted(view, features, positions) for view in self._apart(images)]
        return torch.stack(views, 1) if images.dim() == 5 else views[0], targets

    def _finished(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The batch, augmented and normalized."""
        images, targets = batch
        if self.augment is None:
            return self._viewed(images), targets
        if self.views == 1:
            images, targets = self.augment(self._apart(images)[0], targets, generator)
            return normalize(images, self.mean, self.std), targets
        views = [self.augment(view, targets, generator)[0] for view in self._apart(images)]
        return torch.stack([normalize(view, self.mean, self.std) for view in views], 1), targets

    def _apart(self, images: Tensor) -> Sequence[Tensor]:
        """The images of each view, [k, C, H, W]: drawn apart, or the same ones."""
        return images.unbind(1) if images.dim() == 5 else [images] * self.views

    def _viewed(self, images: Tensor) -> Tensor:
        """The images normalized, and without a copy as each of the views."""
        if images.dim() == 5 and self.views > 1:
            return torch.stack([normalize(view, self.mean, self.std) for view in images.unbind(1)], 1)
        plain = normalize(self._apart(images)[0], self.mean, self.std)
        return (
            plain if self.views == 1 else plain.unsqueeze(1).expand(-1, self.views, *[-1] * (plain.dim() - 1))
        )

    def _batches(
        self, size: int, generator: torch.Generator, end: int, drawing: torch.Generator | None = None
    ) -> Iterator[Batch]:
        while True:
            order = self._order(len(self), size, generator)
            for start in range(0, end, size):
                yield self._read(order[start : start + size], drawing)

    def _from_memory(self, size: int, generator: torch.Generator, end: int) -> Iterator[Batch]:
        n = len(self)
        if self.examples.lazy and size < n:
            # The first epoch is read batch by batch: a client may take fewer steps, and need not wait for all images.
            for images, targets in islice(self._batches(size, generator, end), -(-end // size)):
                yield self._viewed(images), targets
        images, targets = self.stretch(0, n)
        while True:
            if size >= n:
                yield images, targets
                continue
            order = self._order(n, size, generator)
            at = uploaded(order, images.device)
            shuffled = images.index_select(0, at)
            by_row = targets.index_select(0, at) if isinstance(targets, Tensor) else None
            for start in range(0, end, size):
                stop = start + size
                yield (
                    shuffled[start:stop],
                    take(targets, order[start:stop]) if by_row is None else by_row[start:stop],
                )

    @staticmethod
    def _order(n: int, size: int, generator: torch.Generator) -> Tensor:
        return torch.arange(n) if size >= n else torch.randperm(n, generator=generator)


def room_on(device: torch.device) -> int:
    """Half of the free bytes of a GPU; the processor takes all."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**62


@dataclass(frozen=True)
class ClientGroup:
    """The examples of several clients of one dataset, read together and never augmented.

    Args:
        examples: what `indices` point into.
        indices: the positions of the clients' examples, int64.
        starts, counts: client k has the examples at `indices[starts[k] : starts[k] + counts[k]]`.
        mean, std: for `normalize`.
    """

    examples: Examples
    indices: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def device(self) -> torch.device:
        """The device of the images; the processor for images in files."""
        inputs = self.examples.inputs
        return inputs.device if isinstance(inputs, Tensor) else torch.device("cpu")

    def reordered(self, order: Sequence[int], /) -> ClientGroup:
        """The same examples, the clients in this order."""
        return replace(self, starts=[self.starts[k] for k in order], counts=[self.counts[k] for k in order])

    def batches(
        self,
        sizes: Sequence[int],
        rngs: Sequence[Rng] | None,
        steps: Sequence[int],
        drop_last: bool = False,
        /,
    ) -> Tensor:
        """The positions in `examples` of the first so many of each client's `batches`, int64 [steps, clients, size].

        -1 fills batches that are short, and those of clients with fewer steps. With `rngs` = None they are those of
        each client's `stretches`, in the order of its examples.
        """
        positions = torch.full((len(sizes), max(steps), max(sizes)), -1)
        alike: dict[tuple[int, int, int], list[int]] = {}
        for k, kind in enumerate(zip(self.counts, sizes, steps, strict=True)):
            alike.setdefault(kind, []).append(k)
        for (n, size, count), rows in alike.items():
            per_epoch = n // size if drop_last else -(-n // size)
            orders = self._orders(rows, n, size, -(-count // per_epoch), rngs)
            if drop_last:
                orders = orders[:, :, : per_epoch * size]
            elif n % size:
                orders = torch.nn.functional.pad(orders, (0, -n % size), value=-1)
            positions[rows, :count, :size] = orders.reshape(len(rows), -1, size)[:, :count]
        return positions.transpose(0, 1)

    def _orders(
        self, rows: Sequence[int], n: int, size: int, epochs: int, rngs: Sequence[Rng] | None
    ) -> Tensor:
        """The positions in the order of each epoch, int64 [rows, epochs, n], of clients with n examples."""
        orders = torch.arange(n).repeat(len(rows), epochs, 1)
        if size < n and rngs is not None:
            generator, each = torch.Generator(), iter(orders.view(-1, n).unbind())
            for row in rows:
                generator.manual_seed(rngs[row].seed("batches"))
                for order in islice(each, epochs):
                    torch.randperm(n, generator=generator, out=order)
        orders += torch.tensor([self.starts[row] for row in rows]).view(-1, 1, 1)
        return self.indices.index_select(0, orders.flatten()).view(orders.shape)

    def read(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """Normalized images float32 [k, C, H, W] and labels at these positions in `examples`, int64 [k]."""
        images, labels = self.examples.batch(positions)
        return normalize(images, self.mean, self.std), labels


@dataclass(frozen=True)
class ClientDatasets(ClientDataSource):
    """The data of each client, and of the server.

    The server has `@test`, `@validation` (the held-out examples), and `@train`, all clients' examples pooled. Test
    images are not shifted; held-out and training images have the shifts of their client.

    Args:
        dataset: its splits are tensors or files (`Examples.tensors`); `indices` point into the training split.
        indices, offsets: int64; client k holds the examples at `indices[offsets[k] : offsets[k + 1]]`.
        features: float32 [clients] by name, the shifts of each client's images; see `fedlens.data.shifts`.
        held_out: int64, the positions that are held out for validation, or None.
        held_out_offsets: int64 [clients + 1], if each client holds out its own examples: client k holds out
            `held_out[held_out_offsets[k] : held_out_offsets[k + 1]]`; None if they are held out of all examples.
        augment: applied to the clients' training images.
        prefetch, views: as in `ClientDataset`.
    """

    dataset: Dataset
    indices: Tensor
    offsets: NDArray[np.int64]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    held_out: Tensor | None = None
    held_out_offsets: NDArray[np.int64] | None = None
    augment: Chain | None = None
    prefetch: int = 1
    views: int = 1

    @property
    def training_shape(self) -> tuple[int, ...]:
        """The shape of one augmented image, (C, H, W), or of one text, (T,)."""
        shape = self.dataset.input_shape
        return shape if self.augment is None else self.augment.output_shape(shape)

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def largest(self) -> int:
        """The number of examples of the largest client."""
        return int(np.diff(self.offsets).max())

    def client_indices(self, client: int) -> Tensor:
        """int64 [n_k]: the positions of this client's examples in the training split; a view."""
        return self.indices[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def client_held_out(self, client: int) -> Tensor | None:
        """int64 [m_k]: the positions that this client holds out; None if clients hold out none."""
        if self.held_out is None or self.held_out_offsets is None:
            return None
        return self.held_out[int(self.held_out_offsets[client]) : int(self.held_out_offsets[client + 1])]

    def held_out_sizes(self) -> NDArray[np.int64] | None:
        """int64 [clients]: how many examples each client holds out; None if clients hold out none."""
        return None if self.held_out_offsets is None else np.diff(self.held_out_offsets)

    def held_out_digest(self) -> str | None:
        """SHA-256 in hexadecimal of the positions that each client holds out; None if clients hold out none.

        Runs on the same dataset with the same digest measure their clients on the same examples.
        """
        if self.held_out is None or self.held_out_offsets is None:
            return None
        hashed = hashlib.sha256()
        for array in (self.held_out_offsets, self.held_out.numpy()):
            hashed.update(array.astype("<i8", copy=False).tobytes())
        return hashed.hexdigest()

    def on(self, device: torch.device, /) -> ClientDatasets:
        """The same for training on `device`; the images are kept there if they fit in half of its free memory."""
        room = room_on(device)
        train = self.dataset.train.on(device, room)
        # `group` compares examples by identity, so the two splits must stay one object.
        same = self.dataset.test is self.dataset.train
        test = train if same else self.dataset.test.on(device, room // 4)
        return replace(self, dataset=replace(self.dataset, train=train, test=test))

    def data_of(self, client: ClientId, /) -> ClientDataset:
        """The data of this client. Raises `KeyError` for an unknown name."""
        train = self.dataset.train
        if is_client(client):
            features = {name: values[client : client + 1] for name, values in self.features.items()}
            held_out = self.client_held_out(client)
            validation = None if held_out is None else self._of(train, held_out, None, features)
            return self._of(train, self.client_indices(client), self.augment, features, validation)
        if client == "@train":
            return self._of(train, self.indices, self.augment, self._each(self.offsets))
        if client == "@validation" and self.held_out is not None:
            return self._of(train, self.held_out, None, self._each(self.held_out_offsets))
        if client == "@test":
            return self._of(self.dataset.test, None, None, {})
        raise KeyError(client)

    def group(self, clients: Sequence[ClientId], /) -> ClientGroup | None:
        """The examples of these clients, to be read together; None where they are augmented or shifted."""
        dataset, numbers = self.dataset, [client for client in clients if is_client(client)]
        together = self.augment is None and not self.features and self.views == 1
        together = together and not dataset.train.changing
        if not together or len(numbers) < len(clients):
            return None
        starts, ends = self.offsets[:-1][numbers], self.offsets[1:][numbers]
        counts = (ends - starts).tolist()
        return ClientGroup(dataset.train, self.indices, starts.tolist(), counts, dataset.mean, dataset.std)

    def _of(
        self,
        examples: Examples,
        indices: Tensor | None,
        augment: Chain | None,
        features: Mapping[str, Tensor],
        validation: ClientDataset | None = None,
    ) -> ClientDataset:
        mean, std = self.dataset.mean, self.dataset.std
        return ClientDataset(
            examples, indices, mean, std, augment, features, validation, self.prefetch, self.views
        )

    def _each(self, offsets: NDArray[np.int64] | None) -> dict[str, Tensor]:
        """The shifts of each example, client by client."""
        if offsets is None:
            return {}
        counts = torch.from_numpy(np.diff(offsets))
        return {name: values.repeat_interleave(counts) for name, values in self.features.items()}

    def class_counts(self, client: ClientId) -> Tensor | None:
        """int64 [classes]: how many examples of this client have each class; None if examples have no single class."""
        if self.dataset.kind != "classification":
            return None
        return torch.bincount(self.data_of(client).read_targets(), minlength=len(self.dataset.classes))

    def held(self) -> dict[str, int]:
        """The number of examples of each of the server's datasets, by name."""
        sizes = {"@test": len(self.dataset.test), "@train": len(self.indices)}
        if self.held_out is not None:
            sizes["@validation"] = len(self.held_out)
        return sizes
