"""The status of a service for `systemctl show --property=StatusText`, which every user of the machine may call."""

from __future__ import annotations

import os
from contextlib import suppress
from socket import AF_UNIX, SOCK_DGRAM, socket


def show_status(line: str) -> None:
    """Replaces the status of this service. Does nothing without systemd, or if it does not listen.

    Source: sd_notify(3): a datagram to the socket in `NOTIFY_SOCKET`, where "@" stands for a first byte of zero.
    """
    if path := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket(AF_UNIX, SOCK_DGRAM) as end:
            end.setblocking(False)
            end.sendto(f"STATUS={line}".encode(), f"\0{path[1:]}" if path[0] == "@" else path)
