"""Writes the dossier of an experiment: what a data protection impact assessment needs, from the settings.

GDPR art. 35 asks for the assessment, art. 30 for the record of processing. The text is in the templates `dossier_text`
of the pages; what no setting says is a line to be filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlens import __version__
from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.api import settings_of
from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import size
from fedlens.core.wire.sent_fields import census_fields, in_short
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.partition.roster import Roster
from fedlens.files.atomic_files import write_atomically
from fedlens.files.chained_log import read_chained
from fedlens.identity.federation_folder import FederationFolder
from fedlens.pages.left_clients import carried
from fedlens.pages.render import page_text, write_page
from fedlens.privacy.accounting import planned
from fedlens.privacy.guarantee import guarantee
from fedlens.results.run import Run, read_run
from fedlens.run.rundir import RunDir
from fedlens.run.trial_round import IMAGES, TrialRound, trial_round
from fedlens.server.retention import ServedRuns, removed_before
from fedlens.server.serve import plan_at_sites
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config import Config
from fedlens.settings.config_source import Source
from fedlens.site.contract import site_part

_OPERATIONS = {
    "train": ": training on its images",
    EVALUATE_OWN: ": sums over the held-out images",
    "keys": ": its public keys of the round",
    "shares": ": parts of its secrets, encrypted for the other clients",
    "agree": ": its signature of who is in the sum",
    "unmask": ": the parts that take the masks off the sum",
}


def write_dossier(
    folder: Path,
    federation: FederationFolder,
    experiment: Source | Path,
    purpose: str | None = None,
    clients: int | None = None,
    terms: ExperimentTerms | None = None,
) -> list[Path]:
    """Writes `dossier.md` and `dossier.html`, and returns their paths.

    Args:
        folder: where to write them; it is made if it does not exist.
        federation: whose sites take part.
        experiment: its settings, or the directory of a run of `fedlens serve`.
        purpose: what the model is for, in the words of the operator.
        clients: how many clients the sites have together; by default one each. A run knows it.
        terms: the last day and the agreement that 'fedlens serve' will be given. A run knows them.

    Raises `ConfigError` for settings that `fedlens serve` refuses, and `RunDirectoryError` for a run of no site.
    """
    known = federation.sites()
    sites = [site.name for site in known if site.state == "accepted"]
    of_run: Mapping[str, Any] = {}
    if isinstance(experiment, Path):
        of_run = _facts_of_run(experiment)
        sites, clients = of_run["sites"], of_run["clients"]
    planned = plan_at_sites(of_run["source"] if isinstance(experiment, Path) else experiment)
    sums = bool(of_run["sums"] if of_run else planned.config.sums_moments)  # the trial has a mean of its own
    trial = trial_round(planned, clients or max(len(sites), planned.config.engine["min_sites"]))
    promise = _promise(trial)
    terms, test = terms or ExperimentTerms(), planned.config.data.dataset.get("test")
    kept = ServedRuns(federation.folder)
    context = {
        "title": f"Dossier of '{planned.config.name}'",
        "aside": f"federation {federation.name}",
        "version": __version__,
        "today": f"{datetime.now(UTC):%Y-%m-%d}",
        "built": trial.built,
        "digest": hashlib.sha256(site_part(planned.config).encode()).hexdigest(),
        "sums": sums,
        "federation": federation,
        "sites": sites,
        "words": {site.name: federation.words(site) for site in known if site.name in sites},
        "purpose": purpose,
        "images": IMAGES,
        "keeps_days": kept.days_of(RunDir(experiment)) if isinstance(experiment, Path) else kept.days,
        "keeps": trial.keeps,
        "messages": [_census(trial, sites, sums), *_messages(trial)],
        "promise": promise,
        "risks": list(_risks(trial, promise, sums)),
        "test": test["name"] if isinstance(test, Mapping) else test,
        "until": terms.until,
        "agreement": terms.agreement,
        "draft": [] if of_run else list(_missing(sites, terms, planned.config)),
        "run": None,
        "withdrawn": {},
        "taken": []
        if not of_run or promise
        else _taken(of_run["run"]),  # who takes part is hidden by the promise
        **of_run,
    }
    text = folder / "dossier.md"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(text, f"{page_text('dossier.md.j2', context)}\n".encode(errors="backslashreplace"))
    return [text, write_page(folder / "dossier.html", "dossier.html.j2", context)]


def _facts_of_run(directory: Path) -> dict[str, Any]:
    """What a run knows that its settings do not have."""
    run = read_run(directory)
    record = ServeRecord.read(run)
    if record is None or not run.roster_path.exists():
        raise RunDirectoryError("it is no run of 'fedlens serve' that has begun", where=str(directory))
    roster = Roster.load(run.roster_path)
    return {
        "run": run,
        "source": settings_of(run, None),
        "digest": record.digest,
        "until": record.until,
        "agreement": record.agreement,
        "sites": sorted(set(roster.sites)),
        "clients": len(roster),
        "examples": int(roster.examples.sum() + roster.held_out.sum()),
        "sums": roster.moments is not None,
        "withdrawn": {
            site: done.logged
            for site in sorted(set(roster.sites))
            if (done := removed_before(run, "withdrawn", site)) is not None
        },
    }


def _missing(sites: Sequence[str], terms: ExperimentTerms, config: Config) -> Iterator[str]:
    """What a command will say later, as sentences."""
    if not sites:
        yield "No site is accepted yet."
    elif len(sites) < (least := config.engine["min_sites"]):
        few = "1 site is" if len(sites) == 1 else f"{len(sites)} sites are"
        yield f"{few} accepted, and the run needs {least} (engine.min_sites)."
    if terms.until is None:
        yield "The last day is open: give --until, as to 'fedlens serve'."
    if terms.agreement is None:
        yield "The data use agreement is open: give --agreement, as to 'fedlens serve'."


def _taken(run: Run) -> list[list[str]]:
    """What each site sent in a run, by operation: the first and the last round, answers, and bytes of their bodies."""
    found = dict[tuple[str, str], list[tuple[int, int]]]()
    path = RunDir(run.path).answers_path
    for line, _, _ in read_chained(path) if path.exists() else ():  # an earlier version had none
        if line.get("bytes") and "operation" in line:
            found.setdefault((line["site"], line["operation"]), []).append((line["round"], line["bytes"]))
    return [
        [*of, f"{min(sent)[0]} to {max(sent)[0]}", f"{len(sent):,}", size(sum(each for _, each in sent))]
        for of, sent in sorted(found.items())
    ]


def _promise(trial: TrialRound) -> dict[str, Any] | None:
    """The guarantee of `[privacy]` after all rounds; None without the table."""
    config, release = trial.built.config, trial.built.algorithm.release
    if config.privacy is None:
        return None
    if release is None:  # the noise is the clients' own, and their sizes are not known yet
        privacy, z, clip = config.privacy, config.privacy.noise_multiplier, config.privacy.first_clip
        unit = "one image" if privacy.column is None else f"all images with one '{privacy.column}'"
        noise = (
            f"of {z * clip:g}"
            if z is not None
            else f"that keeps all rounds within epsilon = {privacy.epsilon:g}"
        )
        noised = f"each client clips the gradient of {unit} to {clip:g}, and adds noise {noise} to their sum"
        kept = "epsilon follows from its number of images, and its site counts it in privacy.jsonl"
        sentence = "nothing is promised" if z == 0 or privacy.seeded else f"{noised}; {kept}"
        return {
            "unit": f"{unit} of a client",
            "against": "the server too",
            "sentence": sentence,
            "assumed": [],
        }
    found = guarantee(config.privacy, planned(release, config.rounds), config.record.unsafe)
    against = "those who get the models, not against the server"
    return {**found, "unit": "one client with all of its images", "against": against}


def _census(trial: TrialRound, sites: Sequence[str], sums_images: bool) -> list[Any]:
    """What a site with one client tells before the first round, as a row of the table of messages."""
    census = trial.census(max([*sites, "ward-a"], key=len), sums_images)
    what = "census, once before round 1: how many images it has"
    what += ", and sums over their pixels" if sums_images else ""
    return [
        what,
        "the settings of the experiment",
        in_short(census_fields(census)),
        f"some {size(census.bytes)}",
    ]


def _messages(trial: TrialRound) -> Iterator[list[Any]]:
    for op, fields in trial.fields.items():
        received, _ = carried(trial.rows[op])
        yield [
            f"{op}{_OPERATIONS.get(op, '')}",
            received,
            in_short(fields) or "nothing",
            size(trial.sent[op]),
        ]


def _risks(trial: TrialRound, promise: dict[str, Any] | None, sums_images: bool) -> Iterator[list[str]]:
    """The risks that the settings leave open: each with what stays open and what would lessen it."""
    config, algorithm = trial.built.config, trial.built.algorithm
    inversion = (
        "the server can compute parts of images from the plain update of a client, above all of one with few images",
        "secure sums (aggregate.name = 'secagg'); clients with many images; more local steps",
    )
    if algorithm.sends_single_examples:
        inversion = (
            "the server gets numbers of single images, from which images can be reconstructed",
            "a method that sends updates alone, such as fedavg",
        )
    elif algorithm.blind:
        inversion = (
            "the sum of few clients tells much about each of them, and so does the difference of two sums",
            "more sites in a sum",
        )
    yield ["reconstruction of images by the server", *inversion]
    private = promise is not None and promise["sentence"].startswith("After")
    if not algorithm.sends_single_examples and not private:
        yield [
            "reconstruction of images by sites",
            "each site gets the models of all rounds: all others together find the update of one from two models, "
            "and of two sites each finds that of the other",
            "more sites, a table [privacy] with noise = 'system'",
        ]
    member = [
        "whoever has the model can test whether an image was trained on",
        "a table [privacy] with noise = 'system'",
    ]
    if private and promise is not None:
        member = [
            f"for one client at most what epsilon = {promise['epsilon']:.3g} allows",
            "a smaller epsilon, which costs accuracy",
        ]
    yield ["membership in the final model", *member]
    unseen = ", and nobody sees which site did" if algorithm.blind else ""
    yield [
        "poisoning",
        f"a dishonest site can teach the model something wrong{unseen}",
        "known sites only; a test set of the operator's own (data.dataset.test)",
    ]
    if EVALUATE_OWN in trial.rows:
        yield [
            "results on held-out images",
            "a sum for one class may be of one image, and a server can send a model that lets one image decide a sum",
            "report_metrics = 'totals' in site.toml, without sums for classes; evaluation.clients = 'none', and test "
            "images at the server (data.dataset.test)",
        ]
    if sums_images:
        yield [
            "sums over the pixels of a site",
            "the server gets them once; mean and deviation over all sites are removed nowhere, also if a site leaves",
            "mean and std given in the experiment (data.dataset)",
        ]
    yield [
        "the operator as certificate authority",
        "without the call that compares the words, the operator can invent sites",
        "the call, to a number from another source than the invitation",
    ]
    yield [
        "kept bodies at a site",
        "with [keep] sent in its site.toml, a site keeps what it sent: a store of updates",
        "leave it out, or few days of [keep]",
    ]
    if config.record.local_models or config.record.updates:
        yield [
            "recordings at the server",
            "record.local_models or record.updates keeps what single clients sent, without encryption",
            "remove these settings",
        ]
