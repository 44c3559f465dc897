"""Fetches the experiment that the server proposes, as text for people to read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from fedlens.base.errors import FedlensError
from fedlens.core.wire.message import Message, MessageError
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.site.approvals import Approvals
from fedlens.site.connection import ServerConnection
from fedlens.site.contract import read_contract
from fedlens.site.review import Review
from fedlens.site.settings import SITE_FILE, SiteSettings
from fedlens.site.site_log import CONTACT


def proposed_experiment(
    folder: Path,
    passphrase: bytes | None = None,
    seconds: float = 60.0,
    say: Callable[[str], None] = lambda sentence: None,
) -> Review | None:
    """What the server proposes now; None if it has no experiment. Nothing that it names is opened or imported.

    Args:
        folder: that of the site.
        passphrase: of the keys, if they are encrypted.
        seconds: how long to wait for the server.
        say: gets a sentence when the server does not answer at once.

    Raises `FedlensError` if the server cannot be reached or does not serve this site, and `ConfigError` for an
    experiment that sites refuse.
    """
    settings, keys = SiteSettings.read(folder / SITE_FILE), SiteKeys(folder / "keys", passphrase)
    most, troubles = settings.compute.max_message * 2**20, list[str]()

    def failed(trouble: str) -> None:
        if not troubles:
            say(f"tried again for {seconds:g} s: {trouble}")
        troubles.append(trouble)

    async def fetch() -> Message | None:
        connection = ServerConnection(
            keys,
            lambda: client_context(keys.folder, passphrase),
            most,
            failed,
            heard=lambda: (folder / CONTACT).touch(0o600),
        )
        try:
            async with asyncio.timeout(seconds):
                received = await connection.experiment()
        except TimeoutError:
            hint = "'fedlens site check --network' says which step fails"
            where = f"{keys.host}:{keys.port}"
            raise FedlensError(
                f"the server cannot be reached: {troubles[-1] if troubles else 'it does not answer'}",
                where=where,
                hint=hint,
            ) from None
        finally:
            await connection.close()
        return None if received is None else received[0]

    if (message := asyncio.run(fetch())) is None:
        return None
    text = message.details.get("settings")
    coded = text.encode(errors="surrogatepass") if isinstance(text, str) else b""
    digest = hashlib.sha256(coded).hexdigest() if coded else None
    if message.purpose != "experiment" or message.details.get("contract") != digest:
        raise MessageError("mismatch", "the server's message is no experiment", hint="tell the operator")
    terms = ExperimentTerms.from_plain(message.details.get("terms"))
    contract, approvals = read_contract(str(text), settings), Approvals.of(folder, settings)
    return Review(contract, terms, message.fields.run, approvals)
