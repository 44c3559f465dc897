"""Runs an experiment at the sites of a federation, or resumes it: what `fedlens serve` does."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from time import monotonic, time
from typing import Any, cast

from fedlens import api
from fedlens.base.errors import ConfigError, FedlensError
from fedlens.base.shell_command import shell_command
from fedlens.core.engine_base import EngineBase
from fedlens.core.wire.terms import ExperimentTerms, is_day
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import with_held_out
from fedlens.engines.network import NetworkEngine
from fedlens.files.atomic_files import refused
from fedlens.files.chained_log import ChainedLog
from fedlens.files.lock import locked
from fedlens.files.regular_file import open_regular
from fedlens.result import Result
from fedlens.run.journal_file import JournalFile
from fedlens.run.rundir import RunDir
from fedlens.server.event_log import EventLog
from fedlens.server.progress import ServeProgress
from fedlens.server.retention import ServedRuns
from fedlens.server.serve_record import ServeRecord, digest_of, is_begun, run_to_serve
from fedlens.server.without import begin_without
from fedlens.settings.algorithm_check import check_algorithm
from fedlens.settings.config import Config, read_config
from fedlens.settings.config_source import Source, read_source
from fedlens.settings.plan import Plan, plan
from fedlens.site.contract import site_part

try:
    from fedlens.engines.links.connections import Limits
    from fedlens.engines.links.https import HttpsLink
    from fedlens.identity.authority import server_context
    from fedlens.identity.federation_folder import FederationFolder
    from fedlens.server.census_link import CensusLink, RoundDropped
    from fedlens.server.sockets import allow_connections, listening_sockets
    from fedlens.server.watch import Watch
except ModuleNotFoundError as absent:
    raise ConfigError(
        f"serving the sites of a federation needs {absent.name}, which is not installed",
        hint="pip install 'fedlens[network]'",
    ) from None

_FAREWELL = 30.0  # seconds for sites to take the goodbye: longer than one poll


@dataclass(frozen=True)
class Served:
    """What is served, and how.

    Attributes:
        experiment: a recipe or a TOML file, with `changes` such as "rounds=3".
        federation: the folder of the federation, and `passphrase` that of the server's keys.
        bind: "HOST:PORT" to listen on; 127.0.0.1 and the port of the federation without it.
        out: the run directory.
        data_dir, download: for a dataset at the server.
        sites: freeze the roster once so many sites have answered.
        until: the last day of the run (UTC), as "2027-01-31"; that of the first start without it.
        agreement: the file of the data use agreement, whose SHA-256 the sites see.
        log_to_stderr: write the log to standard error in place of the run directory.
        without: the sites that have left, which are neither told nor asked.
    """

    experiment: str
    federation: Path
    changes: Sequence[str] = ()
    passphrase: bytes | None = None
    bind: str | None = None
    out: Path | None = None
    data_dir: Path | None = None
    download: bool = False
    sites: int | None = None
    log_to_stderr: bool = False
    report: bool = True
    without: Sequence[str] = ()
    until: str | None = None
    agreement: Path | None = None


def serve(served: Served, progress: ServeProgress) -> Result:
    """Runs an experiment at the sites of a federation, or resumes its unfinished run, and says goodbye to the sites.

    Sites may join, and be accepted, while it waits for their censuses.

    Args:
        served: what is served, and how.
        progress: follows the run.

    Raises `ConfigError` for an invalid experiment, before a port is bound, for a port that is taken, and for a
    federation without a site and an open invitation; `RunDirectoryError` if `out` has another run; and what
    `fedlens.api.resume` raises. The same command resumes the run, also after `KeyboardInterrupt`.
    """
    source = read_source(served.experiment, served.changes)
    config = plan_at_sites(source).config
    if served.sites is not None and served.sites < config.engine["min_sites"]:
        raise ConfigError(
            f"a round needs {config.engine['min_sites']} sites, and {served.sites} are to be enough",
            where=source.locate("engine.min_sites"),
            hint="lower it, or wait for more with --sites",
        )
    registry = FederationFolder(served.federation, served.passphrase)
    if not registry.sites() and not registry.enrolling():
        raise ConfigError(
            f"the federation {registry.name} has no site, and no open invitation",
            where=str(registry.folder),
            hint=f"run: {shell_command('federation', 'invite', registry.folder, 'NAME', out='NAME.invitation')}",
        )
    without = sorted(registry.site(name).name for name in served.without)
    settings = {
        **source.values,
        **({"without": without} if without else {}),
    }  # another run than one with them
    new = ServeRecord.new(settings, registry.root, site_part(config))
    terms = read_terms(served.until, served.agreement)
    runs = ServedRuns(registry.folder)
    new = replace(new, until=terms.until, agreement=terms.agreement, keep_days=runs.days)
    with ExitStack() as stack:
        allow_connections()
        sockets = listening_sockets(served.bind, registry.port)
        for each in sockets:
            stack.callback(each.close)
        directory, record = run_to_serve(served.out, config.name, new)
        stack.enter_context(locked(directory.path / "serve.lock", f"the run {directory.path}"))
        if without and record.attempt == 0:
            record, begins = begin_without(directory, record, without, runs, digest_of(source.values))
            progress.note(f"without {', '.join(without)}, {begins}")
        runs.add(directory.path)
        return _Server(served, config, registry, sockets, directory, record, progress).run()


def read_terms(until: str | None, agreement: Path | None) -> ExperimentTerms:
    """The terms of a command, without peers. Raises `ConfigError` for a day that is over, and a missing file."""
    if until is not None and (not is_day(until) or ExperimentTerms(until).ended(time())):
        hint = "give today or a later day, such as 2027-01-31"
        raise ConfigError(f"'{until}' is no last day of a run", where="--until", hint=hint)
    if agreement is None:
        return ExperimentTerms(until)
    try:
        with open_regular(agreement) as file:
            return ExperimentTerms(until, hashlib.sha256(file.read()).hexdigest())
    except OSError as error:
        what = f"the agreement {agreement} cannot be read: {error.strerror}"
        raise ConfigError(what, where="--agreement") from None


def plan_at_sites(source: Source) -> Plan:
    """The plan of an experiment whose data are at sites.

    Raises `ConfigError` if they are not, or as `plan` and `check_algorithm` do.
    """
    planned = plan(read_config(source.values, source.locate), source)
    if not planned.config.at_sites:
        raise ConfigError(
            f"the dataset '{planned.config.data.dataset['name']}' is not at sites",
            where=source.locate("data.dataset"),
            hint="set data.dataset.name = 'sites' and engine.name = 'network', or use 'fedlens run'",
        )
    check_algorithm(planned)
    return planned


@dataclass(eq=False)
class _Server:
    """One process that serves a run, from its first start to its end."""

    served: Served
    config: Config
    registry: FederationFolder
    sockets: list[socket.socket]
    directory: RunDir
    record: ServeRecord
    progress: ServeProgress
    log: EventLog = field(init=False)
    _link: HttpsLink | None = None
    _sites: CensusLink | None = None

    def __post_init__(self) -> None:
        self.log = EventLog(None if self.served.log_to_stderr else self.directory.serve_log_path)
        self.key = self.registry.identity()
        self._closing = ExitStack()
        try:
            self._answers = ChainedLog(self.directory.answers_path)
        except OSError as error:
            raise refused(error, "the log of answers", self.directory.answers_path) from error
        self._closing.callback(self._answers.close)

    def run(self) -> Result:
        """Runs to the end; a round that is dropped is repeated from the last complete one."""
        host, port = self.sockets[0].getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.progress.waiting(self.directory.path, address, self.record.run)
        outcome = None
        try:
            while True:
                try:
                    result = self._start()
                    outcome = "finished"
                    return result
                except RoundDropped as dropped:
                    self.progress.problem(dropped.what)
        except FedlensError:
            outcome = "stopped"
            raise
        finally:
            try:
                self._say_goodbye(outcome)
            finally:
                self._closing.close()
                self.log.write("ended", outcome=outcome or "interrupted")

    def _start(self) -> Result:
        """Starts the run, or resumes it after its last complete round."""
        served = self.served
        how: dict[str, Any] = {
            "data_dir": served.data_dir,
            "progress": self.progress,
            "report": served.report,
        }
        if is_begun(self.directory):
            return api.resume(self.directory.path, connect=self._connect, **how)
        experiment = api.Experiment.load(served.experiment, served.changes)
        return experiment.run(self.directory.path, download=served.download, connect=self._connect, **how)

    def _connect(self, made: EngineBase) -> Roster:
        """Listens, gathers the censuses, freezes the roster, and attaches the engine to the sites."""
        engine = cast(NetworkEngine, made)  # data at sites are refused with every other engine
        self.record = self.record.started(self.directory)
        JournalFile(self.directory.journal_path).begin(self.record.run)
        if self._link is None:
            self._link = self._listen(engine)
        frozen = self.directory.roster_path.exists()
        dataset = self.config.data.dataset
        self._sites = sites = CensusLink(
            self._link,
            self.registry,
            self.key,
            self.record,
            self.log,
            dataset["input_shape"][0] if self.config.sums_moments else None,
            Roster.load(self.directory.roster_path) if frozen else None,
            self._answers,
            pixels=prod(dataset["input_shape"][1:]),
            without=self.served.without,
        )
        self._watch.follow(sites, engine)
        self.log.write("started", run=self.record.run, attempt=self.record.attempt, resumed=frozen)
        if sites.roster is None:
            gathered = sites.gather(engine.waits, self.served.sites)
            roster = with_held_out(gathered, self.config.data.validation, self.config.seeds.data)
            engine.attach(sites.post, roster)
            engine.check({})  # before anything is frozen
            roster.save(self.directory.roster_path)
            sites.freeze(roster)
            self.log.write("frozen", clients=len(roster), sites=sorted(set(roster.sites)))
            return roster
        engine.attach(sites.post, sites.roster)
        sites.wait_for_return(engine.waits.lost)
        return sites.roster

    def _listen(self, engine: NetworkEngine) -> HttpsLink:
        context = server_context(self.registry.folder, self.served.passphrase)
        spool, limits = self.directory.path, Limits(message=engine.most)
        link = HttpsLink(self.sockets, context, self.registry, spool, self.log.notice, limits)
        self._closing.callback(link.close)
        self._watch = Watch(
            self.registry, link, self.served.passphrase, self.directory.path, self.log,
            self.progress.sites,
        )  # fmt: skip
        self._watch.start()
        self._closing.callback(self._watch.close)
        return link

    def _say_goodbye(self, outcome: str | None) -> None:
        """Tells the sites that the run has ended, and waits until those that are there know; None says nothing."""
        if self._sites is None or self._link is None or outcome is None:
            return
        post, link = self._sites.post, self._link
        told = {
            name: post.tell(name, "goodbye", {"outcome": outcome}, {}).digest for name in self._sites.told()
        }
        until = monotonic() + _FAREWELL
        while any(link.keeps(*each) for each in told.items()) and monotonic() < until:
            link.collect(0.1, ())
