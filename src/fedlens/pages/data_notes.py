"""The card "Notes on the data and the run": what was left out, corrected or is likely a mistake, in sentences."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from fedlens.results.run import Run

SHOWN = 5  # notes that are not folded, and that the terminal shows


class Notes(NamedTuple):
    """The notes of a page: the first ones, and those that are folded."""

    first: Sequence[Markup]
    more: Sequence[Markup]


def notes_of(runs: Iterable[Run]) -> list[str]:
    """The notes of all runs, each once; those on mistakes in the data come first in each run."""
    return list(dict.fromkeys(note for run in runs for note in run.sentences("notes")))


def notes_card(notes: Sequence[str], clients: Collection[str]) -> Notes | None:
    """The notes as HTML, with each client's name in an element, so that `page_contents` finds it; None without notes.

    >>> notes_card(["skipped Ulm/<1>.png"], ["Bonn", "Ulm"])
    Notes(first=[Markup('skipped <span>Ulm</span>/&lt;1&gt;.png')], more=[])
    """
    if not notes:
        return None
    shown = [_marked(note, clients) for note in notes]
    return Notes(shown[:SHOWN], shown[SHOWN:])


def _marked(note: str, clients: Collection[str]) -> Markup:
    """A note with the clients that are quoted in it, or are a folder of a path."""
    named = sorted((name for name in clients if name and name in note), key=len, reverse=True)
    if not named:
        return escape(note)
    parts = re.split(rf"(?<![^/'\s])({'|'.join(map(re.escape, named))})(?=['/])", note)
    return Markup().join(
        Markup("<span>{}</span>").format(part) if k % 2 else escape(part) for k, part in enumerate(parts)
    )
