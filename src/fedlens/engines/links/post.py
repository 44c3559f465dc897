"""What the engine `network` writes to sites and reads from them, over any link."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any

from fedlens.base.errors import DecodingError, FedlensError, one_line
from fedlens.core.protocol import Id, Letter, Outcome, Payload
from fedlens.core.schema import Schema
from fedlens.core.states import AT_SITE
from fedlens.core.types import forbidden
from fedlens.core.wire import plain_schema
from fedlens.core.wire.message import Caps, Message, read_payload, seal, write_payload
from fedlens.engines.links.link import Arrived, Link
from fedlens.files.atomic_files import refused
from fedlens.files.chained_log import NONE, ChainedLog
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields

REASONS = frozenset(
    {"operation", "refused", "policy", "data", "state", "memory", "disk", "busy", "stopped", "contract"}
)
"""Why a site does not reply. The text of an error stays in its log: the name of a file may be that of a patient."""
LOGGED = frozenset({"run", "attempt", "round", "exchange", "slot", "client", "operation"})
"""The fields of an ask that stand in the logs of both sides."""
_LONGEST = 128  # characters of a handle


@dataclass
class Post:
    """Seals asks, and opens what comes back.

    Args:
        link: carries the messages.
        key: the identity key of the server.
        root: SHA-256 of the root certificate.
        run: the identity of the run.
        attempt: how often the run was started; a site answers one ask under the same `Id` and attempt.
        most: bytes of the largest body that is accepted.
        log: of what became of each ask, on the disk; its head is in every message.
        seen: the state of a site's log that was seen last, as plain values, which each message to it has.
        settle: waits until the disk has what messages may now tell of.
    """

    link: Link
    key: KeyPair
    root: bytes
    run: str
    attempt: int = 0
    most: int = 2**32
    log: ChainedLog | None = None
    seen: Callable[[str], Any] = lambda site: None
    settle: Callable[[], None] = lambda: None

    def shared(self, payload: Payload) -> tuple[bytes, bytes]:
        """The body that all clients of an ask get, and its SHA-256. Settles first."""
        self.settle()
        body = write_payload(payload)
        return body, hashlib.sha256(body).digest()

    def ask(
        self,
        site: str,
        client: str,
        id: Id,
        op: str,
        payload: Payload,
        shared: tuple[bytes, bytes],
        expect: Schema,
        *,
        state: str | None,
        keep: Collection[str],
        seconds: float,
    ) -> Message:
        """Sends an ask to the site of a client.

        Args:
            state: the handle of the committed state.
            keep: the handles of its states in checkpoints.
            seconds: until the answer is late.
        """
        body, (blob, digest) = write_payload(payload), shared
        details = {
            "expect": plain_schema.to_plain(expect),
            "state": state,
            "keep": sorted(keep),
            "seconds": seconds,
            "shared_size": len(blob),
            "most": plain_schema.most_bytes(expect, self.most),
            "seen": self.seen(site),
            "log_lines": 0 if self.log is None else self.log.count,
        }
        fields = self._fields(client, id, op, digest)
        message = seal(self.key, "ask", fields, details, body)
        self.link.send(site, message, {message.fields.payload: body, digest: blob})
        return message

    def tell(self, site: str, purpose: str, details: Mapping[str, Any], payload: Payload) -> Message:
        """Sends a site a message that is no ask: "experiment" or "goodbye"."""
        body, details = write_payload(payload), {**details, "seen": self.seen(site)}
        message = seal(self.key, purpose, self._fields("", Id(0, 0, 0), "", b""), details, body)
        self.link.send(site, message, {message.fields.payload: body})
        return message

    def _fields(self, client: str, id: Id, op: str, shared: bytes) -> SignedFields:
        return SignedFields(
            self.root, self.run, self.attempt, *id, client, op, "ask",
            nonce=os.urandom(16), payload=b"", shared=shared, report=b"", ask=b"",
            head=NONE if self.log is None else self.log.head, signer=b"",
        )  # fmt: skip

    def note(
        self,
        site: str,
        ask: Message,
        answer: Message | None,
        decision: str,
        reason: str | None,
        fields: Sequence[str] = (),
    ) -> None:
        """Writes the line of an ask whose answer was taken, or was not. Raises `RunFailed` if the disk refuses.

        Args:
            decision: "taken", "failed" (the site gives no reply), "refused" (by the server), "late",
                "unused" (the exchange ended before).
            fields: the names and shapes in an answer that was taken.
        """
        if self.log is None:
            return
        asked, own, now = ask.fields, None if answer is None else answer.fields, int(time())
        values = {
            **{name: value for name, value in asked._asdict().items() if name in LOGGED},
            **{"site": site, "decision": decision, "reason": reason, "time": now, "ask": ask.digest.hex()},
            "answer": None if answer is None else answer.digest.hex(),
            "payload": None if own is None else own.payload.hex(),
            "bytes": 0 if answer is None else answer.details["size"],
            "site_head": None if own is None else own.head.hex(),
        }
        try:
            values["fields"] = self.log.once("fields", {"fields": list(fields)}, now) if fields else None
            self.log.append(values, sync=False)
        except OSError as error:
            raise refused(error, "the log of answers", self.log.path) from error

    def opened(self, ask: Message, arrived: Arrived) -> Outcome | str:
        """The outcome in an answer, not checked against the schema of the ask; or why there is none, as a sentence."""
        details = arrived.message.details
        if details.get("outcome") != "reply":
            reason = details.get("reason")
            arrived.file.close()
            if reason == "policy":
                return forbidden(ask.fields.operation)
            known = isinstance(reason, str) and reason in REASONS
            return f"the site gives no reply: {reason}" if known else "the site gives no reply"
        try:
            state = _state(details.get("state"))
            content = read_payload(arrived.body(), Caps(ask.details["most"]), "answer")
            metrics = details.get("metrics")
            if not isinstance(metrics, dict) or not isinstance(content.get("payload"), dict):
                raise DecodingError("its payload or its metrics are missing", where="answer")
            letters = [Letter(_addressees(to), letter) for to, letter in content.get("letters", ())]
            return Outcome(content["payload"], state, metrics, letters=letters)
        except (FedlensError, TypeError, ValueError) as error:
            return f"the answer is not readable: {one_line(str(error))}"


def answer_body(payload: Payload, letters: Sequence[tuple[Sequence[Any], Payload]] = ()) -> bytes:
    """The body of an answer: the payload of the operation, and its letters.

    Args:
        letters: as in `fedlens.core.protocol.Reply`.
    """
    sent = {"letters": [[list(to), content] for to, content in letters]} if letters else {}
    return write_payload({"payload": payload, **sent})


def _addressees(told: Any) -> Any:
    if not isinstance(told, list) or not all(type(one) in (int, str) for one in told):
        raise DecodingError("a letter goes to no client", where="answer.letters")
    return tuple(told)


def _state(told: Any) -> Mapping[str, Any] | None:
    """The handle of the client's new state. Raises `DecodingError` if it is none."""
    match told:
        case None:
            return None
        case {"at-site": str(handle), "bytes": int(size)} if len(told) == 2 and size >= 0:
            if 0 < len(handle) <= _LONGEST and handle.isascii() and handle.isalnum():
                return {AT_SITE: handle, "bytes": size}
    raise DecodingError("its state is no handle", where="answer.state")
