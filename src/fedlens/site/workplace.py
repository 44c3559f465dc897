"""What a site computes with: the operations of an approved experiment over the data of its own clients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import torch

from fedlens.algorithms.client_evaluation import EVALUATE_OWN, in_totals
from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import own_names
from fedlens.core.protocol import ClientId, Program
from fedlens.core.random import UNSIGNED, Identity, Secrets
from fedlens.core.schema import Schema
from fedlens.core.types import is_client
from fedlens.core.wire.census import MOST_EXAMPLES, SiteCensus
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.catalogue import data_directory
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import ExamplesHere
from fedlens.engines.inline import inline
from fedlens.identity.keys import KeyPair
from fedlens.run.build import Built, build
from fedlens.settings.plan import Plan
from fedlens.site.answers_log import AskRefused
from fedlens.site.approvals import Approvals, Matter
from fedlens.site.client_identity import client_identity
from fedlens.site.contract import Contract, read_contract
from fedlens.site.local_data import LocalData, count_persons
from fedlens.site.operation_thread import time_limit
from fedlens.site.policy import refuse, refused, release_of, spent_by, work_of
from fedlens.site.settings import SiteSettings

_CLIENTS = 2**20  # what a site computes the split of held-out examples over


@dataclass
class Workplace:
    """An experiment, built at a site. One operation runs at a time, in one thread.

    Attributes:
        program: the operations, the data of the site's clients by row, secrets of the operating system, and the device
            of `[compute]`. `reread` may replace it.
        rows: the row of each client of this site, by its name.
        secrets: those of each client of this site, by row.
        built: what `fedlens.run.build.build` made.
        local: the data.
    """

    program: Program = field(repr=False)
    rows: Mapping[str, int]
    secrets: Mapping[int, Secrets]
    built: Built = field(repr=False)
    local: LocalData = field(repr=False)
    _planned: Plan = field(repr=False)
    _roster: Roster = field(repr=False)
    _code: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def open(
        cls,
        local: LocalData,
        rows: Mapping[str, int],
        sizes: Mapping[str, Any],
        identity: Identity = UNSIGNED,
    ) -> Workplace:
        """Builds the experiment of `local.contract` over the roster.

        Args:
            rows: `rows` of the message of the experiment.
            sizes: the payload in its body: examples and held_out, int64 [clients]; mean and std, or None; images.
            identity: that of the clients of this site.

        Raises `ConfigError` or `DataError` if the experiment does not fit the data, or the roster other data.
        """
        roster = _roster(local, rows, sizes)
        code = local.contract.code()
        secrets = {row: Secrets(identity=identity) for row in rows.values()}
        with own_names(code):
            planned = local.contract.plan()
            built = _built(planned, roster, local, rows)
        if planned.config.data.validation:
            local.check_division(_division(rows, roster))
        allow = local.settings.allow
        least, reports = max(allow.min_examples, allow.min_persons or 1), allow.report_metrics
        line = "min_examples" if least == allow.min_examples else "min_persons"
        refused = {
            "trains on the examples of all clients in one place": built.algorithm.pools_data,
            f"sends numbers of single examples, and {line} is {least}": (
                built.algorithm.sends_single_examples and least > 1
            ),
            f"measures single examples, and {line} is {least}": (
                built.task.measures_single_examples
                and reports is True
                and built.algorithm.takes(EVALUATE_OWN) is not None
                and least > 1
            ),
        }
        for what, is_so in refused.items():
            if is_so:
                raise ConfigError(
                    f"'{built.config.algorithm['name']}' {what}",
                    where="algorithm.name",
                    hint="refuse the experiment",
                )
        return cls(_program(built, secrets, reports), rows, secrets, built, local, planned, roster, code)

    def reread(self) -> bool:
        """Reads the exclusion list again: call it before every round. Returns whether `program` is a new one.

        Raises `DataError` if the list cannot be read: then nothing may be computed.
        """
        local, built, program = self.local.reread(), self.built, self.program
        if changed := local.clients is not self.local.clients:
            with own_names(self._code):
                built = _built(self._planned, self._roster, local, self.rows)
            program = _program(built, self.secrets, local.settings.allow.report_metrics)
        # Together: after an error the next call tries again, and does not go on with the data of before.
        self.local, self.built, self.program = local, built, program
        return changed

    @property
    def excluded(self) -> Mapping[str, Any]:
        """See `LocalData.excluded`."""
        return self.local.excluded

    def examples(self, row: int) -> tuple[int, int]:
        """How many examples a client of this site trains on and holds out now."""
        data = self.program.data_of(row)
        return len(data), 0 if data.validation is None else len(data.validation)

    @property
    def rounds(self) -> int:
        """How many rounds were approved."""
        return self.built.config.rounds

    def takes(self, op: str) -> Schema | None:
        """What a client may be asked by this operation; None if nothing."""
        return self.built.algorithm.takes(op)

    def refused(
        self,
        op: str,
        row: int | None = None,
        work: int | None = None,
        releases: Sequence[Mapping[str, Any]] = (),
    ) -> list[str]:
        """Why `[allow]` of `site.toml` refuses an operation: for any client, or for that in a row and its work.

        Args:
            releases: of the client so far, and by this operation.
        """
        examples, settings = None if row is None else self.examples(row)[0], self.local.settings
        done = work_of(op, self.built.algorithm.ops[op], examples, work)
        if row is not None and settings.data.persons is not None:
            data = self.built.client_data
            positions = data.client_held_out(row) if op == EVALUATE_OWN else data.client_indices(row)
            done = replace(
                done, persons=count_persons(() if positions is None else positions, self.local.persons)
            )
        return refused(spent_by(done, releases, settings.allow, settings.data.persons), settings)

    def release(self, op: str, row: int, work: int | None = None) -> Mapping[str, Any] | None:
        """What the client in a row releases by an operation that adds noise for each example; None for others."""
        return release_of(self.built.algorithm.ops[op], self.examples(row)[0], work)

    @property
    def reports_metrics(self) -> bool:
        """Whether losses and counts may leave the site."""
        return self.local.settings.allow.report_metrics is not False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """For the time of an operation: options of PyTorch, and names of fedlens's own tables alone.

        Raises `AskRefused` at the end if it has taken longer than `[allow]` says; see `time_limit`.
        """
        before, settings = torch.get_num_threads(), self.local.settings
        torch.set_num_threads(settings.compute.threads)
        try:
            with own_names(self._code), self.program.computing(), time_limit(settings.allow.max_seconds):
                yield
        except TimeoutError:
            sentence = settings.not_allowed("an operation that takes longer", "max_seconds")
            raise AskRefused("policy", sentence) from None
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """Gives back the memory of the device: nothing is computed here any more."""
        self.program = replace(self.program, ops={})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass
class Proposal:
    """An experiment that a server proposes, over the data of this site.

    Attributes:
        contract: what is computed.
        site: the name of the site.
        folder: that of the site.
        run: the run that the server proposes it for.
        terms: what the server says of it besides.
        key: the identity key of the site.
    """

    contract: Contract
    site: str
    folder: Path
    run: str
    terms: ExperimentTerms
    key: KeyPair
    _local: LocalData | None = None

    @classmethod
    def read(
        cls,
        text: str,
        settings: SiteSettings,
        site: str,
        folder: Path,
        run: str,
        terms: ExperimentTerms,
        key: KeyPair,
    ) -> Proposal:
        """The proposal in a text. Raises `ConfigError` for what sites refuse, or this one; see `read_contract`."""
        contract = read_contract(text, settings)
        refuse(contract, settings)
        return cls(contract, site, folder, run, terms, key)

    @property
    def digest(self) -> str:
        """SHA-256 of the text in hexadecimal."""
        return self.contract.digest

    @cached_property
    def approvals(self) -> Approvals:
        """The decisions of the people at the site."""
        return Approvals.of(self.folder, self.contract.site)

    @cached_property
    def matter(self) -> Matter:
        """What they decide."""
        return self.approvals.matter(self.contract, self.terms, self.run)

    def missing(self) -> str | None:
        """Why it may not be computed, as a sentence; None if it is approved, as it is proposed now."""
        return self.contract.site.changed() or self.approvals.missing(self.matter, time())

    def approvers(self) -> list[str]:
        """The names of the reviewers who approved it, as it is proposed now."""
        return list(self.approvals.approvers(self.matter))

    def census(self) -> SiteCensus:
        """What the site tells of its data, which are read now; see `LocalData`. For an approved proposal alone."""
        self._local = LocalData.open(self.contract, self.site, self.folder, self.run)
        return self._local.census()

    @property
    def excluded(self) -> Mapping[str, Any]:
        """See `LocalData.excluded`; call `census` first."""
        assert self._local is not None
        return self._local.excluded

    def open(self, rows: Mapping[str, int], sizes: Mapping[str, Any]) -> Workplace:
        """Builds the experiment over the roster, `owners` in `sizes`; see `Workplace.open` and `client_identity`."""
        if self._local is None:
            self._local = LocalData.open(self.contract, self.site, self.folder, self.run)
        fewest, owners = self.contract.site.allow.min_cohort, sizes.get("owners")
        identity = client_identity(self.key, self.site, self.terms, rows.values(), owners, fewest)
        return Workplace.open(self._local, rows, sizes, identity)


def _built(planned: Plan, roster: Roster, local: LocalData, rows: Mapping[str, int]) -> Built:
    here = ExamplesHere(local.dataset, {row: local.clients[name] for name, row in rows.items()})
    compute = local.settings.compute
    engine = inline(threads=compute.threads, device=compute.device)
    return build(planned, data_directory(None), False, engine=engine, roster=roster, here=here)


def _program(built: Built, secrets: Mapping[int, Secrets], reports: bool | str) -> Program:
    def secrets_of(client: ClientId) -> Secrets:
        assert is_client(client)
        return secrets[client]

    program = replace(built.engine.applied(built.program), secrets=secrets_of)
    return in_totals(program, built.task) if reports == "totals" else program


def _roster(local: LocalData, rows: Mapping[str, int], sizes: Mapping[str, Any]) -> Roster:
    """The clients by row, without the names of others. Raises `DataError` if it has other data of this site."""
    where = "roster"
    try:
        examples, held_out = (np.asarray(sizes[name]) for name in ("examples", "held_out"))
        images, total = int(sizes["images"] or 0), examples + held_out
        sound = examples.dtype == held_out.dtype == np.int64 and 0 < len(total) == total.size <= _CLIENTS
        # Also one by one: a sum of large sizes overflows, to a small one.
        sound = sound and all(((each >= 0) & (each <= MOST_EXAMPLES)).all() for each in (examples, held_out))
        if not sound or len(examples) != len(held_out) or total.sum() > MOST_EXAMPLES:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise DataError(
            "the sizes of the clients are not readable",
            where=where,
            hint=f"a roster has at most {_CLIENTS:,} clients with {MOST_EXAMPLES:,} examples in all",
        ) from None
    if set(rows) != set(local.clients) or len(set(rows.values())) < len(rows):
        raise DataError(
            "the clients of this site are not those that the server counted",
            where=where,
            hint="give the site back the data that it had, or start a new run",
        )
    for name, row in rows.items():
        counted = len(local.clients[name])
        if not 0 <= row < len(total) or total[row] != counted:
            raise DataError(
                f"the server counts other examples of '{name}' than this site, which has {counted:,}",
                where=where,
                hint="give the site back the data that it had, or start a new run",
            )
    moments = None
    # Those of a contract are approved, and no message changes them.
    if local.contract.sums_moments:
        moments = _moments(sizes, local.dataset.input_shape[0])
    names = tuple(f"{row:012d}" for row in range(len(total)))
    return Roster(names, names, examples, held_out, local.contract.digest, moments, images)


def _division(rows: Mapping[str, int], roster: Roster) -> str:
    """SHA-256 of what decides, besides the contract, which examples of this site are held out."""
    text = json.dumps([sorted(rows.items()), (roster.examples + roster.held_out).tolist()])
    return hashlib.sha256(text.encode()).hexdigest()


def _moments(sizes: Mapping[str, Any], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the deviation of each channel that the sites summed. Raises `DataError` if they are no such."""
    try:
        mean, std = (tuple(map(float, sizes[name])) for name in ("mean", "std"))
        if not len(mean) == len(std) == channels or not np.isfinite([*mean, *std]).all() or min(std) <= 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise DataError(
            "the server sent no mean and deviation of the sites' images, and the experiment has none",
            where="roster",
            hint="ask the server to serve the experiment again",
        ) from None
    return mean, std
