"""Writes the dossier of an experiment: what a data protection impact assessment needs, from the settings.

GDPR art. 35 asks for the assessment, art. 30 for the record of processing. The text is in the templates `dossier_text`
of the pages; what no setting says is a line to be filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlens import __version__
from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.api import settings_of
from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import size
from fedlens.data.partition.roster import Roster
from fedlens.files.atomic_files import write_atomically
from fedlens.identity.federation_folder import FederationFolder
from fedlens.pages.left_clients import carried, left_clients
from fedlens.pages.render import page_text, write_page
from fedlens.privacy.guarantee import guarantee
from fedlens.results.run import read_run
from fedlens.run.trial_round import IMAGES, TrialRound, trial_round
from fedlens.server.retention import ServedRuns
from fedlens.server.serve import plan_at_sites
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config_source import Source
from fedlens.site.contract import site_part

_OPERATIONS = {"train": ": training on its images", EVALUATE_OWN: ": sums over the held-out images"}


def write_dossier(
    folder: Path,
    federation: FederationFolder,
    experiment: Source | Path,
    purpose: str | None = None,
    clients: int | None = None,
) -> list[Path]:
    """Writes `dossier.md` and `dossier.html`, and returns their paths.

    Args:
        folder: where to write them; it is made if it does not exist.
        federation: whose sites take part.
        experiment: its settings, or the directory of a run of `fedlens serve`.
        purpose: what the model is for, in the words of the operator.
        clients: how many clients the sites have together; by default one each. A run knows it.

    Raises `ConfigError` for settings that `fedlens serve` refuses, and `RunDirectoryError` for a run of no site.
    """
    sites = [site.name for site in federation.sites() if site.state == "accepted"]
    of_run: Mapping[str, Any] = {}
    if isinstance(experiment, Path):
        of_run = _facts_of_run(experiment)
        sites, clients = of_run["sites"], of_run["clients"]
    planned = plan_at_sites(of_run["source"] if isinstance(experiment, Path) else experiment)
    trial = trial_round(planned, clients or max(len(sites), planned.config.engine["min_sites"]))
    promise = _promise(trial)
    context = {
        "title": f"Dossier of '{planned.config.name}'",
        "aside": f"federation {federation.name}",
        "version": __version__,
        "today": f"{datetime.now(UTC):%Y-%m-%d}",
        "built": trial.built,
        "digest": hashlib.sha256(site_part(planned.config).encode()).hexdigest(),
        "sums": planned.config.sums_moments,
        "federation": federation,
        "sites": sites,
        "purpose": purpose,
        "images": IMAGES,
        "keeps_days": ServedRuns(federation.folder).days,
        "keeps": trial.keeps,
        "messages": list(_messages(trial)),
        "promise": promise,
        "risks": list(_risks(trial, promise)),
        **dict.fromkeys(("run", "until", "agreement")),
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
        "left": left_clients(run),
    }


def _promise(trial: TrialRound) -> dict[str, Any] | None:
    """The guarantee of `[privacy]` after all rounds; None without the table."""
    config, release = trial.built.config, trial.built.algorithm.release
    if config.privacy is None or release is None:
        return None
    return guarantee(config.privacy, [release] * config.rounds, config.record.unsafe)


def _messages(trial: TrialRound) -> Iterator[list[str]]:
    for op, row in trial.rows.items():
        shapes = "; ".join(f"{name}: {shape}" for name, shape in trial.shapes.get(op, {}).items())
        sent = (row["bytes_up"] + row.get("bytes_peer", 0)) / max(1, row["replies"])
        yield [
            f"{op}{_OPERATIONS.get(op, '')}",
            *carried(row),
            size(max(sent, trial.sent.get(op, 0))),
            shapes or "numbers",
        ]


def _risks(trial: TrialRound, promise: dict[str, Any] | None) -> Iterator[list[str]]:
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
    yield ["reconstruction of images", *inversion]
    member = [
        "whoever has the model can test whether an image was trained on",
        "a table [privacy] with noise of the system",
    ]
    if promise is not None and promise["sentence"].startswith("After"):
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
            "evaluation.clients = 'none', and test images at the server (data.dataset.test)",
        ]
    yield [
        "the operator as certificate authority",
        "without the call that compares the words, the operator can invent sites",
        "the call, to a number from another source than the invitation",
    ]
    if config.record.local_models or config.record.updates:
        yield [
            "recordings at the server",
            "record.local_models or record.updates keeps what single clients sent, without encryption",
            "remove these settings",
        ]
