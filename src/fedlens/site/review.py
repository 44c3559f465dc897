"""What a person sees of an experiment before deciding on it, at the site or on another machine."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from time import time
from typing import Any

import tomli_w
import torch

from fedlens.algorithms.client_evaluation import disclosure
from fedlens.base.errors import ConfigError, DataError, FedlensError, IdentityError
from fedlens.base.format import many, size
from fedlens.base.parse_text import parse_json
from fedlens.base.printable import printable
from fedlens.base.registry import own_names
from fedlens.base.shell_command import quoted_command
from fedlens.core.wire.sent_fields import census_fields, in_short
from fedlens.core.wire.terms import ExperimentTerms, is_digest
from fedlens.files.regular_file import open_regular
from fedlens.identity.authority import check_name, day, read_root
from fedlens.identity.fingerprint import fingerprint_words
from fedlens.identity.keys import KeyPair
from fedlens.identity.private_files import read_private
from fedlens.models.weights_setting import NONE
from fedlens.run.trial_round import IMAGES, TrialRound, trial_round
from fedlens.settings.plan import Plan
from fedlens.site.approvals import Approvals, Decision, Matter, reviewer_number
from fedlens.site.contract import Contract, read_contract
from fedlens.site.local_data import COUNTED, exclusion_list
from fedlens.site.policy import refusals, refuse, refused, work_of
from fedlens.site.settings import SiteSettings

_LARGEST = 2**22
_FEWEST, _MOST = 3, 10  # clients of a round with made-up images


@dataclass(frozen=True)
class Review:
    """A proposed experiment, as text. Nothing that it names is opened or imported.

    Attributes:
        contract: its settings.
        terms: what the server says of it besides.
        run: the run that the server proposes it for.
        approvals: the decisions of the site; on another machine it has no folder of decisions.
        exported: on another machine, what the site has exported of its decisions and its exclusion list.
    """

    contract: Contract
    terms: ExperimentTerms
    run: str
    approvals: Approvals
    exported: Mapping[str, Any] | None = None

    @property
    def matter(self) -> Matter:
        """What is decided."""
        return self.approvals.matter(self.contract, self.terms, self.run)

    @property
    def rejections(self) -> Mapping[str, str]:
        """The digest of each rejection at the site that is not taken back, by `Decision.by`."""
        if self.exported is not None:
            return dict(self.exported["rejections"])
        lines = self.approvals.rejections(self.contract.digest)
        return {by: line["decision"] for by, line in lines.items()}

    @property
    def approved(self) -> list[str]:
        """Who has approved it at the site, and when, as it is proposed now."""
        if self.exported is not None:
            return list(map(str, self.exported["approvals"]))
        approvers = self.approvals.approvers(self.matter)
        return [f"{name}, {day(time)}" for name, time in sorted(approvers.items(), key=lambda each: each[1])]

    @property
    def exclude(self) -> str:
        """The exclusion list of the site now, in words."""
        if self.exported is not None:
            return str(self.exported["exclude"])
        if (name := self.contract.site.data.exclude) is None:
            return "none"
        try:
            digest, lines = exclusion_list(self.contract.site)
        except DataError as error:
            return str(error)
        return f"{name}, SHA-256 {digest}, {many(len(lines), 'line')}; 'site check' counts the images"

    @property
    def counted(self) -> str:
        """The clients of the site and their images at the last check, in words."""
        if self.exported is not None:
            return str(self.exported["counted"])
        if not (path := self.contract.site.path.with_name(COUNTED)).exists():
            return "not counted yet: fedlens site check"
        return f"at the last 'site check', {day(path.stat().st_mtime)}: {read_private(path).decode()}"

    @cached_property
    def refused(self) -> list[str]:
        """Why it cannot be approved: a sentence for each line of `[allow]` that refuses it."""
        return refusals(self.contract, self.contract.site)

    def missing(self) -> str | None:
        """Why the site does not compute it now; None if it is approved, and allowed."""
        if self.refused:
            return f"the experiment {self.contract.digest[:12]} cannot be approved: [allow] of site.toml refuses it"
        return self.approvals.missing(self.matter, time())

    def trial(self) -> TrialRound | None:
        """A round with made-up images, of names that are fedlens's own; None if the experiment names a file.

        Raises `ConfigError` or `RunFailed` for an experiment that cannot run.
        """
        if self.contract.files():
            return None
        settings: dict[str, Any] = {**self.contract.settings}
        if isinstance(model := settings.get("model"), Mapping) and "weights" in model:
            settings["model"] = {**model, "weights": NONE}  # whose files are not opened
        with own_names({}):
            planned = replace(self.contract, settings=settings).plan()
            self._check_size(planned)
            clients, totals = max(_FEWEST, min(_MOST, len(self.terms.peers))), self._reports == "totals"
            return trial_round(planned, clients, at_site=True, totals=totals)

    @property
    def _reports(self) -> bool | str:
        return self.contract.site.allow.report_metrics

    def _check_size(self, planned: Plan) -> None:
        """Raises `ConfigError` if images or model are larger than a message, before there is memory for them."""
        most, shape = self.contract.site.compute.max_message * 2**20, self.contract.dataset["input_shape"]
        too_large = f"larger than [compute] max_message, {size(most)}"
        if _MOST * IMAGES * prod(shape) > most:
            raise ConfigError(f"{_MOST * IMAGES} made-up images are {too_large}")
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = planned.chosen["model"](shape, max(1, len(self.contract.dataset["classes"])))
        if 4 * sum(each.numel() for each in module.parameters()) > most:
            raise ConfigError(f"the model is {too_large}")

    def leaves(self) -> list[str]:
        """What a client sends, one operation a line, and what leaves beyond updates, as sentences."""
        try:
            trial = self.trial()
        except FedlensError as error:
            return [printable(f"not shown: {error}", line_feeds=False)]
        if trial is None:
            return [f"not shown: the experiment uses {', '.join(self.contract.files())}"]
        census = trial.census(self.approvals.site, self.contract.sums_moments)
        sums = "with" if self.contract.sums_moments else "no"
        told = f"census before round 1, some {size(census.bytes)}, {sums} sums of pixels"
        found = [f"{told}: {', '.join(in_short(census_fields(census)))}"]
        for op, fields in trial.fields.items():
            if self._reports is False:
                fields = [each for each in fields if not each.startswith("metrics.")]
            sent = f"{op}, {size(trial.sent[op])}: {', '.join(in_short(fields)) or 'nothing'}"
            found.append(
                "; ".join(refused(work_of(op, trial.built.algorithm.ops[op]), self.contract.site)) or sent
            )
        if self._reports is not True:
            found.append(
                f"less than in the dossier: [allow] report_metrics = {json.dumps(self._reports)} takes out the rest"
            )
        measured = disclosure(trial.built.task, trial.built.federation)
        found += [
            told for told in trial.built.algorithm.discloses if told != measured or self._reports is True
        ]
        return [printable(line, line_feeds=False) for line in found]

    def to_plain(self) -> dict[str, Any]:
        """What a program reads: settings, terms, peers with their words."""
        matter, terms = self.matter, self.terms
        words = {
            name: fingerprint_words(self.approvals.root, bytes.fromhex(key))
            for name, key in matter.peers.items()
        }
        return {
            "digest": matter.experiment,
            "site": matter.site,
            "run": matter.run,
            "rounds": matter.rounds,
            "until": terms.until,
            "agreement": terms.agreement,
            "keep_days": terms.keep_days,
            "peers": words,
            "leaves": self.leaves(),
            "rules": {"sha256": self.contract.site.digest, **self.contract.site.rules()},
            "exclude": self.exclude,
            "counted": self.counted,
            "approvals": self.approved,
            "settings": dict(self.contract.settings),
            "refused": self.refused,
        }

    def lines(self) -> list[str]:
        """The same for a person, without characters that a terminal would obey."""
        plain, days, site = self.to_plain(), many(self.terms.keep_days, "day"), self.contract.site
        peers = [f"    {name:16} {words}" for name, words in plain["peers"].items()]
        return [
            *self.contract.lines(),
            "",
            f"site: {plain['site']}",
            f"run: {printable(plain['run'], line_feeds=False)}, {plain['rounds']} rounds",
            f"last day: {plain['until'] or 'none'}",
            f"data use agreement, SHA-256: {plain['agreement'] or 'none'}",
            f"the server keeps checkpoints, states, recordings and answers: {days} after the last "
            "event of the run; no program here can check this promise",
            f"sites that take part ({len(peers)}), each with its eight words:",
            *peers,
            "what a client sends, as a round with made-up images does:",
            *(f"    {line}" for line in plain["leaves"]),
            f"rules of the site, which an approval binds but for cache and [keep]: site.toml, SHA-256 {site.digest}",
            *(f"    {line}" for line in printable(tomli_w.dumps(site.rules())).splitlines() if line),
            printable(f"exclusion list now, which no approval binds: {plain['exclude']}", line_feeds=False),
            printable(f"images and clients {plain['counted']}", line_feeds=False),
            printable(
                f"approved until now by: {'; '.join(plain['approvals']) or 'nobody'}", line_feeds=False
            ),
            f"digest: {plain['digest']}",
            *(f"refused: {printable(sentence, line_feeds=False)}" for sentence in plain["refused"]),
        ]

    def export(self) -> bytes:
        """The file that `read` reads on another machine."""
        site = self.contract.site
        content = {
            "site": self.approvals.site,
            "root": base64.b64encode(self.approvals.root).decode(),
            "run": self.run,
            "settings": self.contract.text,
            "terms": self.terms.to_plain(),
            "site.toml": site.digest,
            **site.rules(),
            "files": dict(site.files),
            "rejections": self.rejections,
            "approvals": self.approved,
            "exclude": self.exclude,
            "counted": self.counted,
        }
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Review:
        """The experiment in a file of `export`. Raises `ConfigError` if it is none."""
        try:
            with open_regular(path) as file:
                content = file.read(_LARGEST + 1)
            match parsed := parse_json(content) if len(content) <= _LARGEST else None:
                case {
                    "site": str(site), "root": str(root), "run": str(run), "settings": str(text),
                    "terms": terms, "site.toml": str(toml), "data": data, "allow": allow, "keep": keep, "files": files,
                    "reviewers": people, "rejections": dict(rejections), "approvals": list(), "exclude": str(),
                    "counted": str(),
                } if all(map(is_digest, (toml, *rejections.values()))):  # fmt: skip
                    check_name(site)
                    certificate = base64.b64decode(root, validate=True)
                    read_root(certificate)
                    tables = {"data": data, "allow": allow, "keep": keep, "files": files, "reviewers": people}
                    settings = SiteSettings.of(tables, path, digest=toml)
                    approvals = Approvals(path.parent, settings, certificate, site, b"")
                    told = ExperimentTerms.from_plain(terms)
                    return cls(read_contract(text, settings), told, run, approvals, parsed)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", where=str(path)) from None
        except (FedlensError, ValueError) as error:
            what, hint = f"{path} is no experiment that can be decided on", "export it again"
            raise ConfigError(what, where=printable(str(error))[:300], hint=hint) from None
        raise ConfigError(
            f"{path} is no exported experiment",
            hint=f"make it with {quoted_command('site', 'review', export='FILE')}",
        )

    def keep(self, decision: Decision) -> None:
        """Keeps a decision at the site.

        Raises `ConfigError` for one of another experiment or of a stranger, for an approval that does not take back a
        rejection of its reviewer, or if `[allow]` refuses what it approves.
        """
        if decision.approves:
            refuse(self.contract, self.contract.site)
        fits = decision.matter.lapsed if decision.approves else decision.matter.foreign
        if (other := fits(self.matter)) is not None:
            raise ConfigError(
                f"the decision is not on what is proposed here now: {other}", hint="decide again"
            )
        self.approvals.check_import(decision)
        self.approvals.put(decision, self.contract)

    @staticmethod
    def decision_in(path: Path) -> Decision:
        """The decision in a file, which is not kept yet.

        Raises `ConfigError` or `IdentityError` if it is none.
        """
        try:
            with open_regular(path) as file:
                return Decision.read(file.read(_LARGEST))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", where=str(path)) from None
        except IdentityError as error:
            raise IdentityError(error.what, where=str(path), hint="let the reviewer decide again") from None

    def decide(self, key: KeyPair, reason: str | None) -> Decision:
        """A signed decision on it: a rejection if there is a reason, else an approval.

        Raises `ConfigError` for the approval of what `[allow]` of the site refuses.
        """
        if reason is None:
            refuse(self.contract, self.contract.site)
        after = self.rejections.get(reviewer_number(key.public), "")
        return Decision.make(key, self.matter, reason, time(), after)
