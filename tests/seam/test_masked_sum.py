"""A pairwise-masked sum: the server sees masked vectors only, their sum is the plain sum. Bonawitz et al. 2017.

Integers modulo 2**32 make the masks cancel exactly. Keys are agreed on by Diffie-Hellman in the group of RFC 2409's
768-bit prime: enough for a test of the seam.
"""

import hashlib

import numpy as np
import pytest
import torch

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Request
from fedlens.core.random import Rng
from tests.seam.seam_kit import ENGINES, gate

PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A63A3620FFFFFFFFFFFFFFFF",
    16,
)
SIZE, MODULUS = 1000, 2**32


def plain(client: int) -> np.ndarray:
    return np.arange(SIZE, dtype=np.int64) * (client + 1)


def private(client: Client) -> int:
    return int.from_bytes(client.secrets.token("diffie-hellman"), "big")


def publish(payload: Payload, client: Client, rng: Rng) -> Outcome:
    return Outcome({"key": pow(2, private(client), PRIME).to_bytes(96, "big")})


def masked(payload: Payload, client: Client, rng: Rng) -> Outcome:
    total = plain(client.id)
    for other, key in payload["keys"].items():
        if int(other) != client.id:
            agreed = pow(int.from_bytes(key, "big"), private(client), PRIME)
            seed = int.from_bytes(hashlib.sha256(str(agreed).encode()).digest(), "big")
            mask = np.random.default_rng(seed).integers(0, MODULUS, SIZE)
            total = total + mask if client.id < int(other) else total - mask
    return Outcome({"masked": torch.from_numpy(total % MODULUS)})


def secure_sum(seen: list[torch.Tensor]):
    requests = [Request(k) for k in range(4)]
    keys = {str(reply.client): reply.payload["key"] for reply in (yield Ask("publish", requests))}
    total = np.zeros(SIZE, dtype=np.int64)
    for reply in (yield Ask("masked", requests, {"keys": keys})):
        seen.append(reply.payload["masked"].clone())
        total = (total + reply.payload["masked"].numpy()) % MODULUS
    return total


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sum_is_the_plain_sum_and_the_parts_are_not(engine: str) -> None:
    seen: list[torch.Tensor] = []
    with gate(engine, {"publish": publish, "masked": masked}) as g:
        total = g.drive(secure_sum(seen), 1)
        assert g.states.snapshot() == {}  # no secret reached what is saved
    np.testing.assert_array_equal(total, sum(plain(k) for k in range(4)) % MODULUS)
    for client, vector in enumerate(seen):
        assert (vector.numpy() != plain(client)).mean() > 0.99
