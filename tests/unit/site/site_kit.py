"""Sites for tests: a folder with `site.toml` each, over parts of scikit-learn's digits or drawn images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray
from PIL import Image

from fedlens.core.wire.census import SiteCensus
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import with_held_out
from fedlens.settings.config_source import Source
from fedlens.settings.plan import Plan, plan_of
from fedlens.site.contract import read_contract, site_part
from fedlens.site.local_data import LocalData
from fedlens.site.settings import SITE_FILE, SiteSettings
from fedlens.site.workplace import Workplace

RUN = "run-1"


def write_images(
    folder: Path, images: NDArray[np.uint8], labels: Sequence[str], columns: Mapping[str, Sequence[str]] = {}
) -> None:
    """PNG files, uint8 [n, H, W], and a table `scans.csv` with their labels and other columns."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(("path", "label", *columns))]
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / f"{i:04d}.png")
        lines.append(",".join((f"{i:04d}.png", label, *(c[i] for c in columns.values()))))
    (folder / "scans.csv").write_text("\n".join(lines) + "\n")


def write_site(
    folder: Path,
    data: Mapping[str, Any] = {},
    files: Mapping[str, str] = {},
    allow: Mapping[str, Any] = {},
) -> SiteSettings:
    """`site.toml` over the images in `scans`."""
    dataset = {"name": "image-folder", "path": "scans", "table": "scans.csv"}
    tables = {
        "data": {"dataset": dataset, **data},
        "allow": {"min_examples": 1, **allow},
        "compute": {"device": "cpu"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SITE_FILE).write_text(tomli_w.dumps({**tables, "files": dict(files)}))
    return SiteSettings.read(folder / SITE_FILE)


def plan_at_server(settings: Mapping[str, Any]) -> Plan:
    """The plan of an experiment over sites."""
    return plan_of(Source({"engine": {"name": "network"}, **settings}))


def opened(plan: Plan, folders: Mapping[str, Path]) -> tuple[Roster, list[Workplace]]:
    """The workplaces of these sites, with the roster that their censuses make."""
    text = site_part(plan.config)
    local = {
        site: LocalData.open(read_contract(text, SiteSettings.read(folder / SITE_FILE)), site, folder, RUN)
        for site, folder in folders.items()
    }
    censuses = [SiteCensus.from_plain(site, data.census().to_plain()) for site, data in local.items()]
    config = plan.config
    roster = with_held_out(Roster.of(censuses), config.data.validation, config.seeds.data)
    return roster, [workplace(data, roster) for data in local.values()]


def workplace(local: LocalData, roster: Roster) -> Workplace:
    """A site's workplace, from what the server sends it."""
    rows = {name: roster.row(name) for name in local.names}
    mean, std = roster.moments or (None, None)
    sizes = {"examples": roster.examples, "held_out": roster.held_out}
    return Workplace.open(local, rows, {**sizes, "mean": mean, "std": std, "images": roster.images})
