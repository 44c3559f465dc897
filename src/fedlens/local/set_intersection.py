"""Private set intersection of the parties' ids, by double masking with X25519 (RFC 7748), as operations.

A party hashes each of its ids to a point of Curve25519 and multiplies it by its secret number: it masks the id. Masks
of two parties commute, so an id that both masked is the same 32 bytes at both, and without a secret these tell nothing
of it. The label party L compares its own list, masked by k and by itself, with that of party k:

    mask      L -> k: [a_L H(i) for each own i];  k -> L: [a_k H(i)], shuffled by k
    remask    k -> L: [a_k a_L H(i)] in L's order;  L keeps [a_L a_k H(i)] in k's shuffled order
    match     L learns which of its ids k has, and intersects over k;  L -> k: places in k's shuffled list, by sorted id
    keep      k undoes its shuffle

So L learns the intersection with each party, and the others that of all parties, each of its own ids. The parties have
to follow the protocol, and whoever shares a list with another party can try ids that it guesses by adding them to its
own list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Client, Letter, Outcome, Payload
from fedlens.core.random import Rng

POINT = 32  # bytes
_PRIME, _A = 2**255 - 19, 486662  # of Curve25519: v^2 = u^3 + A u^2 + u


def require_x25519() -> None:
    """Raises `ConfigError` without the package that masks."""
    try:
        import cryptography.hazmat.primitives.asymmetric.x25519  # noqa: F401
    except ImportError:
        raise ConfigError(
            "data.parties.align = 'psi' needs cryptography, which is not installed",
            where="data.parties",
            hint="pip install 'fedlens[secure]', or set data.parties.align = 'ids', which compares ids in the open",
        ) from None


def on_curve(u: int) -> bool:
    """Whether u is the coordinate of a point of the curve, and not of its twist: u^3 + A u^2 + u is a square mod p.

    >>> on_curve(9), on_curve(2)  # 9 is the base point
    (True, False)
    """
    return _jacobi(u * (u * (u + _A) + 1), _PRIME) == 1


def _jacobi(a: int, n: int) -> int:
    """The Jacobi symbol by reciprocity: four times as fast here as a power."""
    a, sign = a % n, 1
    while a:
        twos = (a & -a).bit_length() - 1
        if twos & 1 and n & 7 in (3, 5):
            sign = -sign
        a >>= twos
        if a & 3 == 3 and n & 3 == 3:
            sign = -sign
        a, n = n % a, a
    return sign if n == 1 else 0


def points_of(ids: Iterable[str]) -> Tensor:
    """The point of each id, uint8 [n, 32]: SHA-256 of the id, hashed on until it lies on the curve.

    Every 32 bytes are a point of the curve or of its twist, and X25519 multiplies both. But a masked point stays on its
    side, so half of all guesses of an id could be ruled out without its secret.

    >>> points_of(["a", "b"]).shape, bool((points_of(["a"]) == points_of(["a"])).all())
    (torch.Size([2, 32]), True)
    """
    return _rows([_point(text) for text in ids])


def _point(text: str) -> bytes:
    digest = hashlib.sha256(text.encode()).digest()
    while not on_curve(u := int.from_bytes(digest, "little") % 2**255 % _PRIME):
        digest = hashlib.sha256(digest).digest()
    return u.to_bytes(POINT, "little")


def masked(points: Tensor, secret: bytes) -> Tensor:
    """These points times a secret number of 32 bytes, uint8 [n, 32]. Raises `ValueError` for a point of low order.

    >>> first, second = b"1" * 32, b"2" * 32
    >>> points = points_of(["a", "b"])
    >>> torch.equal(masked(masked(points, first), second), masked(masked(points, second), first))
    True
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    key = X25519PrivateKey.from_private_bytes(secret)
    return _rows([key.exchange(X25519PublicKey.from_public_bytes(point)) for point in _bytes(points)])


def _rows(points: Sequence[bytes]) -> Tensor:
    return torch.tensor(bytearray(b"".join(points)), dtype=torch.uint8).reshape(-1, POINT)


def _bytes(points: Tensor) -> list[bytes]:
    data = points.cpu().numpy().tobytes()
    return [data[at : at + POINT] for at in range(0, len(data), POINT)]


@dataclass(frozen=True)
class Align:
    """The operations of the intersection; each party's state has `positions` at the end, those of its rows in it.

    `positions` [m] int64 follow the sorted ids, so row i is the same example at all parties. The shuffles and secret
    numbers come from the clients' secrets. If not `private`, ids travel unmasked, as hashes.
    """

    labels_at: int
    others: tuple[int, ...]
    private: bool

    def mask(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """The own list, masked, in the own order at the label party and shuffled at the others; `repeated` ids."""
        ids, own = client.data.ids, client.id == self.labels_at
        repeated = {"repeated": len(ids) - len(set(ids))}
        if own and not self.private:
            return Outcome(repeated)
        points = points_of(ids if own else [ids[at] for at in _shuffle(client).tolist()])
        points = masked(points, _secret(client)) if self.private else points
        to = self.others if own else self.labels_at
        return Outcome(repeated, letters=[Letter(to, {"points": points})])

    def remask(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Masks the lists of the others: the label party keeps them, the others send its own back."""
        twice = [
            (sender, masked(content["points"], _secret(client))) for sender, content in payload["letters"]
        ]
        if client.id == self.labels_at:
            return Outcome({}, {**client.state, "twice": twice})
        return Outcome({}, letters=[Letter(self.labels_at, {"points": points}) for _, points in twice])

    def match(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """At the label party: the rows that all have, by id; `shared`, how many. The others get their places."""
        ids, lists = client.data.ids, {k: content["points"] for k, content in payload["letters"]}
        if missing := [k for k in self.others if k not in lists]:
            raise ValueError(f"party {missing[0]} has not sent its list")
        opened = [] if self.private else _bytes(points_of(ids))
        places, common = {}, set(range(len(ids)))
        for k, theirs in dict(client.state["twice"]).items() if self.private else lists.items():
            at = {point: place for place, point in enumerate(_bytes(theirs))}
            ours = _bytes(lists[k]) if self.private else opened
            places[k] = [at.get(point, -1) for point in ours]
            common &= {row for row, place in enumerate(places[k]) if place >= 0}
        rows = sorted(common, key=lambda row: ids[row])
        letters = [
            Letter(k, {"places": torch.tensor([found[row] for row in rows], dtype=torch.int64)})
            for k, found in places.items()
        ]
        kept = {name: value for name, value in client.state.items() if name != "twice"}
        return Outcome(
            {"shared": len(rows)},
            {**kept, "positions": torch.tensor(rows, dtype=torch.int64)},
            letters=letters,
        )

    def keep(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """At the others: undoes the shuffle."""
        ((_, content),) = payload["letters"]
        return Outcome({}, {**client.state, "positions": _shuffle(client)[content["places"].cpu()]})


def _secret(client: Client) -> bytes:
    return client.secrets.token("set-intersection", POINT)


def _shuffle(client: Client) -> Tensor:
    """The secret order in which a party sends its list, int64 [n]."""
    seed = int.from_bytes(client.secrets.token("set-intersection.order", POINT), "little")
    return torch.from_numpy(np.random.default_rng(seed).permutation(len(client.data.ids)))
