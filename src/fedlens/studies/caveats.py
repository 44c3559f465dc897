"""The sentences that every page, table and figure of a study carries: what its runs do not show."""

from __future__ import annotations

from collections.abc import Iterable

_NUMBERS = ("no", "one", "two", "three", "four", "five")


def nothing_learned(scale: str, rounds: Iterable[int]) -> str:
    """A sentence for the scale "smoke" whose runs have a few rounds; else empty.

    Args:
        rounds: of each run that trains.

    >>> nothing_learned("smoke", [1, 2]), nothing_learned("laptop", [2])
    ('Two rounds, nothing learned.', '')
    """
    most = max(rounds, default=0) if scale == "smoke" else 0
    if not 0 < most < len(_NUMBERS):
        return ""
    return f"{_NUMBERS[most].capitalize()} round{'s' if most > 1 else ''}, nothing learned."
