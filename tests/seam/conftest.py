"""Seam tests are about numbers: their workers start quickly."""

import pytest


@pytest.fixture(autouse=True)
def _quick(quick_workers: None) -> None:
    """See `quick_workers`."""
