"""Types that algorithms, engines and the driver share: client ids and payloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# An int is a client of the federation, its row in the partition. A string that begins with "@" is data that the
# server holds itself: "@test", "@validation", "@train". "@server" and "@server:K" hold no data: there an operation does
# the server's own work, and keeps its state, for all clients or for client K.
ClientId = int | str

# All that is sent: trees, tensors, bytes, plain values, and sequences or mappings of these. No code.
Payload = Mapping[str, Any]
Metrics = dict[str, float]


def is_client(client: ClientId) -> TypeIs[int]:
    """Whether it is a client of the federation; if not, it is data at the server.

    >>> is_client(3), is_client("@test")
    (True, False)
    """
    return not isinstance(client, str)  # a number of NumPy is a client too


def is_server(client: ClientId) -> bool:
    """Whether it is a holder without data, where an operation does the server's own work.

    >>> is_server("@server"), is_server("@server:7"), is_server("@test"), is_server(7)
    (True, True, False, False)
    """
    return isinstance(client, str) and client.partition(":")[0] == "@server"


def client_name(client: ClientId, ids: Sequence[str]) -> str:
    """The client's name among the `ids` of the partition, or the name of the data at the server."""
    return ids[client] if is_client(client) else client


class Obstacle(NamedTuple):
    """Why an operation cannot answer several calls as one: what is wrong, the setting, and what to do."""

    what: str
    where: str
    hint: str


def forbidden(op: str) -> str:
    """The reason of a failure because the site of a client does not allow the operation, now or later."""
    return f"the policy of the site does not allow '{op}'"
