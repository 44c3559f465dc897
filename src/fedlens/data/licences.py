"""What the licence of a dataset says about passing on a model that was trained on it."""

from __future__ import annotations

import re

from fedlens.data.catalogue import CATALOGUE

UNKNOWN = "not stated"
_RESTRICTED = re.compile(
    r"passed on|non-?commercial|not for commerce|\bNC\b|\bresearch\b|terms of use|LDC", re.I
)


def restriction(dataset: str, licence: str) -> str | None:
    """A sentence that has to go with a model trained on these data; None if their licence asks for nothing more.

    It is given for data that may not be passed on, are for research only, or not for commerce.

    >>> restriction("digits", "CC BY 4.0")
    >>> restriction("camvid", CATALOGUE["camvid"].licence)
    'This model was trained on CamVid, whose licence is "CC BY-NC 4.0; for research only, never to be passed on, nor
    anything trained on it".'
    """
    if not _RESTRICTED.search(licence):
        return None
    facts = CATALOGUE.get(dataset)
    title = facts.title if facts and facts.title else dataset
    return f'This model was trained on {title}, whose licence is "{licence}".'
