"""A server listens where it is told, or on the sockets of systemd."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from fedlens.base.errors import ConfigError
from fedlens.server.sockets import allow_connections, listening_sockets


def systemd(**more: str) -> dict[str, str]:
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "fedlens", **more}


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A listening socket in the place of descriptor 3, which belongs to this process."""
    made = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr("fedlens.server.sockets._FIRST", os.dup(made.fileno()))
    made.close()
    return made


def test_it_listens_on_this_machine_alone_by_default() -> None:
    (made,) = listening_sockets(None, 0, {})
    with made:
        assert made.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(("bind", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1")])
def test_it_listens_where_it_is_told(bind: str, host: str) -> None:
    (made,) = listening_sockets(bind, 443, {})
    with made:
        assert made.getsockname()[0] == host


@pytest.mark.parametrize("bind", ["127.0.0.1", ":80", "::1:80", "host:70000", "host:", "a b:c"])
def test_what_is_no_address_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        listening_sockets(bind, 443, {})


def test_it_takes_the_socket_of_systemd(first: socket.socket) -> None:
    environment = systemd()
    (made,) = listening_sockets(None, 443, environment)
    with made:
        assert made.getsockname()[1] > 0
        assert not made.get_inheritable()
    assert not environment  # no child takes it for its own


def test_the_socket_of_another_process_is_not_taken() -> None:
    (made,) = listening_sockets(None, 0, systemd(LISTEN_PID="1"))
    made.close()


def test_a_socket_of_systemd_and_an_address_contradict_each_other(first: socket.socket) -> None:
    with pytest.raises(ConfigError, match="leave out --bind"):
        listening_sockets("127.0.0.1:0", 443, systemd())


def test_a_socket_that_does_not_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket()
    monkeypatch.setattr("fedlens.server.sockets._FIRST", os.dup(made.fileno()))
    made.close()
    with pytest.raises(ConfigError, match="no TCP socket that listens"):
        listening_sockets(None, 443, systemd())


def test_a_server_may_have_more_connections_than_files_are_usually_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        allow_connections()
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert limit == (65_536 if most == resource.RLIM_INFINITY else min(most, 65_536))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
