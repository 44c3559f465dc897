"""Detects operations, hooks, server steps and aggregates that change their inputs."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.core.stacked import StackedRow

FIRST_VISITS = (
    3  # calls of an operation by each worker, and rounds at the server, in which contents are compared
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MISSING = object()
_Mark = tuple[int | None, int | None]
INSTEAD = "return a new tensor: write a - b, not a.sub_(b)"


class Inputs:
    """A record of values before a call, to detect changes after it.

    Every in-place operation of PyTorch increases a tensor's version. `contents` adds a checksum of each tensor, which
    also detects changes through `.data` or NumPy.

    Args:
        contents: whether to compare the contents of tensors, not only their versions.
        named: the values by the names that errors give them: tensors, mappings and lists of them, plain values.

    >>> before = Inputs({"anchor": [torch.zeros(2), torch.zeros(3)]})
    >>> before.changed() is None
    True
    >>> _ = before.named["anchor"][1].add_(1)
    >>> before.changed()
    'anchor[1]'
    """

    def __init__(self, named: Mapping[str, Any], contents: bool = False) -> None:
        self.named, self._contents = named, contents
        self._before = self._marks()

    def _marks(self) -> dict[str, tuple[Any, _Mark]]:
        """Each value by name, with its version and its checksum."""
        found = {path: leaf for name, value in self.named.items() for path, leaf in leaves(value, name)}
        # One tensor may have several names.
        tensors = {id(leaf): leaf for leaf in found.values() if isinstance(leaf, Tensor)}
        read = [leaf for leaf in tensors.values() if self._contents or leaf.is_inference()]
        sums = dict(zip(map(id, read), checksums(read), strict=True))
        marks: dict[int, _Mark] = {key: (version(leaf), sums.get(key)) for key, leaf in tensors.items()}
        return {path: (leaf, marks.get(id(leaf), (None, None))) for path, leaf in found.items()}

    def changed(self) -> str | None:
        """The name of the first value that changed; None if none did."""
        now = self._marks()
        for name, (leaf, mark) in self._before.items():
            same, mark_now = now.pop(name, (_MISSING, mark))
            if same is not leaf or mark_now != mark:
                return name
        return next(iter(now), None)

    def refuse(self, who: str, where: str | None = None) -> None:
        """Raises `HookError` if a value changed. `who` names the function that was called: "`step` of MyStep"."""
        changed = self.changed()
        if changed is not None:
            raise HookError(f"{who} changes its input {changed} in place", where=where, hint=INSTEAD)


class PassedInputs:
    """Detects changes to tensors that are passed to a function one after the other; keeps none in memory.

    >>> passed, update = PassedInputs(), torch.zeros(2)
    >>> passed.add("update", {"w": update})
    >>> _ = update.data.add_(1)
    >>> passed.changed()
    "update['w']"
    """

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[Tensor], str, int]] = []

    def add(self, name: str, value: Any) -> None:
        """Takes the checksums of the tensors in `value`."""
        for path, leaf in leaves(value, name):
            if isinstance(leaf, Tensor):
                self._before.append((weakref.ref(leaf), path, checksum(leaf)))

    def changed(self) -> str | None:
        """The name of the first tensor that is still in memory and has changed; None if there is none."""
        for reference, name, before in self._before:
            tensor = reference()
            if tensor is not None and checksum(tensor) != before:
                return name
        return None


def version(tensor: Tensor) -> int | None:
    """PyTorch's count of the in-place changes to a tensor; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def checksum(tensor: Tensor) -> int:
    """A checksum of a tensor's bits: CRC-32 on the CPU, and the sum elsewhere; 0 for a sparse tensor.

    >>> one = torch.tensor([1.0, 2.0])
    >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(one.flip(0))
    (True, False)
    """
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """The `checksum` of each tensor, with one synchronization for all that are on a GPU."""
    with torch.no_grad():
        bits = [_bits(tensor) for tensor in tensors]
        sums = [each.sum(dtype=torch.int64) for each in bits if each.device.type != "cpu"]
        read = iter(torch.stack(sums).tolist() if sums else ())
        return [
            zlib.crc32(each.contiguous().numpy().data) if each.device.type == "cpu" else next(read)
            for each in bits
        ]


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers; empty for a sparse tensor."""
    if tensor.layout is not torch.strided:
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_INTEGERS[plain.element_size()])


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values in a value of nested mappings and lists, by name.

    >>> list(leaves({"w": [1, 2]}, "state"))
    [("state['w'][0]", 1), ("state['w'][1]", 2)]
    """
    # Each access to a row makes new views.
    if isinstance(value, Mapping) and not isinstance(value, StackedRow):
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from leaves(item, f"{name}[{at}]")
    else:
        yield name, value
