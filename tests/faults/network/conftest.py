"""A server's end of a link, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.engines.links.https import HttpsLink
from tests.link_kit import Federation


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


@pytest.fixture
def link(federation: Federation) -> Iterator[HttpsLink]:
    with federation.link() as link:
        yield link
