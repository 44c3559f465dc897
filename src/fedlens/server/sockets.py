"""The sockets that a server listens on: of an address, or handed over by systemd."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import MutableMapping

from fedlens.base.errors import ConfigError
from fedlens.engines.links.connections import listen

_FIRST = 3  # the first descriptor that systemd hands over, see sd_listen_fds(3)
_CONNECTIONS = 65_536
_BIND = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:]+):([0-9]{1,5})")


def listening_sockets(
    bind: str | None, port: int, environment: MutableMapping[str, str] = os.environ
) -> list[socket.socket]:
    """The sockets to listen on: those of systemd if it started this process by a socket, else new ones.

    Args:
        bind: "HOST:PORT"; without it the sockets listen at `port` of 127.0.0.1.
        port: the port that sites call, for the default.
        environment: holds `LISTEN_PID` and `LISTEN_FDS`, which are removed: a child must not take them for its own.

    Raises `ConfigError` for an address that is none, a port that is taken or not allowed, and a `bind` that would
    compete with the sockets of systemd.
    """
    inherited = _inherited(environment)
    if not inherited:
        return listen(*(("127.0.0.1", port) if bind is None else _address(bind)))
    if bind is not None:
        for each in inherited:
            each.close()
        raise ConfigError(
            "systemd hands over the socket to listen on, and --bind names another",
            where="--bind",
            hint="leave out --bind, and set ListenStream= in the socket unit",
        )
    return inherited


def allow_connections() -> None:
    """Raises the limit of open files as far as the system allows: each site has a connection, and 1024 is usual."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS if most == resource.RLIM_INFINITY else min(most, _CONNECTIONS)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _address(bind: str) -> tuple[str, int]:
    parts = _BIND.fullmatch(bind)
    if parts is None or int(parts[2]) > 65535:
        raise ConfigError(
            f"invalid address {bind!r}", where="--bind", hint="write HOST:PORT, such as 0.0.0.0:8443"
        )
    return parts[1].strip("[]"), int(parts[2])


def _inherited(environment: MutableMapping[str, str]) -> list[socket.socket]:
    process, count = environment.get("LISTEN_PID", ""), environment.get("LISTEN_FDS", "")
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    sockets = []
    for descriptor in range(_FIRST, _FIRST + int(count)):
        try:
            os.set_inheritable(descriptor, False)
            sockets.append(made := socket.socket(fileno=descriptor))
            stream = made.type == socket.SOCK_STREAM and made.family in (socket.AF_INET, socket.AF_INET6)
            listens = stream and made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            listens = 0
        if not listens:
            for each in sockets:
                each.close()
            raise ConfigError(
                f"descriptor {descriptor} of systemd is no TCP socket that listens",
                where="LISTEN_FDS",
                hint="use ListenStream= with a port and Accept=no in the socket unit",
            )
    return sockets
