"""The plain types that every part of the seam shares: who a client is, and what crosses the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# An int is a client of the federation, its row in the partition. A string that begins with "@" is data that the
# server holds itself: "@test", "@validation", "@train".
ClientId = int | str

# All that crosses the wire: trees, tensors, bytes, plain values, and sequences or mappings of these. No code.
Payload = Mapping[str, Any]
Metrics = dict[str, float]
