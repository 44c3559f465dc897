"""The receipt of a withdrawal: what a server has deleted of a site, signed with its identity key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedlens.base.errors import IdentityError
from fedlens.base.printable import printable
from fedlens.files.regular_file import open_regular
from fedlens.identity.authority import (
    certificates,
    check_issuer,
    check_signed_by,
    der,
    pem,
    read_chain,
    read_root,
)
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.plain_message import read_message, write_message
from fedlens.identity.signing import sign, verify
from fedlens.identity.tls import common_name, peer_of

_KINDS: dict[str, type] = {
    **{"root": bytes, "site": str, "time": int, "text": str},
    **{"chain": bytes, "signature": bytes},
}
_PURPOSE = "withdrawn"
_LARGEST = 2**20
_LATEST = 2**35  # seconds since 1970, in the year 3058: a date that can be shown


def write_receipt(federation: FederationFolder, site: str, text: str, now: float) -> bytes:
    """The receipt for a site, with the certificates of the server. Raises `IdentityError` without its passphrase."""
    root = hashlib.sha256(federation.root).digest()
    signature = sign(federation.identity(), _PURPOSE, [root, site, int(now), text])
    chain = pem(certificates(federation.folder / "server.pem"))
    about: dict[str, str | int | bytes] = {"root": root, "site": site, "time": int(now), "text": text}
    return write_message({**about, "chain": chain, "signature": signature})


def read_receipt(path: Path, root: bytes, name: str) -> tuple[str, int, str]:
    """The text of a receipt, when it was signed, in seconds since 1970, and the name of the federation.

    Raises `IdentityError` unless the server of the federation with this root certificate (DER) has signed it for the
    site of this name, and all of it.
    """
    authority = read_root(root)
    federation = printable(common_name(authority.subject), line_feeds=False)
    try:
        with open_regular(path) as file:
            values = read_message(file.read(_LARGEST + 1), _KINDS, "the receipt", _LARGEST)
    except OSError as error:
        raise IdentityError(f"it cannot be read: {error.strerror}", where=str(path)) from None
    of, site, time, text = fields = [values[each] for each in ("root", "site", "time", "text")]
    if of != hashlib.sha256(root).digest():
        raise _refused(path, f"it is of another federation than {federation}")
    if site != name:
        raise _refused(path, f"it is for another site than {name}")
    try:
        leaf, issuer = read_chain(values["chain"], "the receipt")
        if not 0 <= time < _LATEST:
            raise ValueError
        check_issuer(issuer, authority, time)
        check_signed_by(leaf, issuer)
        server = peer_of(der(leaf))
        if server.name != "server":
            raise ValueError
        verify(server.identity, _PURPOSE, fields, values["signature"])
    except (IdentityError, ValueError):
        raise _refused(path, f"the server of {federation} has not signed it, or it was changed") from None
    return text, time, federation


def _refused(path: Path, what: str) -> IdentityError:
    hint = "ask the operator for the file that 'fedlens federation withdraw' wrote"
    return IdentityError(f"the receipt is refused: {what}", where=str(path), hint=hint)
