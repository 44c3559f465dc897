"""The invitation of a site: where the server is, its root, and a secret that works once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from fedlens.base.errors import IdentityError
from fedlens.identity import authority
from fedlens.identity.plain_message import read_message, write_message


@dataclass(frozen=True)
class Invitation:
    """What the operator sends to a site, as a file or a line to paste. It is a secret until it is used.

    Attributes:
        federation, host, port: which server.
        root: the root certificate in DER.
        name: the site's name, which the operator chose.
        secret: 32 random bytes, never shown.
        expires: in seconds since 1970.
    """

    federation: str
    host: str
    port: int
    root: bytes
    name: str
    secret: bytes = field(repr=False)
    expires: int

    def text(self) -> str:
        """One line of JSON, with the secret."""
        return write_message({each.name: vars(self)[each.name] for each in fields(self)}).decode()

    @classmethod
    def read(cls, text: str | bytes, now: float) -> Invitation:
        """The invitation in a text. Raises `IdentityError` if it is damaged or has expired."""
        kinds = {"federation": str, "host": str, "port": int, "root": bytes, "name": str, "secret": bytes}
        content = text.encode() if isinstance(text, str) else text
        read = cls(**read_message(content.strip(), {**kinds, "expires": int}, "the invitation"))
        for name in (read.name, read.federation):
            authority.check_name(name)
        authority.host_name(read.host)
        if now > read.expires:
            what = f"the invitation expired on {authority.day(read.expires)}"
            raise IdentityError(what, hint="ask for a new invitation")
        return read
