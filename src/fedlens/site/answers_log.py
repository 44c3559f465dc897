"""The log of what a site was asked: an answer is on the disk before it is sent, and no line is ever taken back.

`asked.jsonl` is a `fedlens.files.chained_log.ChainedLog` with a line an ask, answered or not. A line with a `kind` is
of something else: "fields" names what an answer has, "certificate" is one of either side; other lines name both by
their `id`. "approved" and "rejected" are decisions, "rules" is what `site.toml` says at a start, with its SHA-256,
"exclude" what the exclusion list is after a change. The bytes of an answer lie in a file of their own, until the next
ask shows that the server has them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import DataError, DecodingError, FedlensError, RunFailed
from fedlens.base.parse_text import parse_json
from fedlens.core.wire.census import SiteCensus
from fedlens.core.wire.message import Message
from fedlens.core.wire.sent_fields import census_fields
from fedlens.engines.links.post import LOGGED
from fedlens.files.atomic_files import create, open_readable, read_regular, refused, replacing, sweep
from fedlens.files.chained_log import ChainedLog
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.private_files import private_folder, write_private

NAME = "asked.jsonl"
SENT = "sent"
"""The folder of a site for the bodies of answers with `[keep] sent`."""
CHANGES = {
    "rules": ("sha256", "data", "allow", "keep", "reviewers"),
    "exclude": ("lines", "images_left_out", "sha256"),
}
"""Kinds of lines on what people at the site have changed, with the names of their values."""
_FORMER = "answers.jsonl"  # the name in folders that were made before there was `asked.jsonl`
_SEALED = ".sealed"  # ends the name of an encrypted answer
_SENT_BODY = ".safetensors"  # ends the name of a body in `sent`
_REFUSED = frozenset({"refused", "contract", "policy"})


class AskRefused(FedlensError):
    """An ask that the site does not answer. Its text stays at the site; `reason` is one of `post.REASONS`."""

    def __init__(self, reason: str, what: str) -> None:
        self.reason = reason
        super().__init__(what, where="ask")


def check_approved(missing: Callable[[], str | None] | None) -> None:
    """Raises `AskRefused` if `missing` says why the experiment may not be computed now."""
    if missing is not None and (why := missing()) is not None:
        raise AskRefused("contract", f"the experiment may not be computed: {why}")


@dataclass
class _Run:
    """The asks of a run's newest attempt that were answered: the digest of each by its `Id`."""

    attempt: int = 0
    asks: dict[tuple[int, int, int], bytes] = field(default_factory=dict)


class AnswersLog:
    """What a site was asked, and has answered.

    Args:
        folder: of the log, of mode 0700.
        bodies: a folder for the answers that the server may not have yet, of mode 0700.
        clock: gives the seconds since 1970 that a line is dated with.
        cipher: of the site, for answers that are kept encrypted.
        sent: a folder for the bodies of all answers, of mode 0700; None keeps none, and sweeps `SENT` beside `bodies`.

    A last line that is cut, as by a kill, is removed: its answer was not sent. Raises `DataError` for any other damage,
    `IdentityError` for a folder that others can read, and `RunFailed` if the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        bodies: Path,
        clock: Callable[[], float] = time,
        cipher: FileCipher | None = None,
        sent: Path | None = None,
    ) -> None:
        self._path, self._bodies, self._clock = _path_in(folder), private_folder(bodies), clock
        self._cipher, self._sent = cipher, None if sent is None else private_folder(sent)
        kept = sent or bodies.parent / SENT
        self._runs: dict[str, _Run] = {}
        self._last: dict[str, Mapping[str, Any]] = {}  # what `changed` has written, by kind
        self._waiting: set[bytes] = set()  # the asks whose answers are in files
        # The bodies in `sent` that no line has named yet.
        self._unnamed = {path.stem: path for path in kept.glob(f"*{_SENT_BODY}")}
        try:
            # Without its log a site does not know what it has answered.
            hint = "move the site's folder away, and join again with a new invitation"
            self._lines = ChainedLog(self._path, self._known, hint)
            self._sweep(kept)
        except OSError as error:
            raise refused(error, "the log of answers", self._path) from error

    @property
    def state(self) -> tuple[int, bytes]:
        """How many lines it has, and the head of the last one; zeros for an empty log. Every message tells both."""
        count = self._lines.count
        return count, self._lines.head_at(count) or bytes(32)

    def check_seen(self, seen: Any) -> None:
        """Compares the log with what the server has seen of it, as a message says: count and head, or None.

        Raises `DataError` if they differ, as after a backup was restored: the site may have answered what it does not
        know of any more.
        """
        match seen:
            case None:
                return
            case [int(count), str(head)] if (self._lines.head_at(count) or b"").hex() == head:
                return
        raise DataError(
            f"the log of this site has {self._lines.count:,} lines, and does not have what the server saw of it",
            where=str(self._path),
            hint="put back the newest log; if it is lost, the operator of the server runs 'fedlens federation accept'",
        )

    def introduce(
        self,
        chains: Mapping[str, bytes],
        run: str = "",
        experiment: str = "",
        approved_by: Collection[str] = (),
    ) -> None:
        """Writes, each once, the certificates of both sides (PEM), and who approved the experiment of a run.

        Raises `RunFailed` if the disk refuses.
        """
        now = int(self._clock())
        about = {"run": run, "experiment": experiment, "approved_by": sorted(approved_by)}
        try:
            for name, chain in chains.items():
                self._lines.once("certificate", {"of": name, "chain": chain.decode()}, now)
            if run:
                self._lines.once("experiment", about, now)
        except OSError as error:
            raise refused(error, "the log of asks", self._path) from error

    def census(self, run: str, census: SiteCensus) -> None:
        """Writes once what a census tells the server, without values. Raises `RunFailed` if the disk refuses."""
        values = {
            "run": run,
            "clients": len(census.clients),
            "examples": sum(each.examples for each in census.clients),
            "channels_summed": 0 if census.sums is None else len(census.sums.values),
            "bytes": census.bytes,
            "fields": census_fields(census),
        }
        try:
            self._lines.once("census", values, int(self._clock()))
        except OSError as error:
            raise refused(error, "the log of asks", self._path) from error

    def changed(self, kind: str, values: Mapping[str, Any], run: str = "") -> None:
        """Writes a line of `CHANGES`, with the run if it is of one, if its values are not those of the last one.

        Raises `RunFailed` if the disk refuses.
        """
        if values != self._last.get(kind) and (any(values.values()) or kind in self._last):
            self.event(kind, **({"run": run} if run else {}), **values)
            self._last[kind] = values

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    # -- reading --------------------------------------------------------------------------------------------------

    def _known(self, values: Mapping[str, Any]) -> None:
        if "kind" in values:
            if (kind := values["kind"]) in CHANGES:
                self._last[kind] = {name: values[name] for name in CHANGES[kind] if name in values}
            return
        self._unnamed.pop(values.get("answer", ""), None)
        run = self._runs.setdefault(values["run"], _Run())
        if values["attempt"] > run.attempt:
            run.attempt, run.asks = values["attempt"], {}
        if values["attempt"] < run.attempt:
            return
        digest = bytes.fromhex(values["ask"])
        # A later one under the same number was refused.
        run.asks.setdefault((values["round"], values["exchange"], values["slot"]), digest)
        if self._body(digest).exists():
            self._waiting.add(digest)

    def _body(self, ask: bytes) -> Path:
        """The file of a stored answer, with a suffix if it is encrypted."""
        path = self._bodies / ask.hex()
        return sealed if (sealed := path.with_suffix(_SEALED)).exists() else path

    def _sweep(self, sent: Path) -> None:
        """Removes what a kill left: answers and bodies that are not in the log, and temporary files."""
        sweep(self._bodies)
        named = {digest.hex() for digest in self._waiting}
        for path in self._bodies.iterdir():
            if path.stem not in named:
                path.unlink()
        if sent.is_dir():
            sweep(sent)
        for path in self._unnamed.values():
            path.unlink(missing_ok=True)
        self._unnamed = {}

    # -- answers --------------------------------------------------------------------------------------------------

    def find(self, ask: Message) -> mmap.mmap | bytes | None:
        """The stored answer to this very ask, head and body; None if it was not answered.

        Raises `AskRefused` if another ask was answered under its `Id` and attempt, if its attempt is over, or if the
        server has acknowledged the answer.
        """
        fields = ask.fields
        run = self._runs.get(fields.run, _Run())
        if fields.attempt < run.attempt:
            raise AskRefused("refused", f"an ask of attempt {fields.attempt}, and there was {run.attempt}")
        if fields.attempt > run.attempt:
            return None
        answered = run.asks.get((fields.round, fields.exchange, fields.slot))
        if answered is None:
            return None
        if answered != ask.digest:
            raise AskRefused("refused", "another ask was answered under the same number")
        if ask.digest not in self._waiting or not self._body(ask.digest).exists():  # or purged
            raise AskRefused("refused", "the server has acknowledged the answer")
        return self._stored(ask.digest)

    def _stored(self, ask: bytes) -> mmap.mmap | bytes:
        with open_readable(path := self._body(ask)) as file:
            if path.suffix == _SEALED:
                return self._opened(file.read(), ask, path)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _opened(self, content: bytes, ask: bytes, path: Path) -> bytes:
        assert self._cipher is not None
        try:
            return self._cipher.open(content, "answer", ask.hex())
        except DecodingError as error:
            hint = "the server goes on without this answer"
            what = f"a stored answer cannot be read: {error.what}"
            raise RunFailed(what, where=str(path), hint=hint) from error

    def keep(
        self,
        ask: Message,
        answer: Message,
        body: bytes,
        about: Mapping[str, Any] | None = None,
        sealed: bool = False,
    ) -> mmap.mmap | bytes:
        """Writes an answer and its line to the disk, and returns the answer's bytes, which may now be sent.

        Args:
            ask: for which `find` returns None.
            answer: made with `head` as that of the log.
            body: of the answer.
            about: as in `note`.
            sealed: encrypt it on the disk, as that of a secure sum, whose shares would open the sum of others, and
                keep no body in `sent`.

        Raises `RunFailed` if the disk refuses; nothing is answered then, and the log is as before.
        """
        path, sent = self._bodies / ask.digest.hex(), None
        parts = [answer.head, body]
        if sealed:
            assert self._cipher is not None
            path = path.with_suffix(_SEALED)
            parts = [self._cipher.seal(b"".join(parts), "answer", ask.digest.hex())]
        try:
            with replacing(path) as temporary, open(create(temporary, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
                os.fsync(file.fileno())
            if self._sent is not None and body and not sealed:
                sent = self._sent / f"{answer.digest.hex()}{_SENT_BODY}"
                write_private(sent, body)
            self.note(ask, answer, len(body), about)
        except RunFailed:
            _remove(path, sent)
            raise
        except OSError as error:
            _remove(path, sent)
            raise refused(error, "an answer", self._path) from error
        return self._stored(ask.digest)

    def note(
        self, ask: Message, answer: Message, size: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the line of an ask that was answered or refused to the disk. An answer without a body may go out.

        Args:
            ask, answer: both messages.
            size: bytes of the answer's body.
            about: more plain values for the line; `fields` are the names and shapes in the body.

        Raises `RunFailed` if the disk refuses; the log is as before.
        """
        given = dict(about or {})
        fields: Sequence[str] = given.pop("fields", ())
        reason, now, lines = answer.details.get("reason"), int(self._clock()), ask.details.get("log_lines")
        failed = "refused" if reason in _REFUSED else "failed"
        values = {
            **given,
            **{name: value for name, value in ask.fields._asdict().items() if name in LOGGED},
            "decision": "answered" if answer.details["outcome"] == "reply" else failed,
            "reason": reason,
            "ask": ask.digest.hex(),
            "answer": answer.digest.hex(),
            "payload": answer.fields.payload.hex(),
            "bytes": size,
            "server_head": ask.fields.head.hex(),
            "server_lines": lines if type(lines) is int else None,
            "time": now,
        }
        try:
            values["fields"] = self._lines.once("fields", {"fields": list(fields)}, now) if fields else None
            self._lines.append(values)
        except OSError as error:
            raise refused(error, "an answer", self._path) from error
        self._known(values)

    def event(self, kind: str, **values: Any) -> None:
        """Writes a line that is of no ask. Raises `RunFailed` if the disk refuses."""
        try:
            self._lines.append({"kind": kind, "time": int(self._clock()), **values})
        except OSError as error:
            raise refused(error, "the log of answers", self._path) from error

    def acknowledge(self, unsent: Collection[bytes]) -> None:
        """Removes the stored answers, except to these asks: a new ask says that the server has the others.

        The lines stay. The server sends the asks whose answers it lacks before any new one.
        """
        for digest in self._waiting - set(unsent):
            self._body(digest).unlink(missing_ok=True)
            self._waiting.discard(digest)


def note_decision(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes the line of a decision to the log of the site in a folder, also beside a running 'fedlens site start'.

    Raises `RunFailed` if the disk refuses, and `DataError` for a damaged log.
    """
    try:
        log = ChainedLog(path := _path_in(folder / "log"))
        try:
            log.append(values)
        finally:
            log.close()
    except OSError as error:
        raise refused(error, "a decision", path) from error


def decisions(folder: Path, experiment: str) -> list[dict[str, Any]]:
    """The lines of decisions on an experiment in the log of a site; none if nobody has rejected anything here.

    It does not verify the chain, which each start does. Raises `DataError` for such a line that cannot be read.
    """
    path, found = folder / "log" / NAME, []
    content = read_regular(path) if path.exists() else b""
    for line in content.splitlines() if b'"kind":"rejected"' in content else ():
        if not any(kind in line for kind in (b'"kind":"rejected"', b'"kind":"approved"')):
            continue
        try:
            values = parse_json(line)
        except ValueError:
            raise DataError("the log is damaged in the line of a decision", where=str(path)) from None
        if values["experiment"] == experiment:
            found.append(values)
    return found


def _path_in(folder: Path) -> Path:
    """The path of the log in its folder, which is made."""
    path = private_folder(folder) / NAME
    if (former := folder / _FORMER).exists() and not path.exists():
        former.rename(path)
    return path


def _remove(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            path.unlink(missing_ok=True)
