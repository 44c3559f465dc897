"""Starts the agent of a site from its folder."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedlens.base.errors import RunFailed
from fedlens.base.systemd import show_status
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.site.agent import Agent
from fedlens.site.connection import ServerConnection
from fedlens.site.leave import left_on, refuse_left
from fedlens.site.settings import SITE_FILE, SiteLimits, SiteSettings
from fedlens.site.site_log import CONTACT, TROUBLE, keep_sentence
from fedlens.site.workplace import Proposal

_TICK = 0.5  # seconds between two looks at the folder


def agent_of(
    folder: Path, say: Callable[[str], None], *, once: bool = False, passphrase: bytes | None = None
) -> Agent:
    """The agent of the site in a folder: `asyncio.run(agent.run())` works until it is cancelled.

    Args:
        folder: of the site, with `keys` and `site.toml`.
        say: receives a line for each ask, for what a person should know, and for each new trouble with the network.
        once: end with a run.
        passphrase: of the keys, if they are encrypted.

    Raises `ConfigError` for what is wrong in `site.toml` and for a site that has left, and `IdentityError` if the site
    has no keys or others can read them.
    """
    refuse_left(folder)
    settings, keys = SiteSettings.read(folder / SITE_FILE), SiteKeys(folder / "keys", passphrase)
    most = settings.compute.max_message * 2**20
    said: str | None = None  # an earlier process may have left a trouble

    def trouble(sentence: str) -> None:
        nonlocal said
        if sentence == said:  # a server that is away fails every few seconds
            return
        said = sentence
        keep_sentence(folder / TROUBLE, sentence)
        if not agent.resting:
            say(f"the server cannot be reached, and is tried again: {sentence}")

    def heard() -> None:
        nonlocal said
        (folder / CONTACT).touch(0o600)
        if said != "":  # the next trouble is a new one
            said = ""
            keep_sentence(folder / TROUBLE, "")

    connection = ServerConnection(
        keys, lambda: client_context(keys.folder, passphrase), most, trouble, heard=heard
    )

    def read(text: str, run: str, terms: ExperimentTerms) -> Proposal:
        return Proposal.read(text, settings, keys.name, folder, run, terms, keys.identity())

    keep = settings.keep
    rules = {"sha256": settings.digest, **settings.rules()}
    limits = SiteLimits(settings.allow.min_examples, most, keep.days, keep.sent, rules)
    agent = Agent(folder, keys, connection, read, say, limits, once=once)
    return agent


def work(agent: Agent, folder: Path, settings: SiteSettings) -> bool:
    """Runs an agent until it ends, or SIGTERM or SIGINT comes, or the site in the folder leaves: then it returns True.

    An operation under way is given up.

    Raises `RunFailed` once `site.toml` says something else than `settings`, and what `Agent.run` raises. Call it in the
    main thread.
    """

    async def until_stopped() -> bool:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel, number.name)
        ended = asyncio.create_task(_until_ended(folder, settings))
        ended.add_done_callback(
            lambda done: task.cancel(
                None if done.cancelled() else str(done.exception() or "this site has left")
            )
        )
        with suppress(asyncio.CancelledError):
            await agent.run()
        return ended.done() and ended.result()

    try:
        return asyncio.run(until_stopped())
    finally:
        show_status("ended")


async def _until_ended(folder: Path, settings: SiteSettings) -> bool:
    """Waits until the site has left, and returns True. Raises `RunFailed` once its `site.toml` has changed."""
    while left_on(folder) is None:
        if (what := settings.changed()) is not None:
            raise RunFailed(what)
        await asyncio.sleep(_TICK)
    return True
