"""A pipe, a device, a socket or a directory in the place of a file is refused, and nobody waits for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError, DataError, FedlensError
from fedlens.data.partition.partition import Partition
from fedlens.files.regular_file import NotRegularError, open_descriptor, open_regular
from fedlens.settings.config_source import read_source


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe")
    Path("folder.toml").mkdir()
    Path("link.toml").symlink_to("pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket.toml")
    listening.close()
    return {
        "a named pipe": Path("pipe.toml"),
        "a device": Path("/dev/zero"),
        "a socket": Path("socket.toml"),
        "a directory": Path("folder.toml"),
    }


def test_only_regular_files_are_opened_also_through_links(special: dict[str, Path]) -> None:
    for kind, path in special.items():
        with pytest.raises(NotRegularError, match=f"^it is {kind}, not a file$"):
            open_regular(path)
    with pytest.raises(NotRegularError, match="a named pipe"):
        open_regular(Path("link.toml"))
    Path("file").write_bytes(b"content")
    Path("good").symlink_to("file")
    with open_regular(Path("good")) as file:
        assert file.read() == b"content"
    with pytest.raises(FileNotFoundError):
        open_regular(Path("none"))


def test_a_pipe_that_nobody_reads_and_a_directory_are_not_opened_to_write(special: dict[str, Path]) -> None:
    for kind in ("a named pipe", "a socket", "a directory"):
        with pytest.raises(NotRegularError, match=f"^it is {kind}, not a file$"):
            open_descriptor(special[kind], os.O_WRONLY | os.O_APPEND)


@pytest.mark.parametrize(
    ("read", "kind"),
    [(lambda path: read_source(str(path)), ConfigError), (Partition.load, DataError)],
    ids=["recipe", "partition"],
)
def test_a_recipe_and_a_partition_are_regular_files(
    special: dict[str, Path], read: Callable[[Path], object], kind: type[FedlensError]
) -> None:
    for name, path in {**special, "a named pipe ": Path("pipe")}.items():
        with pytest.raises(kind) as refused:
            read(path)
        assert name.strip() in str(refused.value)
        assert str(path) in str(refused.value)


def test_a_name_too_long_for_a_file_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'xxx"):
        read_source("x" * 5000)
