"""Passphrases of keys: from the terminal without echo, a file, a descriptor or systemd; never from the command line."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import Annotated

import typer

_DESCRIPTOR = re.compile(r"/dev/fd/(\d{1,4})")

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the passphrase of the keys from a file that only you can read, or /dev/fd/N. By default it is the "
        "systemd credential fedlens-passphrase, or asked for.",
    ),
]
RootPassphraseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the passphrase of the root from a file that only you can read, or /dev/fd/N, instead of asking.",
    ),
]


def root_passphrase(what: str, file: Path | None, new: bool = False) -> bytes:
    """The passphrase of a root; see `read_passphrase`."""
    return read_passphrase(what, file, new, "--root-passphrase-file")


def read_passphrase(
    what: str, file: Path | None, new: bool = False, option: str = "--passphrase-file"
) -> bytes:
    """A passphrase: from `file`, which `option` names, if it is given, else typed, twice if it is `new`.

    Raises `IdentityError` for an empty one, two that differ, a file that others can read, and without a terminal.
    """
    from fedlens.base.errors import IdentityError

    if file is not None:
        read = _read(file)
    else:
        read = _typed(what, option)
        if new and _typed(f"{what}, once more", option) != read:
            raise IdentityError("the two passphrases differ", hint="type the same one twice")
    if not read:
        raise IdentityError(f"{what} is empty", hint="type it, or correct the file")
    return read


def key_passphrase(key: Path, file: Path | None) -> bytes | None:
    """The passphrase of the keys beside `key`; None if they are not encrypted.

    Raises `IdentityError` as `read_passphrase` does, and for a file that no key needs.
    """
    from fedlens.base.errors import IdentityError
    from fedlens.identity.keys import is_encrypted
    from fedlens.identity.private_files import service_passphrase

    if not is_encrypted(key):
        if file is not None:
            hint = "leave out --passphrase-file"
            raise IdentityError("the keys have no passphrase", where=str(key.parent), hint=hint)
        return None
    what = f"the passphrase of the keys in {key.parent}"
    if file is None and (credential := service_passphrase()) is not None:
        return credential
    return read_passphrase(what, file)


def new_passphrase(folder: Path, encrypt: bool, file: Path | None) -> bytes | None:
    """The passphrase of keys to be made in `folder`; None if they are not to be encrypted."""
    if not encrypt and file is None:
        return None
    return read_passphrase(f"a passphrase for the keys in {folder}", file, new=True)


def _read(file: Path) -> bytes:
    from fedlens.base.errors import IdentityError
    from fedlens.identity.private_files import LARGEST, read_private

    descriptor = _DESCRIPTOR.fullmatch(str(file))
    if descriptor is None:
        return read_private(file).rstrip(b"\r\n")
    try:
        with os.fdopen(int(descriptor[1]), "rb", closefd=False) as stream:
            return stream.read(LARGEST).rstrip(b"\r\n")
    except OSError as error:
        raise IdentityError(f"{file} cannot be read: {error.strerror}") from None


def _typed(what: str, option: str) -> bytes:
    from fedlens.base.errors import IdentityError

    try:  # getpass would read standard input, with echo, where there is no terminal
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return getpass.getpass(f"{what}: ").encode()
    except OSError:
        what = f"there is no terminal to ask for {what}"
        raise IdentityError(what, hint=f"name a file that has it with {option} FILE") from None
    except EOFError:
        raise IdentityError(f"{what} was not typed") from None
