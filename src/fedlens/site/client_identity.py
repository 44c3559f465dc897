"""How the clients of a site sign what they tell those of other sites, and whom they accept: the approved peers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from fedlens.base.errors import DataError, IdentityError
from fedlens.core.random import Identity
from fedlens.core.types import ClientId
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity import signing
from fedlens.identity.keys import KeyPair

PURPOSE = "round-keys"


def client_identity(
    key: KeyPair, site: str, terms: ExperimentTerms, own: Collection[int], owners: Any, min_cohort: int
) -> Identity:
    """The identity of the clients of a site.

    Args:
        key: the identity key of the site.
        site: its name.
        terms: those that were approved; their peers alone own clients.
        own: the rows of the site's clients.
        owners: of the server: int64 [clients], the place of each row's site among the sorted names of the peers; -1 for
            a site that is none of them.
        min_cohort: how many sites a sum must be of.

    Raises `DataError` if the owners are not readable, or contradict the rows of this site.
    """
    peers, keys = sorted(terms.peers), terms.peers
    try:
        places = np.asarray(owners)
        if places.dtype != np.int64 or places.ndim != 1 or not ((places >= -1) & (places < len(peers))).all():
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            "the server does not say which site each client belongs to",
            where="roster",
            hint="ask the operator to update the server, and to serve the experiment again",
        ) from None
    names: dict[ClientId, str] = {row: peers[at] for row, at in enumerate(places.tolist()) if at >= 0}
    if {row for row, name in names.items() if name == site} != set(own) or keys.get(site) != key.public:
        raise DataError(
            f"the server counts other clients of '{site}' than this site has, or names another key for it",
            where="roster",
            hint="compare the fingerprints of the peers in 'fedlens site review' with the operator",
        )

    def verify(client: ClientId, message: bytes, signature: bytes) -> bool:
        try:
            signing.verify(keys[names[client]], PURPOSE, [message], signature)
        except (IdentityError, KeyError):
            return False
        return True

    return Identity(lambda message: signing.sign(key, PURPOSE, [message]), verify, names, min_cohort)
