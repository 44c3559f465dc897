"""A link to the sites whose census was checked: it tells the others of the experiment, and asks them nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic, time

import torch

from fedlens.base.errors import DecodingError, RunFailed
from fedlens.core.types import Payload
from fedlens.core.wire.census import SiteCensus
from fedlens.core.wire.message import Message
from fedlens.data.partition.roster import Roster
from fedlens.engines.links.link import Arrived, Link
from fedlens.engines.links.post import REASONS, Post
from fedlens.engines.network import Waits
from fedlens.files.atomic_files import refused
from fedlens.files.chained_log import ChainedLog
from fedlens.identity.authority import certificates, day, pem
from fedlens.identity.federation_folder import FederationFolder, SiteRecord
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_heads import LogHead, SiteHeads
from fedlens.server.event_log import EventLog
from fedlens.server.progress import SiteRow
from fedlens.server.serve_record import ServeRecord

_TICK = 1.0  # seconds between two looks at the federation's folder


class RoundDropped(RunFailed):
    """A site was revoked with `--drop`, and the round that has answers of it is to be repeated without them."""


@dataclass(eq=False)
class _Site:
    """A site that was told of the experiment.

    Attributes:
        identity: its public key; a new one stands for a new machine.
        since: when it was accepted.
        told: digests of the messages with the experiment.
        census: the last one that was checked.
        refused: why it is not asked: a word that it is told.
        answered: the last round in which an answer of it was taken.
    """

    identity: str
    since: float
    told: set[bytes] = field(default_factory=set)
    census: SiteCensus | None = None
    refused: str | None = None
    answered: int = -1


class CensusLink(Link):
    """Stands between an engine and the link to the sites, for one start of a run.

    It sends the experiment to every accepted site, also to one that is accepted later, and checks each census that
    comes back. Sites are there, for the engine, from a good census on. `close` leaves the link open.

    Args:
        link: carries the messages.
        registry: says which sites are accepted.
        key: the server's identity key.
        record: the run and its contract.
        log: receives what happens.
        channels: how many channels sites sum over their images; None if the experiment gives mean and std.
        roster: of a run that is resumed; `freeze` sets that of a new one.
        answers: the log of asks and what became of them, on the disk.
        clock: gives the seconds that waits are compared with.
        pixels: those of a channel of one image, if sites sum them.
        without: names of sites that are neither told nor asked.

    Attributes:
        post: seals messages of this start.
        round: of the last ask.
        largest: bytes of the largest body so far, either way.
        failures: how often each site gave no reply, by reason.
    """

    def __init__(
        self,
        link: Link,
        registry: FederationFolder,
        key: KeyPair,
        record: ServeRecord,
        log: EventLog,
        channels: int | None = None,
        roster: Roster | None = None,
        answers: ChainedLog | None = None,
        clock: Callable[[], float] = monotonic,
        pixels: int | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._link, self._registry, self._record, self._log = link, registry, record, log
        self._channels, self._pixels, self.roster, self._clock = channels, pixels, roster, clock
        root = hashlib.sha256(registry.root).digest()
        self._answers, self._heads = answers, SiteHeads(registry.folder)
        self.post = Post(
            self, key, root, record.run, record.attempt, log=answers, seen=self._seen, settle=self._settle
        )
        self._asked: dict[bytes, LogHead | None] = {}  # what each open message says that was seen of a log
        self.round, self.largest, self.failures = 0, 0, Counter[tuple[str, str]]()
        self._without = without
        self._sites: dict[str, _Site] = {}
        self._records: list[SiteRecord] = []
        self._read_at: int | None = None
        self._terms = record.terms

    # -- the four methods of a link -------------------------------------------------------------------------------

    def online(self) -> Mapping[str, float]:
        """The seconds since each site with a checked census was last heard of."""
        counted = self._counted()
        return {name: ago for name, ago in self._link.online().items() if name in counted}

    def send(self, site: str, message: Message, blobs: Mapping[bytes, bytes], /) -> None:
        """Sends a message."""
        if message.purpose == "ask":
            self.round = message.fields.round
            self.largest = max(self.largest, *map(len, blobs.values()), int(message.details.get("most", 0)))
        seen = message.details.get("seen")
        self._asked[message.digest] = None if seen is None else LogHead(*seen)
        self._link.send(site, message, blobs)

    def collect(self, seconds: float, waiting: Collection[bytes], /) -> list[Arrived]:
        """The messages that have arrived, without censuses, which are checked here.

        Raises `RoundDropped` if a site was revoked with `--drop` in a round that it answered in, and `RunFailed` after
        the last day of the run.
        """
        if self._terms.ended(time()):
            raise RunFailed(
                f"the last day of the run, {self._terms.until} (UTC), is over",
                where="--until",
                hint="'fedlens serve' with a later --until resumes it once the sites have approved that",
            )
        self._look()
        arrived = [each for each in self._link.collect(seconds, waiting) if self._follows(each)]
        others = [each for each in arrived if not self._take(each)]
        told = set[bytes]().union(*(site.told for site in self._sites.values()))
        self._asked = {one: seen for one, seen in self._asked.items() if one in waiting or one in told}
        self._drop(others)
        return others

    def close(self) -> None:
        """Writes the last lines to the disk. Leaves the link open: a goodbye, or another start, follows."""
        self._settle()

    # -- logs -----------------------------------------------------------------------------------------------------

    def _seen(self, name: str) -> list[int | str] | None:
        record = next((each for each in self._records if each.name == name), None)
        seen = None if record is None else self._heads.seen(record)
        return None if seen is None else list(seen)

    def _settle(self) -> None:
        """Once a round: no message tells of a line or a head that a power cut could take back."""
        self._heads.save()
        if (log := self._answers) is not None:
            try:
                own = pem(certificates(self._registry.folder / "server.pem"))
                log.once("certificate", {"of": "server", "chain": own.decode()}, int(time()))
                for record in self._records:
                    if record.left:
                        log.once("left", {"site": record.name, "on": day(record.left)}, int(time()))
                log.sync()
            except OSError as error:
                raise refused(error, "the log of answers", log.path) from error

    def _follows(self, arrived: Arrived) -> bool:
        """Whether the state of the site's log in a message follows from those before; suspends the site if not."""
        message, name = arrived.message, arrived.site
        record = next((each for each in self._records if each.name == name), None)
        if record is None or message.fields.ask not in self._asked:
            return True  # whoever waits for nothing of it drops it
        count, asked = message.details.get("log_lines"), self._asked[message.fields.ask]
        what, now = self._heads.fault(record, asked, count, message.fields.head), int(time())
        if what is not None:
            arrived.file.close()
            self._registry.suspend(name, what)
            self._read_at = None
            self._log.write("suspended", name, what=what)
        if (log := self._answers) is not None:
            try:
                for each in record.certificates:
                    log.once("certificate", {"of": name, "chain": each["chain"]}, now)
                if what is not None:
                    log.append({"kind": "suspended", "site": name, "reason": what, "time": now}, sync=False)
            except OSError as error:
                raise refused(error, "the log of answers", log.path) from error
        return what is None

    # -- who is there ---------------------------------------------------------------------------------------------

    def _accepted(self) -> set[str]:
        """The sites that are accepted and have not left."""
        return {record.name for record in self._records if record.state == "accepted" and not record.left}

    def _counted(self) -> dict[str, SiteCensus]:
        accepted = self._accepted()
        sites = self._sites.copy().items()
        return {name: site.census for name, site in sites if site.census is not None and name in accepted}

    def told(self) -> list[str]:
        """The accepted sites that know of the experiment and have called, also those that it is not asked of."""
        return sorted(self._accepted() & self._sites.keys() & self._link.online().keys())

    def rows(self, lost: float) -> list[SiteRow]:
        """All sites of the federation, by name; one that was silent for more than `lost` seconds is late."""
        seen, sites, rows = self._link.online(), self._sites.copy(), []
        for record in self._records:
            site, ago = sites.get(record.name), seen.get(record.name)
            clients = len(site.census.clients) if site and site.census else 0
            if record.state != "accepted":
                state, note = "refused", record.state
            elif site is not None and site.refused is not None:
                state, note = "refused", site.refused
            elif record.left:
                state, note = "late", f"left on {day(record.left)}"
            elif ago is not None and ago > lost:
                state, note = "late", ""
            else:
                state, note = "online" if clients else "expected", ""
            rows.append(SiteRow(record.name, state, ago, clients, note))
        return rows

    def gather(self, waits: Waits, sites: int | None) -> Roster:
        """Waits for the censuses of a new run, and returns the roster of those that came.

        It is complete when all accepted sites have answered and they are `min_sites`, or with `sites` as soon as so
        many have. After `patience` seconds those that answered are enough without `sites`, if they are `min_sites`.

        Raises `RunFailed` if they are fewer then.
        """
        until = self._clock() + waits.patience
        while True:
            self.collect(min(_TICK, max(0.0, until - self._clock())), ())
            self._look()  # a site may have been accepted while the last of the others answered
            here = self._counted()
            accepted = self._accepted()
            wanted = sites or waits.min_sites
            if len(here) >= wanted and (sites is not None or here.keys() == accepted):
                break
            if self._clock() >= until:
                if sites is None and len(here) >= wanted:
                    break
                raise RunFailed(
                    f"{len(here)} of {len(accepted)} accepted sites have answered, and the run needs {wanted}: "
                    f"waited {waits.patience:g} s",
                    where="engine.patience",
                    hint="ask the sites to approve the experiment, and start 'fedlens serve' again",
                )
        return Roster.of(here.values())

    def wait_for_return(self, seconds: float) -> None:
        """Waits until all accepted sites of the roster have come back or are refused, at most so many seconds."""
        assert self.roster is not None
        until = self._clock() + seconds
        while True:
            self.collect(min(_TICK, max(0.0, until - self._clock())), ())
            missing = [self._sites[name] for name in self._accepted().intersection(self.roster.sites)]
            if all(site.census or site.refused for site in missing) or self._clock() >= until:
                return

    def freeze(self, roster: Roster) -> None:
        """Tells all sites the rows of their clients, and those that are not in the roster that they are not."""
        self.roster = roster
        self._terms = replace(self._terms, peers=self._peers())
        for name, site in self._sites.items():
            if name not in roster.sites:
                site.refused, site.census = site.refused or "roster", None
            self._tell(name, site)

    # -- messages -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Reads the federation's folder if it changed, and tells accepted sites that are new of the experiment."""
        changed = (self._registry.folder / "sites").stat().st_mtime_ns
        if changed == self._read_at:
            return
        self._records = [each for each in self._registry.sites() if each.name not in self._without]
        self._propose()
        # Within a tick of the file system's clock another change would have the same time.
        self._read_at = changed if time() - changed / 1e9 > 1 else None
        for record in self._records:
            if record.left:
                self._log.warn(
                    "left", record.name, what=f"it said so on {day(record.left)}, and is not asked"
                )
            site = self._sites.get(record.name)
            known = site is not None and (site.identity, site.since) == (record.identity, record.since)
            if record.state == "accepted" and not known:
                self._sites[record.name] = site = _Site(record.identity, record.since)
                if self.roster is not None and record.name not in self.roster.sites:
                    site.refused = "roster"
                self._tell(record.name, site)

    def _peers(self) -> dict[str, bytes]:
        """The keys of the accepted sites, of those in the roster once it is frozen; suspended ones may come back."""
        among = None if self.roster is None else self.roster.sites
        return {
            record.name: bytes.fromhex(record.identity)
            for record in self._records
            if record.state in ("accepted", "suspended") and (among is None or record.name in among)
        }

    def _propose(self) -> None:
        """Computes the terms; if a site is new in them, all sites are told again, and have to approve again."""
        told, self._terms = self._terms, replace(self._terms, peers=self._peers())
        if self._terms.peers.items() <= told.peers.items():
            return
        for name, site in self._sites.items():
            site.told.clear()
            site.census = None
            self._tell(name, site)

    def _tell(self, name: str, site: _Site) -> None:
        roster, rows = self.roster, None
        if roster is not None:
            own = () if site.refused else roster.rows_of(name)
            rows = {roster.ids[row]: row for row in own}
        details = {
            "settings": self._record.contract,
            "contract": self._record.digest,
            "terms": self._terms.to_plain(),
            "rows": rows,
            "refused": site.refused,
        }
        body: Payload = {}
        if roster is not None:
            mean, std = roster.moments or (None, None)
            places = {peer: at for at, peer in enumerate(sorted(self._terms.peers))}
            owners = [places.get(each, -1) for each in roster.sites]
            body = {
                "owners": torch.tensor(owners, dtype=torch.int64),
                "examples": torch.from_numpy(roster.examples),
                "held_out": torch.from_numpy(roster.held_out),
                "mean": mean and list(mean),
                "std": std and list(std),
                "images": roster.images,
            }
        site.told.add(self.post.tell(name, "experiment", details, body).digest)

    def _take(self, arrived: Arrived) -> bool:
        """Checks a census; False for any other message."""
        message, name = arrived.message, arrived.site
        if message.purpose != "census":
            return False
        arrived.file.close()
        site, fields = self._sites.get(name), message.fields
        run = (self._record.run, self._record.attempt)
        if site is None or (fields.run, fields.attempt) != run or fields.ask not in site.told:
            return True  # of an earlier start: the site sends it again
        before, census = site.refused, None
        try:
            told = SiteCensus.from_plain(name, message.details)
            site.refused = self._fault(told)
            census = None if site.refused else told
        except DecodingError as error:
            site.refused = "census"
            self._log.write("refused", name, what=error.what)
        if census is not None and census != site.census:
            examples = sum(client.examples for client in census.clients)
            self._log.write("census", name, clients=len(census.clients), examples=examples)
        site.census = census
        if site.refused != before:
            if site.refused is not None:
                self._log.write("refused", name, what=f"its census is refused: {site.refused}")
            self._tell(name, site)
        return True

    def _fault(self, census: SiteCensus) -> str | None:
        """Why a census is not taken, as a word that the site is told."""
        if self.roster is not None:
            return "roster" if census.site not in self.roster.sites else self.roster.changed_in(census)
        if census.contract != self._record.digest:
            return "contract"
        if (sums := census.sums) is None:
            return None if self._channels is None else "sums"
        # With more pixels than its images have, one site would decide the mean of all.
        images, pixels = sum(client.examples for client in census.clients), sums.images * (self._pixels or 0)
        fits = sums.images <= images and sums.pixels == pixels and len(sums.values) == self._channels
        return None if fits else "sums"

    def _drop(self, arrived: Collection[Arrived]) -> None:
        for each in arrived:
            details, fields = each.message.details, each.message.fields
            if (site := self._sites.get(each.site)) is not None:
                site.answered = self.round  # an ask of an earlier round may be answered in this one
            if details.get("outcome") != "reply":
                told = details.get("reason")
                reason = told if isinstance(told, str) and told in REASONS else "another"
                self.failures[each.site, reason] += 1
                self._log.write(
                    "failed", each.site, reason=reason, round=fields.round, operation=fields.operation
                )
        for record in self._records:
            site = self._sites.get(record.name)
            if site is None or not (record.state == "revoked" and record.drop):
                continue
            if site.identity == record.identity and site.answered == self.round:
                for each in arrived:
                    each.file.close()
                self._log.write("dropped", record.name, round=self.round)
                raise RoundDropped(
                    f"round {self.round} is repeated without '{record.name}', which was revoked"
                )
