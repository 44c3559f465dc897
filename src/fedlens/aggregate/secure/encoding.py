"""A client's reply as words that can be added without seeing them: fixed-point numbers modulo 2^32 or 2^64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Payload
from fedlens.core.reduction import How, Update
from fedlens.core.schema import NumberField, Schema, TensorField, TreeField

VECTOR = "vector"  # the name of the words in a reply
LOSS = "loss"
# Of a plain reply: the server computes the counters, and the weight is the last word.
_LEFT_OUT = ("counters", "weight")


class SummedField(NamedTuple):
    """One field of the vector: the words `start` to `stop`, those of a tree in the order of its `leaves`.

    `leaves` is None for a number.
    """

    name: str
    how: How
    range: float
    leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None
    start: int
    stop: int


@dataclass(frozen=True)
class SumLayout:
    """The vector that every client sends into a blind sum, and what the sum of such vectors means.

    In this order: the update, buffers and other fields of the reply, the mean loss if clients send it, and the weight
    n_k. A word is

        round(2^bits v / r)                 fields that are plain sums
        round(2^bits (n_k / n_max) v / r)   weighted means: update, buffers, loss, and the others
        round(2^bits n_k / n_max)           the weight, the last word

    for a value v of a field with range r, in two's complement modulo 2^32, or 2^64 where the sum of a whole cohort
    needs more. So a sum of n vectors is off by at most n/2 words, and a mean by n r / (2^bits sum_k n_k / n_max): one
    half of it from the numerator, the other from the rounded weights. Bonawitz et al. 2017 (ePrint 2017/281) sum
    vectors of integers modulo R; how a model becomes integers is ours.

    Attributes:
        expect: the schema of a plain reply. The bound of its `weight` is n_max.
        fields: how each field is summed that a client rule adds, as in `Aggregate.aggregate`.
        ranges: the range of each field, and of `loss`: every value v has |v| <= r.
        bits: fractional bits of a word.
        cohort: the largest number of vectors in a sum.
        loss: whether clients send their loss.

    Raises `ConfigError` if the sum of a cohort may overflow 64 bits, and for a field that cannot be summed.

    >>> leaves = {"w": ((2,), torch.float32)}
    >>> expect = Schema({
    ...     "update": TreeField(leaves), "buffers": TreeField({}), "counters": TreeField({}),
    ...     "weight": NumberField(above=0, most=4.0),
    ... })
    >>> layout = SumLayout(expect, {}, {"update": 1.0, "buffers": 1.0, "loss": 8.0}, bits=16, cohort=2)
    >>> layout.words, layout.modulus_bits
    (4, 32)
    >>> def words(weight, value):
    ...     reply = {"update": {"w": torch.tensor(value)}, "buffers": {}, "counters": {}, "weight": weight}
    ...     return layout.encode(reply, {"loss": 2.0, "examples": 1.0})
    >>> total = words(4.0, [0.5, -1.0]) + words(2.0, [0.25, 0.5])
    >>> update, loss = layout.decode(total, 2)  # (4 * 0.5 + 2 * 0.25) / 6 and (4 * -1 + 2 * 0.5) / 6
    >>> update.update, update.weight, loss
    ({'w': tensor([ 0.4167, -0.5000])}, 6.0, 2.0)
    """

    expect: Schema
    fields: Mapping[str, How]
    ranges: Mapping[str, float]
    bits: int
    cohort: int
    loss: bool = True

    def __post_init__(self) -> None:
        assert self.modulus_bits
        assert self.words

    @cached_property
    def modulus_bits(self) -> Literal[32, 64]:
        """The bits of a word: 32 if cohort x 2^bits is at most 2^31 - 1, else 64. Raises `ConfigError` beyond."""
        most = self.cohort << self.bits
        if most >= 2**63:
            fitting = (2**63 - 1) // self.cohort
            raise ConfigError(
                f"a sum of {self.cohort:,} clients at {self.bits} bits needs {self.cohort:,} x 2^{self.bits} = "
                f"{most:,}, and a word of 64 bits holds at most 2^63 - 1 = {2**63 - 1:,}",
                where="aggregate.bits",
                hint=f"set aggregate.bits = {fitting.bit_length() - 1} or less, or select fewer clients",
            )
        return 32 if most < 2**31 else 64

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the words in a payload, which are signed there: int32 or int64."""
        return torch.int32 if self.modulus_bits == 32 else torch.int64

    @property
    def unsigned(self) -> type[np.unsignedinteger[Any]]:
        """The dtype in which words are added: PyTorch does not define what signed integers do at their limit."""
        return np.uint32 if self.modulus_bits == 32 else np.uint64

    def signed(self, total: np.ndarray) -> np.ndarray:
        """The numbers that unsigned words stand for, a view."""
        return total.view(np.int32 if self.modulus_bits == 32 else np.int64)

    @property
    def kinds(self) -> Mapping[str, Any]:
        """The schema of each field of a plain reply, and of its mean loss."""
        return {**(self.expect.fields or {}), **({LOSS: NumberField()} if self.loss else {})}

    @property
    def largest(self) -> float:
        """n_max, the largest weight."""
        return float(self.kinds["weight"].most)

    @cached_property
    def summed(self) -> tuple[SummedField, ...]:
        """The fields in the order of the vector, all but the weight.

        Raises `ConfigError` for one that is neither summed nor averaged, and for a single tensor.
        """
        found: list[SummedField] = []
        hows: Mapping[str, How] = {"update": "mean", "buffers": "mean", **self.fields, LOSS: "mean"}
        at = 0
        for name, kind in self.kinds.items():
            if name in _LEFT_OUT:
                continue
            if name not in hows or isinstance(kind, TensorField):
                raise ConfigError(
                    f"clients send the field '{name}', and the server sees sums and means of trees and numbers alone",
                    where="aggregate.name",
                    hint="take aggregate.name = 'mean', or another algorithm",
                )
            leaves = kind.leaves if isinstance(kind, TreeField) else None
            size = 1 if leaves is None else sum(torch.Size(shape).numel() for shape, _ in leaves.values())
            found.append(SummedField(name, hows[name], self.ranges[name], leaves, at, at := at + size))
        return tuple(found)

    @cached_property
    def words(self) -> int:
        """The length of the vector."""
        return self.summed[-1].stop + 1

    @property
    def schema(self) -> Schema:
        """The schema of a reply that holds one vector of words, none beyond 2^bits."""
        most = 1 << self.bits
        return Schema({VECTOR: TensorField((self.words,), self.dtype, low=-most, high=most)})

    def encode(self, payload: Payload, metrics: Mapping[str, float]) -> np.ndarray:
        """The vector of a reply, unsigned [words].

        Args:
            payload: the payload of a plain reply.
            metrics: its metrics: `loss`, summed over `examples`.

        Raises `ValueError` with the reason if the reply is not valid, a value is beyond its range, or the weight is 0.
        """
        fault = self.expect.fault(payload) or self.expect.metric_fault(metrics)
        if fault is not None:
            raise ValueError(fault)
        if self.loss:
            payload = {**payload, LOSS: metrics["loss"] / metrics["examples"]}
        share, one = float(payload["weight"]) / self.largest, float(1 << self.bits)
        if share * one <= 0.5:
            raise ValueError(f"weight rounds to 0 at {self.bits} bits (aggregate.bits)")
        values = torch.full((self.words,), share * one, dtype=torch.float64)
        for name, how, most, leaves, start, stop in self.summed:
            if start == stop:  # a tree without leaves
                continue
            part = values[start:stop]
            if leaves is None:
                part.fill_(payload[name])
            else:  # on a GPU, one copy for all leaves
                part.copy_(torch.cat([payload[name][leaf].detach().reshape(-1) for leaf in leaves]))
            low, high = torch.aminmax(part)
            if low < -most or high > most:
                raise ValueError(
                    f"{name} holds a value beyond its range of {most:g} (aggregate.range.{name})"
                )
            part.mul_((share if how == "mean" else 1.0) * one / most)
        words: np.ndarray = values.round_().to(self.dtype).numpy()
        return words.view(self.unsigned)

    def fault(self, total: np.ndarray, n: int) -> str | None:
        """Why these words cannot be the sum of n vectors; None if they can.

        Every word of such a sum lies within +- n 2^bits, and the last one, the weight, is above 0.
        """
        if total.shape != (self.words,):
            return f"the sum has {total.shape[0]:,} words where {self.words:,} are expected"
        if n > self.cohort:
            return f"the sum is of {n} vectors, and its words hold {self.cohort} at most"
        signed, most = self.signed(total), n << self.bits
        if signed.max() > most or signed.min() < -most:
            return f"a word of the sum lies beyond {n} x 2^{self.bits}, so it is no sum of {n} vectors"
        return None if signed[-1] > 0 else "the weights of the clients in the sum round to 0"

    def decode(self, total: np.ndarray, n: int) -> tuple[Update, float | None]:
        """The update of a sum of n vectors, and the mean loss if clients send it, weighted as the update.

        The update is donated. It has no counters: a sum does not give the largest.

        Args:
            total: unsigned [words], a sum without a `fault`.
            n: the number of vectors in it.
        """
        signed, one = self.signed(total), float(1 << self.bits)
        weight = float(signed[-1]) / one
        parts: dict[str, Any] = {}
        for name, how, most, leaves, start, stop in self.summed:
            values = torch.from_numpy(signed[start:stop] * (most / one / (weight if how == "mean" else 1.0)))
            parts[name] = float(values[0]) if leaves is None else dict(_leaves(values, leaves))
        update, buffers, loss = parts.pop("update"), parts.pop("buffers"), parts.pop(LOSS, None)
        return Update(update, buffers, {}, parts, n, weight * self.largest, donated=update), loss


def _leaves(
    values: Tensor, leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for name, (shape, dtype) in leaves.items():
        stop = at + torch.Size(shape).numel()
        yield name, values[at:stop].to(dtype).reshape(shape)
        at = stop
