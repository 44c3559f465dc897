"""What an operator sees of a server: the sites now, a line of the log each minute, and warnings in time."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import FedlensError, told
from fedlens.base.systemd import show_status
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.network import NetworkEngine
from fedlens.identity.authority import not_after, read_chain
from fedlens.identity.federation_folder import FederationFolder
from fedlens.server.census_link import CensusLink
from fedlens.server.event_log import DAY, EventLog
from fedlens.server.progress import SiteRow
from fedlens.server.retention import ServedRuns, purge

MINUTE, HOUR = 60.0, 3600.0
ENDS_WITHIN = 14 * DAY
"""The operator is warned of a site's certificate that ends within this time: the site should have renewed it."""

Show = Callable[[Sequence[SiteRow]], None]


class Watch:
    """Looks at a running server once a second, in a thread of its own: see `look`.

    Args:
        registry: the federation.
        link: counts refused messages, and gets the server's new certificate after a renewal.
        passphrase: of the server's keys.
        folder: the run directory, on whose disk bodies of answers wait.
        log: receives lines and warnings.
        show: receives the sites, once a second.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        registry: FederationFolder,
        link: HttpsLink,
        passphrase: bytes | None,
        folder: Path,
        log: EventLog,
        show: Show,
        clock: Callable[[], float] = time,
    ) -> None:
        self._registry, self._link = registry, link
        self._passphrase, self._folder, self._log, self._show = passphrase, folder, log, show
        self._clock, self._identity = clock, registry.identity().fingerprint
        self._sites: CensusLink | None = None
        self._engine: NetworkEngine | None = None
        self._began = clock()
        self._lines = self._hours = 0  # how many minutes and hours have their line and their checks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedlens-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def follow(self, sites: CensusLink, engine: NetworkEngine) -> None:
        """Shows another start of the run from now on."""
        self._sites, self._engine = sites, engine

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            try:
                self.look()
            except Exception as error:  # a look that fails once ends neither the run nor the next look
                self._log.warn("error", what=told(error))

    def look(self) -> None:
        """Shows the sites; each minute it writes a line and checks disk and contacts.

        Each hour it checks certificates, and purges runs that are due.
        """
        sites, engine = self._sites, self._engine
        if sites is None or engine is None:
            return
        rows, passed = sites.rows(engine.waits.lost), self._clock() - self._began
        self._show(rows)
        if passed >= self._lines * MINUTE:
            self._lines = int(passed // MINUTE) + 1
            self._write_line(sites, engine, rows)
            self._check_disk(sites)
            for row in rows:
                # One that has left, or is refused, has a note.
                if row.clients and not row.note and row.ago is not None and row.ago > DAY:
                    self._log.warn("silent", row.name, what=f"no contact for {row.ago / HOUR:.0f} hours")
        if passed >= self._hours * HOUR:
            self._hours = int(passed // HOUR) + 1
            self._check_certificates()
            for run in ServedRuns(self._registry.folder).due(self._clock()):
                if run.path != self._folder.resolve():
                    self._log.write("purged", what=f"{run.path}: {purge(run)}")

    def _write_line(self, sites: CensusLink, engine: NetworkEngine, rows: Sequence[SiteRow]) -> None:
        states: dict[str, list[str]] = {"online": [], "late": [], "expected": [], "refused": []}
        for row in rows:
            states[row.state].append(row.name)
        refused = {f"{site}: {reason}": count for (site, reason), count in self._link.refused.copy().items()}
        failed = {f"{site}: {reason}": count for (site, reason), count in sites.failures.copy().items()}
        facts: dict[str, Any] = {**states, "messages_refused": refused, "answers_failed": failed}
        self._log.write("status", round=sites.round, answers_dropped=dict(engine.dropped), **facts)
        counts = (f"{len(names)} {state}" for state, names in states.items() if names)
        show_status(f"round {sites.round}; sites: {', '.join(counts)}")

    def _check_disk(self, sites: CensusLink) -> None:
        free = shutil.disk_usage(self._folder).free
        if sites.largest and free < 2 * sites.largest:
            what = f"{free:,} bytes are free, less than two bodies of {sites.largest:,}"
            self._log.warn("disk", what=what)

    def _check_certificates(self) -> None:
        """Renews the server's certificate if that is due, and warns of all that end soon."""
        for sentence in self._registry.warnings():
            self._log.warn("issuer", what=sentence)
        for record in self._registry.sites():
            ends = [
                not_after(read_chain(each["chain"].encode(), record.name)[0]) for each in record.certificates
            ]
            if record.state == "accepted" and ends and max(ends) - self._clock() < ENDS_WITHIN:
                left = (max(ends) - self._clock()) / DAY
                self._log.warn("certificate", record.name, what=f"its certificate ends in {left:.0f} days")
        if self._registry.identity().fingerprint != self._identity:
            self._log.warn("rotated", what="the keys of the server were rotated: start 'fedlens serve' again")
            return
        try:
            if self._registry.renew_server():
                self._link.use(self._registry.folder / "server.pem", self._passphrase)
                self._log.write("renewed", what="the server has a new certificate")
        except (FedlensError, OSError) as error:
            self._log.warn("renewal", what=f"the server's certificate cannot be renewed: {told(error)}")
