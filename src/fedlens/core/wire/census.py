"""What sites tell of their data before the first round: names and numbers, no example."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.base.errors import DecodingError, one_line

MOST_EXAMPLES = 2**26
"""The most examples of a federation: who divides them takes memory for each."""
_PIXELS = 2**60


@dataclass(frozen=True)
class CountedClient:
    """A client of a site.

    Attributes:
        name: unique in the federation; of a site with one client, that of the site.
        examples, held_out: how many it trains on at most, and how many it holds out.
    """

    name: str
    examples: int
    held_out: int = 0


@dataclass(frozen=True)
class ChannelSums:
    """Sums over all pixels of a site's training images, scaled to [0, 1]: for a mean and a deviation of all sites.

    Attributes:
        images, pixels: how many images were summed, and pixels of each channel.
        values, squares: the sum of the values of each channel, and of their squares.
    """

    images: int
    pixels: int
    values: tuple[float, ...]
    squares: tuple[float, ...]


@dataclass(frozen=True)
class SiteCensus:
    """What one site tells, once before the first round, and again whenever it comes back.

    Attributes:
        site: the name of the site.
        clients: its clients.
        versions: of what it computes with, by name.
        contract: SHA-256 in hexadecimal of the experiment that it approved.
        sums: those of its images, if the experiment gives no mean.
    """

    site: str
    clients: Sequence[CountedClient]
    versions: Mapping[str, str] = field(default_factory=dict)
    contract: str = ""
    sums: ChannelSums | None = None

    def to_plain(self) -> dict[str, Any]:
        """The census as texts, numbers and lists: the details of a message.

        >>> told = SiteCensus("ward-a", [CountedClient("ward-a", 120, 30)])
        >>> told.to_plain()["clients"], SiteCensus.from_plain("ward-a", told.to_plain()) == told
        ([['ward-a', 120, 30]], True)
        """
        sums = self.sums
        return {
            "clients": [[each.name, each.examples, each.held_out] for each in self.clients],
            "versions": dict(self.versions),
            "contract": self.contract,
            "sums": sums and [sums.images, sums.pixels, list(sums.values), list(sums.squares)],
        }

    @property
    def bytes(self) -> int:
        """The bytes of its text in a message."""
        return len(json.dumps(self.to_plain(), separators=(",", ":")))

    @classmethod
    def from_plain(cls, site: str, told: Mapping[str, Any]) -> SiteCensus:
        """The census in a message of this site, whatever else the message has.

        A client is named as its site, or "SITE/..."; so no site can name a client of another one. Raises
        `DecodingError` for anything else.
        """
        clients: list[CountedClient] = []
        entries = told.get("clients")
        for entry in entries if isinstance(entries, list) else ():
            match entry:
                case [str(name), int(examples), int(held_out)] if (
                    0 <= examples <= MOST_EXAMPLES and 0 <= held_out <= MOST_EXAMPLES
                ):
                    if (
                        len(name) <= 128
                        and name.isprintable()
                        and (name == site or name.startswith(f"{site}/"))
                    ):
                        clients.append(CountedClient(name, examples, held_out))
                        continue
            raise _fault(site, f"{entry!r} is no client of it")
        names = [each.name for each in clients]
        if not clients or len(set(names)) < len(names) or len(names) > 100_000:
            raise _fault(site, "it needs clients with different names")
        if sum(each.examples + each.held_out for each in clients) > MOST_EXAMPLES:
            raise _fault(site, f"it has more than {MOST_EXAMPLES:,} examples")
        versions, contract = told.get("versions"), told.get("contract")
        if not isinstance(versions, Mapping) or not all(isinstance(v, str) for v in versions.values()):
            raise _fault(site, "its versions are no texts")
        if not isinstance(contract, str):
            raise _fault(site, "its contract is no digest")
        return cls(site, clients, dict(versions), contract, _sums(site, told.get("sums")))


def _sums(site: str, told: Any) -> ChannelSums | None:
    match told:
        case None:
            return None
        case [int(images), int(pixels), list(values), list(squares)] if (
            0 < images <= MOST_EXAMPLES and 0 < pixels <= _PIXELS
        ):
            numbers = [*values, *squares]
            # Values are in [0, 1], so no sum is below that of the squares or above the number of pixels.
            fit = len(values) == len(squares) <= 64 and all(
                isinstance(x, int | float) and -_PIXELS <= x <= 2 * _PIXELS for x in numbers
            )
            if fit and all(
                0 <= s <= v * (1 + 1e-9) <= pixels * (1 + 1e-6) for v, s in zip(values, squares, strict=True)
            ):
                return ChannelSums(images, pixels, tuple(map(float, values)), tuple(map(float, squares)))
    raise _fault(site, "its sums over images contradict each other")


def _fault(site: str, what: str) -> DecodingError:
    return DecodingError(
        f"the census of '{site}' is not readable: {one_line(what)}", where="census", hint="send it again"
    )
