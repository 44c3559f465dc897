"""Signed decisions on experiments: who has approved which settings, for which run, until when and with which sites.

`approved/DIGEST/` in the folder of a site has one file for each reviewer: his last decision. It holds for exactly what
it names; a peer that has left changes nothing. The chained log of the site has a line for each decision that was kept:
a rejection there counts until its reviewer takes it back, also if the file is gone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.base.parse_text import parse_json
from fedlens.base.printable import printable
from fedlens.base.shell_command import quoted_command
from fedlens.core.wire.terms import MOST_PEERS, ExperimentTerms, is_day, is_days, is_digest
from fedlens.files.atomic_files import refuse_link
from fedlens.identity.authority import day
from fedlens.identity.keys import KeyPair, fingerprint_of
from fedlens.identity.private_files import private_folder, read_private, write_private
from fedlens.identity.signing import sign, verify
from fedlens.identity.site_keys import SiteKeys
from fedlens.site.answers_log import decisions, note_decision
from fedlens.site.contract import Contract
from fedlens.site.settings import SiteSettings

_PURPOSE = "decision"
LONGEST_REASON = 500


@dataclass(frozen=True)
class Matter:
    """What is decided: an experiment, as one run of one federation, at one site.

    Attributes:
        root: SHA-256 of the federation's root certificate, in hexadecimal.
        site: the site whose data are computed with.
        run: the run of the server.
        experiment: SHA-256 of the settings, in hexadecimal.
        rounds: how many rounds it has.
        until, agreement, keep_days: those of the terms.
        peers: SHA-256 of the identity key of each site that takes part, by name.
        files: SHA-256 of each file of `[files]` that the experiment names, by that name.
        rules: `SiteSettings.bound`.
    """

    root: str
    site: str
    run: str
    experiment: str
    rounds: int
    until: str | None
    agreement: str | None
    keep_days: int
    peers: Mapping[str, str]
    files: Mapping[str, str]
    rules: Mapping[str, str]

    def lapsed(self, now: Matter) -> str | None:
        """What has changed since this was approved, as a sentence; None if the approval still holds."""
        if (foreign := self.foreign(now)) is not None:
            return foreign
        for name in sorted({*self.files, *now.files}):
            if self.files.get(name) != now.files.get(name):
                return f"the approved file {printable(name, line_feeds=False)} has changed since the approval"
        keys = [key for key in sorted({*self.rules, *now.rules}) if self.rules.get(key) != now.rules.get(key)]
        if keys:
            rules = printable(_in_short(keys), line_feeds=False)
            return f"the rules of site.toml have changed since the approval: {rules}"
        new = [name for name in now.peers if name not in self.peers]
        other = [name for name in now.peers if self.peers.get(name, now.peers[name]) != now.peers[name]]
        if new or other:
            named = [f"{name} is new" for name in new] + [f"{name} has another key" for name in other]
            return f"the sites have changed since the approval: {_in_short(named)}"
        for name, thing in (("until", "the end date"), ("agreement", "the data use agreement")):
            before, after = vars(self)[name], vars(now)[name]
            if before != after:
                return f"{thing} has changed since the approval, from {before or 'none'} to {after or 'none'}"
        if now.keep_days > self.keep_days:
            days = f"from {self.keep_days:,} to {now.keep_days:,} days"
            return f"the retention at the server has grown since the approval, {days}"
        if self.run != now.run:
            return "the experiment is served as another run than the one that was approved"
        return None

    def foreign(self, now: Matter) -> str | None:
        """Why a decision on this has nothing to do with what is proposed now; None if it has."""
        if (self.root, self.site) != (now.root, now.site):
            return "the decision is for another site or another federation"
        if (self.experiment, self.rounds) != (now.experiment, now.rounds):
            return "the decision is on another experiment"
        return None


@dataclass(frozen=True)
class Decision:
    """The decision of one reviewer.

    Attributes:
        matter: what is decided.
        approves: True for an approval, False for a rejection.
        reason: of a rejection.
        reviewer: the public key (DER) of the reviewer.
        time: when it was made, in seconds since 1970.
        signature: by the reviewer's key, over all of it.
        after: the digest of the reviewer's rejection that an approval takes back; empty for none.
    """

    matter: Matter
    approves: bool
    reason: str
    reviewer: bytes
    time: int
    signature: bytes
    after: str = ""

    @classmethod
    def make(cls, key: KeyPair, matter: Matter, reason: str | None, time: float, after: str = "") -> Decision:
        """A signed decision: a rejection if there is a reason, else an approval."""
        approves, why = reason is None, printable(reason or "", line_feeds=False)[:LONGEST_REASON]
        bare = cls(matter, approves, why, key.public, int(time), b"", after if approves else "")
        return replace(bare, signature=sign(key, _PURPOSE, [bare._text()]))

    @property
    def digest(self) -> str:
        """SHA-256 of its file, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def by(self) -> str:
        """The reviewer's key in the log; see `reviewer_number`."""
        return reviewer_number(self.reviewer)

    def to_bytes(self) -> bytes:
        """The file of the decision."""
        return json.dumps({**self._plain(), "signature": self.signature.hex()}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, content: bytes) -> Decision:
        """The decision in a file. Raises `IdentityError` if it is damaged or was changed after it was signed."""
        match parsed := _parsed(content):
            case {
                "matter": matter, "approves": bool(approves), "reason": str(reason), "reviewer": str(reviewer),
                "time": int(time), "signature": str(signature),
            } if len(reason) <= LONGEST_REASON and reason == printable(reason, line_feeds=False):  # fmt: skip
                try:
                    key, signed = base64.b64decode(reviewer, validate=True), bytes.fromhex(signature)
                except ValueError:
                    raise _damaged() from None
                after = parsed.get("after", "")
                decision = cls(matter_of(matter), approves, reason, key, time, signed, str(after))
                verify(key, _PURPOSE, [decision._text()], signed)
                return decision
        raise _damaged()

    def _plain(self) -> dict[str, Any]:
        return {
            "matter": asdict(self.matter),
            "approves": self.approves,
            "reason": self.reason,
            "reviewer": base64.b64encode(self.reviewer).decode(),
            "time": self.time,
            **({"after": self.after} if self.after else {}),
        }

    def _text(self) -> str:
        return json.dumps(self._plain(), sort_keys=True, separators=(",", ":"))


def reviewer_number(key: bytes) -> str:
    """The first digits of the fingerprint of a reviewer's public key (DER), by which the log names it."""
    return fingerprint_of(key).hex()[:16]


def matter_of(value: Any) -> Matter:
    """What `asdict` made of a matter. Raises `IdentityError` for anything else."""
    if isinstance(value, Mapping) and "rules" not in value:
        raise IdentityError("an older version of fedlens made it, which bound no rules of site.toml")
    match value:
        case {
            "root": root, "site": str(site), "run": str(run), "experiment": experiment, "rounds": int(rounds),
            "until": until, "agreement": agreement, "keep_days": keep_days, "peers": dict(peers), "files": dict(files),
            "rules": dict(rules),
        } if (
            len(value) == 11 and is_days(keep_days) and is_digest(root) and is_digest(experiment)
            and (until is None or is_day(until)) and (agreement is None or is_digest(agreement))
            and len(peers) <= MOST_PEERS and all(map(is_digest, peers.values()))
            and all(map(is_digest, (*files.values(), *rules.values())))
        ):  # fmt: skip
            return Matter(
                root, site, run, experiment, rounds, until, agreement, keep_days, peers, files, rules
            )
    raise _damaged()


def _in_short(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError:
        raise _damaged() from None


def _damaged() -> IdentityError:
    return IdentityError("it is no decision on an experiment, or it is damaged")


@dataclass(frozen=True)
class Approvals:
    """The decisions that a site keeps.

    Attributes:
        folder: that of the site.
        settings: `site.toml`: how many reviewers have to approve, and the keys of those on other machines.
        root: the root certificate of the federation, in DER.
        site: the name of the site.
        identity: the public key (DER) of the site: who holds the site's keys is a reviewer.
    """

    folder: Path
    settings: SiteSettings
    root: bytes
    site: str
    identity: bytes

    @classmethod
    def of(cls, folder: Path, settings: SiteSettings) -> Approvals:
        """Those in the folder of a site that has joined."""
        keys = SiteKeys(folder / "keys")
        return cls(folder, settings, keys.root, keys.name, keys.certificate().identity)

    def matter(self, contract: Contract, terms: ExperimentTerms, run: str) -> Matter:
        """What is decided about a proposed experiment."""
        rounds, root = contract.settings.get("rounds"), hashlib.sha256(self.root).hexdigest()
        files = {name: contract.site.files[line] for name, line in contract.files().items()}
        return Matter(
            root, self.site, run, contract.digest, rounds if type(rounds) is int else 0,
            terms.until, terms.agreement, terms.keep_days, terms.fingerprints, files, self.settings.bound(),
        )  # fmt: skip

    def put(self, decision: Decision, contract: Contract | None) -> Path:
        """Keeps a decision and its line in the log, in place of an earlier one of the same reviewer; returns its path.

        With the contract it keeps the text of the experiment too. Raises `ConfigError` if the key is no reviewer's.
        """
        line: dict[str, Any] = {
            "by": self._reviewer(decision),
            "reviewer": decision.by,
            "decision": decision.digest,
        }
        experiment = decision.matter.experiment
        line |= {"experiment": experiment, "run": decision.matter.run, "time": int(time())}
        if decision.approves:  # nothing is computed without the line
            note_decision(self.folder, {"kind": "approved", **line})
        path = private_folder(private_folder(self.folder / "approved") / experiment) / f"{decision.by}.json"
        write_private(path, decision.to_bytes())
        if contract is not None:
            write_private(path.parent.with_suffix(".toml"), contract.text.encode())
        if not decision.approves:  # which ends a run at once
            note_decision(self.folder, {"kind": "rejected", "reason": decision.reason, **line})
        return path

    def keep_rejection(self, decision: Decision) -> None:
        """Keeps a rejection that was made on another machine, whatever the server proposes now.

        Raises `ConfigError` for one of another site, of a stranger, or that is not the reviewer's last decision.
        """
        here = replace(decision.matter, root=hashlib.sha256(self.root).hexdigest(), site=self.site)
        if (other := decision.matter.foreign(here)) is not None:
            raise ConfigError(other, hint="let the reviewer decide on an export of this site")
        self.check_import(decision)
        self.put(decision, None)

    def check_import(self, decision: Decision) -> None:
        """Raises `ConfigError` for an older decision than the reviewer's last one in the log.

        No clock says which of the two is the later: an approval that follows a rejection names it.
        """
        lines = decisions(self.folder, decision.matter.experiment)
        own = [line["decision"] for line in lines if line["reviewer"] == decision.by]
        if decision.digest in own[:-1]:
            what = f"{self._reviewer(decision)} has decided again since this decision was kept here"
            raise ConfigError(what, hint="let the reviewer decide on a new export")
        rejected = self.rejections(decision.matter.experiment).get(decision.by)
        if decision.approves and rejected is not None and decision.after != rejected["decision"]:
            name = rejected["by"]
            again = quoted_command("site", "review", export="FILE")
            raise ConfigError(
                f"{name} has rejected the experiment at this site, and this approval does not take that back",
                hint=f"{again} names the rejection: {name} takes it back by approving that file",
            )

    def rejections(self, experiment: str) -> dict[str, dict[str, Any]]:
        """The lines of rejections in the log that are not taken back, by `Decision.by`."""
        last = {line["reviewer"]: line for line in decisions(self.folder, experiment)}
        return {by: line for by, line in last.items() if line["kind"] == "rejected"}

    def _rejected(self, experiment: str) -> str | None:
        """Who has rejected an experiment, and why, as a sentence; None if the log has no such line."""
        for line in self.rejections(experiment).values():
            return f"the experiment {experiment[:12]} was rejected by {line['by']}: {line['reason']}"
        return None

    def missing(self, matter: Matter, now: float) -> str | None:
        """Why the experiment may not be computed, as a sentence; None if it is approved.

        Args:
            matter: what the server proposes now.
            now: seconds since 1970.
        """
        short, lapsed, known = matter.experiment[:12], "", dict[bytes, str]()
        if ExperimentTerms(matter.until).ended(now):
            return f"the last day of the experiment {short}, {matter.until} (UTC), is over"
        if (rejected := self._rejected(matter.experiment)) is not None:
            return rejected
        try:
            for decision in self._kept(matter.experiment):
                name = self._reviewer(decision)
                if not decision.approves:
                    return f"the experiment {short} was rejected by {name}: {decision.reason}"
                if (change := decision.matter.lapsed(matter)) is None:
                    known[decision.reviewer] = name
                lapsed = change or lapsed
        except (ConfigError, IdentityError) as error:
            return f"the decisions on the experiment {short} do not count: {error}"
        if len(known) >= (needed := self.settings.allow.reviewers):
            return None
        if (impossible := self.settings.too_few_reviewers()) is not None:
            return f"{len(known)} of {needed} approvals; {impossible}"
        if not known:
            return (
                f"{lapsed}; look again: fedlens site review"
                if lapsed
                else f"the experiment {short} waits for: fedlens site review"
            )
        others = needed - len(known)
        waits = "another reviewer" if others == 1 else f"{others} other reviewers"
        return (
            f"{len(known)} of {needed} approvals; waits for {waits} (approved by {', '.join(known.values())})"
        )

    def last_missing(self, experiment: str, now: float) -> str | None:
        """`missing` of what the last decision on an experiment was made on, with the rules of the site now.

        A server may propose something else.
        """
        try:
            last = max(self._kept(experiment), key=lambda each: each.time, default=None)
        except IdentityError as error:
            return f"the decisions on the experiment {experiment[:12]} do not count: {error}"
        if last is None:
            return (
                self._rejected(experiment)
                or f"the experiment {experiment[:12]} waits for: fedlens site review"
            )
        return self.missing(replace(last.matter, experiment=experiment, rules=self.settings.bound()), now)

    def replaces(self, decision: Decision) -> str | None:
        """Says which rejection of the same reviewer an approval takes the place of; None without one."""
        kept = self.rejections(decision.matter.experiment).get(decision.by) if decision.approves else None
        if kept is None:
            return None
        return f"this replaces the rejection by {kept['by']} of {day(kept['time'])}: {kept['reason']}"

    def approvers(self, matter: Matter) -> dict[str, int]:
        """When each of those approved whose approval holds for what the server proposes now, by name.

        Empty if a decision is damaged.
        """
        try:
            kept = [each for each in self._kept(matter.experiment) if each.matter.lapsed(matter) is None]
            return {self._reviewer(each): each.time for each in kept if each.approves}
        except (ConfigError, IdentityError):
            return {}

    def _kept(self, experiment: str) -> list[Decision]:
        """The decisions on an experiment. Raises `IdentityError` for a file that is damaged or was changed."""
        found = []
        refuse_link(self.folder / "approved")
        for path in sorted((self.folder / "approved" / experiment).glob("*.json")):
            try:
                found.append(Decision.read(read_private(path)))
            except IdentityError as error:
                hint = "delete the file, and decide again"
                raise IdentityError(f"{path.name}: {error.what}", where=str(path), hint=hint) from None
        return found

    def _reviewer(self, decision: Decision) -> str:
        """The name of who decided. Raises `ConfigError` if no reviewer of this site has the key."""
        if decision.reviewer == self.identity:
            return self.site
        names = [name for name, key in self.settings.reviewers.items() if key == decision.reviewer]
        if not names:
            raise ConfigError(
                f"the key {decision.by} of a decision is none of [reviewers]",
                where=str(self.settings.path),
                hint="add the key of the reviewer there, or delete the decision",
            )
        return names[0]
