"""How clients of a site sign, and which clients of others they accept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlens.base.errors import DataError
from fedlens.core.random import Identity
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity import signing
from fedlens.identity.keys import KeyPair
from fedlens.site.client_identity import client_identity

KEYS = {name: KeyPair.make() for name in ("north", "east", "south")}
TERMS = ExperimentTerms(peers={name: key.public for name, key in KEYS.items()})
OWNERS = torch.tensor([1, 0, 1, -1, 2])  # of east, north, south


def identity_of(site: str, own: set[int], owners: Any = OWNERS) -> Identity:
    return client_identity(KEYS[site], site, TERMS, own, owners, 3)


def test_a_client_is_verified_by_the_key_of_its_site() -> None:
    north, east = identity_of("north", {0, 2}), identity_of("east", {1})
    assert north.owners == {0: "north", 1: "east", 2: "north", 4: "south"}
    signature = north.sign(b"keys")
    assert [east.verify(client, b"keys", signature) for client in (0, 2, 1, 4, 3, "x", 9)] == [
        *(True, True, False, False, False, False, False)
    ]
    assert not east.verify(0, b"other keys", signature)
    assert not east.verify(0, b"keys", b"")
    for_another_purpose = signing.sign(KEYS["north"], "ask", [b"keys"])
    assert not east.verify(0, b"keys", for_another_purpose)


@pytest.mark.parametrize(
    "owners",
    [None, "east", OWNERS.float(), OWNERS[:, None], OWNERS + 1, OWNERS - 2, [[1], [1, 2]], np.array(["a"])],
    ids=str,
)
def test_owners_that_are_none_are_a_sentence(owners: Any) -> None:
    with pytest.raises(DataError, match="does not say which site each client belongs to"):
        identity_of("north", {0, 2}, owners)


def test_owners_and_keys_that_contradict_the_site_are_refused() -> None:
    with pytest.raises(DataError, match="other clients of 'north'"):
        identity_of("north", {0})
    with pytest.raises(DataError, match="other clients of 'north'"):
        identity_of("north", {0, 2, 3})
    with pytest.raises(DataError, match="another key for it"):
        client_identity(KeyPair.make(), "north", TERMS, {0, 2}, OWNERS, 3)
