"""Repeats a run over sites in one place, with its absences and failures, and compares the bits."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlens.api import settings_of
from fedlens.base.errors import RunDirectoryError
from fedlens.core import tensorfile
from fedlens.core.protocol import ClientDataSource, ClientId, Id
from fedlens.core.tree import digest
from fedlens.core.types import is_client
from fedlens.data.catalogue import data_directory
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import Computing, resolved
from fedlens.engines.replayed import Replayed
from fedlens.observers.built_in import observers_of, own_observers
from fedlens.run.build import Built, build
from fedlens.run.observer import Observer
from fedlens.run.rundir import RunDir
from fedlens.run.runner import Runner
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config import read_config
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since
from fedlens.settings.plan import Plan, plan
from fedlens.site.contract import read_contract
from fedlens.site.local_data import LocalData
from fedlens.site.settings import SITE_FILE, SiteSettings
from fedlens.site.workplace import Workplace
from fedlens.use.results import exported

_CLOCK = ("seconds", "elapsed")
_JOINED = "fedlens-site"
_NAMED = 3  # differences of a round that are named
_SHORT = 12  # characters of a digest that is shown

SourceOf = Callable[[Built], ClientDataSource]
"""The data of all sites and of the server, as the operations of a run read them."""


@dataclass(frozen=True)
class Replay:
    """What a replay gave.

    Attributes:
        rounds: how many trained rounds were compared.
        failures: how many requests failed in them, as in the run.
        skipped: how many of them were skipped.
        difference: where the first difference is, as a sentence; None if all bits are the same.
    """

    rounds: int
    failures: int
    skipped: int
    difference: str | None

    def __str__(self) -> str:
        if self.difference is not None:
            return self.difference
        also = [(self.failures, "failed request"), (self.skipped, "skipped round")]
        told = " and ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in also if n)
        rounds = f"same bits in {self.rounds} round{'s' * (self.rounds != 1)}"
        return f"{rounds}, with {told}" if told else rounds


def replay(
    directory: Path | str,
    source_of: SourceOf,
    *,
    data_dir: Path | str | None = None,
    device: str | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Replay:
    """Repeats a run of the engine `network` in this process, from round 0 to its last recorded round.

    Clients that were away are not asked, and requests that failed fail again. After every round it compares what each
    client reported, the metrics without times, and the SHA-256 of the model; at the end of a finished run the model
    file. Nothing in the run directory changes.

    Args:
        source_of: gives the data of the sites.
        data_dir: where the server's test data are; by default where the run read them.
        device: where to compute; by default the kind of device that the server had.

    Raises:
        RunDirectoryError: if the run has no roster or no participation.jsonl: its data were not at sites, or it is
            private, so that it records neither who took part nor its noise.
    """
    run = RunDir.open(Path(directory))
    source = settings_of(run, None)
    config = read_config(source.values, source.locate)
    environment = run.read_environment() or {}
    refuse_edited_since("the run trained", environment.get(OWN_FILES), source.values, False)
    recorded = _Recorded.of(run)
    planned = plan(config, source)
    root = data_directory(Path(data_dir or environment.get("data_dir", "") or data_directory(None)))
    with tempfile.TemporaryDirectory(prefix="fedlens-replay-") as scratch:
        again = RunDir(Path(scratch))
        built = build(
            planned,
            root,
            download=False,
            engine=recorded.engine(planned.config.engine, device),
            say=say,
            initial=run.initial_path if run.initial_path.exists() else None,
            roster=recorded.roster,
        )
        built = replace(built, source=source_of(built))
        model = _repeated(built, planned, again, recorded.last)
        difference = _first_difference(run, again, recorded.last)
        if difference is None and recorded.last == config.rounds and run.model_path.exists():
            difference = _other_model(run, model)
    if difference is not None and (run.read_summary() or {}).get("changes"):
        difference += "; the settings of the run were edited while it was stopped"
    lines = [line for line in run.read_metrics() if 0 < line["round"] <= recorded.last]
    skipped = sum("skipped" in line for line in lines)
    return Replay(recorded.last, len(recorded.failures), skipped, difference)


@dataclass(frozen=True)
class _DataOfSites(ClientDataSource):
    """The data of each client from its site, and the server's own."""

    server: ClientDataSource
    sites: Mapping[str, ClientDataSource]
    roster: Roster

    def data_of(self, client: ClientId, /) -> Any:
        """The data of a client or of the server. Raises `KeyError` for unknown ones."""
        if not is_client(client):
            return self.server.data_of(client)
        if client not in range(len(self.roster)):
            raise KeyError(client)
        return self.sites[self.roster.sites[client]].data_of(client)

    def on(self, device: torch.device, /) -> ClientDataSource:
        """The same on `device`."""
        sites = {name: source.on(device) for name, source in self.sites.items()}
        return replace(self, server=self.server.on(device), sites=sites)


def data_of_sites(directory: Path | str, folder: Path | str) -> SourceOf:
    """For `replay`: the data of the sites of a run, from a folder with a copy of each site's folder, named as the site.

    Each has its `site.toml`, or a folder `fedlens-site` with it. Nothing in it changes, and which examples the run
    counted is read from its `approved`.

    Raises, when it is called, `RunDirectoryError` for a run that 'fedlens serve' has not made, and `ConfigError` or
    `DataError` for a site whose folder is missing, or has other data than the run counted.
    """
    run, root = RunDir.open(Path(directory)), Path(folder)

    def source_of(built: Built) -> ClientDataSource:
        record, roster = ServeRecord.read(run), built.partition
        if record is None or not isinstance(roster, Roster):
            raise RunDirectoryError(
                "the run has no serve.json, with the experiment that its sites approved",
                where=str(run.path),
                hint="name a run of 'fedlens serve'",
            )
        mean, std = roster.moments or (None, None)
        sizes = {"examples": roster.examples, "held_out": roster.held_out, "mean": mean, "std": std}
        sources = {}
        for site in dict.fromkeys(roster.sites):
            at = _folder_of(root / site)
            contract = read_contract(record.contract, SiteSettings.read(at / SITE_FILE))
            with tempfile.TemporaryDirectory(prefix="fedlens-replay-") as notes:
                if (at / "approved").is_dir():
                    shutil.copytree(at / "approved", Path(notes) / "approved")
                local = LocalData.open(contract, site, Path(notes), record.run)
            rows = {roster.ids[row]: row for row in roster.rows_of(site)}
            place = Workplace.open(local, rows, {**sizes, "images": roster.images})
            sources[site] = place.program.data
        return _DataOfSites(built.source, sources, roster)

    return source_of


def _folder_of(copy: Path) -> Path:
    """The folder with `site.toml`: the copy, or that of `fedlens site join` in a copy of where it was run."""
    inside = copy / _JOINED
    return inside if (inside / SITE_FILE).exists() else copy


@dataclass(frozen=True)
class _Recorded:
    """Who was there in each round of a run, and what failed."""

    roster: Roster
    available: Sequence[Sequence[int]]  # from round 1 on
    failures: Mapping[Id, str]

    @property
    def last(self) -> int:
        """The last recorded round."""
        return len(self.available)

    @classmethod
    def of(cls, run: RunDir) -> _Recorded:
        lines = run.read_participation() if run.roster_path.exists() else []
        if [line["round"] for line in lines] != list(range(len(lines))) or not lines:
            raise RunDirectoryError(
                "the run does not record who took part in each round",
                where=str(run.participation_path),
                hint="replay a run of 'fedlens serve' without [privacy]",
            )
        roster = Roster.load(run.roster_path)
        available = [
            [row for row, name in enumerate(roster.ids) if name not in line["away"]] for line in lines[1:]
        ]
        failures = {
            Id(line["round"], exchange, slot): reason
            for line in lines
            for exchange, slot, _, reason in line["failed"]
        }
        return cls(roster, available, failures)

    def engine(self, settings: Mapping[str, Any], device: str | None) -> Replayed:
        """The engine that repeats the run; `settings` are those of the engine `network`."""
        where = resolved(device or settings["device"])
        computing = Computing(where, settings["precision"], settings["channels_last"])
        limits, threads = (settings["min_sites"], settings["max_share"]), settings["threads"]
        return Replayed(self.roster, *limits, self.available, self.failures, threads, computing)


def _repeated(built: Built, planned: Plan, again: RunDir, last: int) -> str:
    """Runs to the round `last`; returns the digest of the model as a model file holds it."""
    observers = observers_of(built, again, own_observers(planned), Observer())
    runner = Runner(built, again, observers)
    runner.run(last)
    assert runner.run_state is not None
    return digest(exported(built, runner.run_state.state)[1])


def _other_model(run: RunDir, model: str) -> str | None:
    """A sentence if the run's model file does not hold this model."""
    held = digest(tensorfile.read(run.model_path).tensors)
    if held == model:
        return None
    return (
        f"{run.model_path.name} holds another model: SHA-256 {held[:_SHORT]}, and replayed {model[:_SHORT]}"
    )


def _first_difference(run: RunDir, again: RunDir, last: int) -> str | None:
    """A sentence on the first round in which both runs differ; None if there is none."""
    files = (
        (run.stream_clients(), again.stream_clients()),
        (run.read_metrics(), again.read_metrics()),
        (run.read_participation(), again.read_participation()),
    )
    kinds = [tuple(map(_by_round, pair)) for pair in files]
    for round in range(last + 1):
        found = [each for before, now in kinds for each in _differences(before[round], now[round])]
        if found:
            more = f" and {len(found) - _NAMED} more" * (len(found) > _NAMED)
            return f"the first difference is in round {round}: {'; '.join(found[:_NAMED])}{more}"
    return None


def _by_round(lines: Iterable[Mapping[str, Any]]) -> Mapping[int, list[Mapping[str, Any]]]:
    rounds: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        rounds[line["round"]].append(line)
    return rounds


def _differences(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs in the lines of a round, each as a phrase."""
    if [line.get("client") for line in before] != [line.get("client") for line in now]:
        return [f"it has {len(now)} lines of clients, and had {len(before)}, or those of others"]
    found = []
    for old, new in zip(before, now, strict=True):
        whose = f" of client '{old['client']}'" if "client" in old else ""
        for key in old.keys() | new.keys():
            if key not in _CLOCK and (a := old.get(key)) != (b := new.get(key)):
                found.append(f"{key}{whose} is {_shown(b)}, and was {_shown(a)}")
    return sorted(found)


def _shown(value: Any) -> str:
    return f"{value[:_SHORT]}..." if isinstance(value, str) and len(value) > _SHORT else f"{value}"
