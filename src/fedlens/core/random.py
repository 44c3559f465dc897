"""Seeds, random generators and client secrets. Importing this module does not import torch or numpy.

Every random number of a run is derived from (run seed, round, exchange, slot, client, purpose), so it does not
depend on which worker did the work or in which order. Secrets differ: a server that knows the seed must not be able
to compute a mask. In deployment they are operating-system entropy, created at the client and never sent. Only a
simulation, which must be reproducible, derives them from a key.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # the settings derive seeds, and `fedlens --help` must not import torch
    import numpy as np
    import torch

    from fedlens.core.types import ClientId


_OPERATION = "op"  # in the key of an operation's `Rng`


def derive(*parts: int | str) -> int:
    """A 63-bit seed from any sequence of numbers and words; the same on every machine.

    >>> derive(0, "select", 3) == derive(0, "select", 3) != derive(0, "select", 4)
    True
    """
    # A list, which is faster here than a generator: this runs several times for each client of a round.
    text = "\x1f".join(
        [f"i{part}" if type(part) is int else f"{type(part).__name__[0]}{part}" for part in parts]
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Rng:
    """A node in the tree of seeds. It has no state: each call for the same purpose restarts the same stream.

    To draw new numbers in each step, create a generator once and keep it: `context.saved` of a client rule.

    >>> import torch
    >>> rng = Rng((0, "round", 1))
    >>> torch.equal(torch.rand(2, generator=rng.torch("x")), torch.rand(2, generator=rng.torch("x")))
    True
    """

    key: tuple[int | str, ...]

    def child(self, *parts: int | str) -> Rng:
        """The node below this one."""
        return Rng((*self.key, *parts))

    @classmethod
    def of_operation(cls, seed: int, round: int, exchange: int, slot: int, client: int | str) -> Rng:
        """The node of one operation: the training seed, and which request of which ask it answers."""
        return cls((seed, _OPERATION, round, exchange, slot, client))

    def of_client(self, each_round: bool = True) -> Rng:
        """The node of an operation's client in its round, whatever the exchange, the slot and the worker.

        Without `each_round` it is the same in all rounds, for what a client draws once.

        A protocol whose forward and backward passes are two asks draws the same batch in both. All asks of a round
        share this node, so take a `child` for each step. Raises `ValueError` for a node that is not an operation's.

        >>> forward, backward = Rng.of_operation(0, 3, 0, 5, 7), Rng.of_operation(0, 3, 1, 0, 7)
        >>> forward == backward, forward.of_client().child("step", 2) == backward.of_client().child("step", 2)
        (False, True)
        """
        if len(self.key) != 6 or self.key[1] != _OPERATION:
            raise ValueError(
                f"Rng{self.key} is not the rng of an operation. Call of_client() on the `rng` that the engine passes "
                "to the operation, and child() on its result."
            )
        seed, _, round, _, _, client = self.key
        return Rng((seed, "client", round, client) if each_round else (seed, "client", client))

    def of_round(self) -> Rng:
        """The node of an operation's round, the same at all clients: for batches that they draw together.

        >>> Rng.of_operation(0, 3, 0, 5, 7).of_round() == Rng.of_operation(0, 3, 1, 0, 2).of_round()
        True
        """
        seed, _, round, _ = self.of_client().key
        return Rng((seed, "round", round))

    def seed_torch(self, device: torch.device) -> None:
        """Starts PyTorch's global generators, which dropout draws from: the processor's, and that of a GPU `device`."""
        import torch

        torch.default_generator.manual_seed(self.seed("torch"))
        if device.type == "cuda":
            torch.cuda.manual_seed(self.seed("torch"))

    def seed(self, purpose: str) -> int:
        """The seed for one purpose, below 2**63."""
        return derive(*self.key, purpose)

    def torch(self, purpose: str) -> torch.Generator:
        """A new CPU generator for one purpose, at the start of its stream."""
        import torch

        generator = torch.Generator()
        generator.manual_seed(self.seed(purpose))
        return generator

    def numpy(self, purpose: str) -> np.random.Generator:
        """A new numpy generator for one purpose, at the start of its stream."""
        import numpy as np

        return np.random.default_rng(self.seed(purpose))


@dataclass(frozen=True)
class SystemRng(Rng):
    """A node whose numpy generators start from 256 bits of entropy each time, so that no seed repeats what they draw.

    For draws that nobody may foresee and whose numbers nobody sees, such as a secret cohort: the generator itself is
    not a cryptographic one.

    >>> rng = SystemRng((), os.urandom)
    >>> bool(rng.numpy("select").integers(2**62) == rng.numpy("select").integers(2**62))
    False
    """

    entropy: Callable[[int], bytes]

    def numpy(self, purpose: str) -> np.random.Generator:
        """A new generator, unlike any before."""
        import numpy as np

        return np.random.default_rng(int.from_bytes(self.entropy(32)))


@dataclass(frozen=True)
class Identity:
    """How a client signs what it tells other clients, and verifies what they sign. The default says: not signed.

    Without signatures, an active server can invent peers, and read the vectors of clients that share keys with them.

    Attributes:
        sign: the signature of bytes, by the long-lived key of this client's site.
        verify: whether a signature of bytes is that client's.
        owners: the site of each client that this one accepts in a cohort; None accepts all.
        min_cohort: how many sites a sum must be of.
    """

    sign: Callable[[bytes], bytes] = lambda message: b""
    verify: Callable[[ClientId, bytes, bytes], bool] = lambda client, message, signature: signature == b""
    owners: Mapping[ClientId, str] | None = None
    min_cohort: int = 0


UNSIGNED = Identity()


@dataclass(frozen=True)
class Secrets:
    """Secret bytes of a client, by name. A name has the same bytes as long as the client exists.

    With `simulation=None`, the deployed case, the bytes are operating-system entropy. A simulation passes a key
    instead, so that a run can be repeated. A `Secrets` cannot be pickled, so it never leaves its process. `identity`
    signs with the key of a site; a simulation has none.

    >>> own = Secrets()
    >>> first = own.token("mask")
    >>> own.token("mask") == first, Secrets().token("mask") == first
    (True, False)
    >>> own.forget("mask")
    >>> own.token("mask") == first
    False
    """

    simulation: tuple[int | str, ...] | None = None
    identity: Identity = UNSIGNED
    _known: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)
    _used: dict[str, float] = field(default_factory=dict, repr=False)  # by name, when it was read last

    def token(self, name: str, length: int = 32) -> bytes:
        """`length` secret bytes under this name."""
        if self.simulation is not None:
            key = derive("secret", *self.simulation, name)
            return hashlib.shake_256(f"{key}|{name}".encode()).digest(length)
        self._used[name] = time.monotonic()
        return self._known.setdefault((name, length), os.urandom(length))

    def forget(self, beginning: str, unused: float = 0.0) -> None:
        """Deletes the secrets whose names begin so, if they were not read for `unused` seconds.

        A simulation's secrets follow from its key, so nothing can delete them.
        """
        before = time.monotonic() - unused
        for name, length in list(self._known):
            if name.startswith(beginning) and self._used[name] <= before:
                del self._known[name, length]

    def __repr__(self) -> str:
        return "Secrets(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client's secrets never leave the client: take them out of what you send or save")


@contextmanager
def random_state_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restores the global random state at the end, and that of `device` if it is a GPU.

    >>> import torch
    >>> with random_state_kept():
    ...     first = torch.rand(1)
    >>> torch.equal(torch.rand(1), first)
    True
    """
    import torch

    before = torch.get_rng_state()
    gpu = device if device is not None and device.type == "cuda" else None
    before_there = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if gpu is not None and before_there is not None:
            torch.cuda.set_rng_state(before_there, gpu)
