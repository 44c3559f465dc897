"""Follows a run of sites: what a display shows besides rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlens.run.progress import ProgressBase


@dataclass(frozen=True)
class SiteRow:
    """A site as an operator sees it.

    Attributes:
        name: the site.
        state: "expected" before its census, "online", "late" without a sign of life for too long, or "refused".
        ago: seconds since it was last heard of; None if it never was.
        clients: how many it has in this run.
        note: why it is refused.
    """

    name: str
    state: str
    ago: float | None
    clients: int = 0
    note: str = ""


class ServeProgress(ProgressBase):
    """A listener of a run of sites, with defaults that do nothing."""

    def waiting(self, directory: Path, address: str, run: str) -> None:
        """Called when the server listens at an address, before the first census; `run` is the id that sites see."""

    def sites(self, rows: Sequence[SiteRow]) -> None:
        """Receives all sites of the federation, once a second, in another thread."""


__all__ = ["ServeProgress", "SiteRow"]
