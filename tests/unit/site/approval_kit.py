"""Approvals for tests: an experiment that sites approve before, or while, a server serves it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_keys import SiteKeys
from fedlens.run.rundir import RunDir
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config import read_config
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan
from fedlens.site.approvals import Approvals
from fedlens.site.contract import read_contract, site_part
from fedlens.site.review import Review
from fedlens.site.settings import SITE_FILE, SiteSettings


def approve(folder: Path, text: str, run: str, terms: ExperimentTerms) -> Review:
    """Approves an experiment with the key of the site in a folder."""
    settings, keys = SiteSettings.read(folder / SITE_FILE), SiteKeys(folder / "keys")
    review = Review(read_contract(text, settings), terms, run, Approvals.of(folder, settings))
    review.approvals.put(review.decide(keys.identity(), None), review.contract)
    assert review.missing() is None
    return review


def approve_run(experiment: Path, out: Path, registry: FederationFolder, folders: Iterable[Path]) -> None:
    """Lets sites that have joined approve a run that is not served yet: `serve` finds its record in `out`."""
    source = read_source(str(experiment), ())
    text = site_part(plan(read_config(source.values, source.locate), source).config)
    directory = RunDir(out)
    if (record := ServeRecord.read(directory)) is None:
        record = ServeRecord.new(source.values, registry.root, text)
        out.mkdir()
        directory.serve_path.write_text(json.dumps(asdict(record)))
    terms = ExperimentTerms(peers={each.name: bytes.fromhex(each.identity) for each in registry.sites()})
    for folder in folders:
        approve(folder, text, record.run, terms)
