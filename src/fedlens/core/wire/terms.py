"""The terms of an experiment, which sites approve beside its settings: last day, agreement, sites, retention."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from fedlens.base.errors import DecodingError, FedlensError, one_line
from fedlens.identity.authority import check_name
from fedlens.identity.keys import fingerprint_of, public_key

MOST_PEERS = 10_000
"""The most sites of an experiment."""
DEFAULT_DAYS, MOST_DAYS = 365, 36_500
"""The days of retention at a server that was told nothing else, and the most."""
_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ExperimentTerms:
    """What a server says of an experiment beside its settings.

    Attributes:
        until: the last day, in UTC, as "2027-01-31"; None if it has no end.
        agreement: SHA-256 of the data use agreement, in hexadecimal; None without one.
        peers: the sites that take part: the public identity key (DER) by the name of the site.
        keep_days: days after the last event of the run until its server purges it.
    """

    until: str | None = None
    agreement: str | None = None
    peers: Mapping[str, bytes] = field(default_factory=dict)
    keep_days: int = DEFAULT_DAYS

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each site's identity key, in hexadecimal, by name."""
        return {name: fingerprint_of(key).hex() for name, key in sorted(self.peers.items())}

    def ended(self, now: float) -> bool:
        """Whether the last day is over at a time, in seconds since 1970.

        >>> ExperimentTerms("1970-01-02").ended(2 * 86400 - 1), ExperimentTerms("1970-01-02").ended(2 * 86400)
        (False, True)
        """
        return self.until is not None and datetime.fromtimestamp(now, UTC).date().isoformat() > self.until

    def to_plain(self) -> dict[str, Any]:
        """The terms as texts, for the details of a message."""
        peers = {name: base64.b64encode(key).decode() for name, key in self.peers.items()}
        return {**vars(self), "peers": peers}

    @classmethod
    def from_plain(cls, told: Any) -> ExperimentTerms:
        """The terms in a message, whose sender is not trusted.

        Raises `DecodingError` for anything that `to_plain` does not make, and for two sites with one key.

        >>> ExperimentTerms.from_plain({"until": "31.1.2027", "agreement": None, "peers": {}, "keep_days": 90})
        Traceback (most recent call last):
        fedlens.base.errors.DecodingError: the terms are not readable: until is no date such as 2027-01-31:
          '31.1.2027' (experiment.terms); send it again.
        """
        match told:
            case {
                "until": until, "agreement": agreement, "peers": Mapping() as peers, "keep_days": keep_days,
            } if len(told) == 4:  # fmt: skip
                pass
            case _:
                raise _fault("they need until, agreement, peers and keep_days")
        if until is not None and not is_day(until):
            raise _fault(f"until is no date such as 2027-01-31: {until!r}")
        if agreement is not None and not is_digest(agreement):
            raise _fault(f"agreement is no SHA-256: {agreement!r}")
        if not is_days(keep_days):
            raise _fault(f"keep_days is no number of days: {keep_days!r}")
        if len(peers) > MOST_PEERS:
            raise _fault(f"they name {len(peers):,} sites, and at most {MOST_PEERS:,} are accepted")
        keys = {}
        for name, key in peers.items():
            try:
                check_name(name)
                keys[name] = base64.b64decode(key, validate=True)
                public_key(keys[name])
            except (FedlensError, TypeError, ValueError):
                raise _fault(f"{name!r} is no site with a P-256 key") from None
        if len(set(keys.values())) < len(keys):
            raise _fault("two sites have one key")
        return cls(until, agreement, keys, keep_days)


def is_day(text: Any) -> bool:
    """Whether a value is a date such as "2027-01-31".

    >>> [is_day(text) for text in ("2027-01-31", "20270131", "2027-02-30", 7)]
    [True, False, False, False]
    """
    try:
        return isinstance(text, str) and date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_days(value: Any) -> bool:
    """Whether a value is a number of days of retention."""
    return type(value) is int and 1 <= value <= MOST_DAYS


def is_digest(text: Any) -> bool:
    """Whether a value is a SHA-256 in hexadecimal."""
    return isinstance(text, str) and len(text) == 64 and _DIGITS.issuperset(text)


def _fault(what: str) -> DecodingError:
    return DecodingError(
        f"the terms are not readable: {one_line(what)}", where="experiment.terms", hint="send it again"
    )
