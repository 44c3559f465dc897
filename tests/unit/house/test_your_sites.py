"""What the page "From a study to your sites" says, done as far as one process can."""

from __future__ import annotations

import base64
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from fedlens.identity.keys import KeyPair
from fedlens.run.trial_round import trial_round
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan_of
from fedlens.site.contract import read_contract, site_part
from fedlens.site.join import site_text
from fedlens.site.local_data import LocalData
from fedlens.site.policy import refusals, refused, work_of
from fedlens.site.settings import SITE_FILE, SiteCompute, SiteData, SiteSettings
from tests.unit.cli.printed import parsed
from tools.sample_dossier import DOSSIER, made

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("from-a-study-to-your-sites.md", "sheet-for-it.md")


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the scripts that the page names, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / PAGES[0]).read_text(encoding="utf-8")
    commands = re.findall(r"^\$ python docs/examples/(\S+) (.+)$", page, flags=re.MULTILINE)
    assert len(commands) == 5
    for script, words in commands:
        monkeypatch.setattr(sys, "argv", [script, *words.split()])
        runpy.run_path(str(DOCS / "examples" / script), run_name="__main__")


def test_the_sites_of_the_page_read_the_experiment_of_the_page(scripts: None) -> None:
    experiment = site_part(plan_of(read_source(str(DOCS / "examples" / "hospitals.toml"))).config)
    counted = {}
    for name in ("ward-a", "ward-b", "ward-c"):
        folder = Path(name) / "fedlens-site"
        folder.mkdir(mode=0o700)
        (folder / SITE_FILE).write_text(site_text(name, "hospitals", folder, Path(name) / "scans"))
        contract = read_contract(experiment, SiteSettings.read(folder / SITE_FILE))
        counted |= LocalData.open(contract, name, folder, "run").clients
    sizes = {name: len(positions) for name, positions in counted.items()}
    assert sizes == {"ward-a": 360, "ward-b": 287, "ward-c": 239}
    page = (DOCS / PAGES[0]).read_text(encoding="utf-8")
    assert "1 client: ward-a 360" in page
    assert f"summed over {sum(sizes.values())} images of the sites" in page


def test_a_site_that_allows_secure_sums_alone_refuses_the_plain_experiment_of_the_page(
    tmp_path: Path,
) -> None:
    site = SiteSettings.of({"data": {"dataset": "folder"}, "allow": {"secure_sum": "only"}}, tmp_path)
    refused = {}
    for name in ("hospitals.toml", "hospitals-secure.toml"):
        experiment = site_part(plan_of(read_source(str(DOCS / "examples" / name))).config)
        refused[name] = refusals(read_contract(experiment, site), site)
    assert [len(each) for each in refused.values()] == [1, 0]
    assert "secure_sum" in refused["hospitals.toml"][0]


def test_the_suggested_allow_is_valid_and_allows_the_experiments_of_the_page(tmp_path: Path) -> None:
    officer = base64.b64encode(KeyPair.make().public).decode()
    allowed = (DOCS / "examples" / "site-allow.toml").read_text("utf-8")
    for allow, name in (
        (allowed, "hospitals.toml"),
        (allowed.replace("# secure_sum", "secure_sum"), "hospitals-secure.toml"),
    ):
        path = tmp_path / SITE_FILE
        path.write_text(
            f'{allow}\n[data]\ndataset = {{name = "digits"}}\n[reviewers]\nofficer = "{officer}"\n'
        )
        site = SiteSettings.read(path)
        site.check_names()
        planned = plan_of(read_source(str(DOCS / "examples" / name)))
        contract = read_contract(site_part(planned.config), site)
        assert refusals(contract, site) == []
        algorithm = trial_round(planned, 3, at_site=True).built.algorithm
        for op, run in algorithm.ops.items():
            if algorithm.takes(op) is None:  # not asked of clients
                continue
            assert refused(work_of(op, run, 191), site) == []  # of ward-c, which has the fewest
    assert SiteSettings.read(path).allow.secure_sum == "only"


def test_the_sheet_names_the_limits_of_the_unit_and_the_values_of_site_toml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    sheet = (DOCS / PAGES[1]).read_text(encoding="utf-8")
    unit = (DOCS / "deploy" / "fedlens-site.service").read_text(encoding="utf-8").splitlines()
    assert {"MemoryMax=8G", "CPUQuota=200%"} <= set(unit)
    assert "8 GB (`MemoryMax`) and two cores (`CPUQuota`)" in sheet
    assert f"`[data] cache` ({SiteData.model_fields['cache'].default:g} GiB" in sheet
    assert f"`[compute] max_message` ({SiteCompute().max_message:,} MiB)" in sheet
    assert "`join` sets `[compute] threads` to half of the cores" in sheet
    assert "\nthreads = 4\n" in site_text("ward", "f", DOCS, DOCS)


def test_the_dossier_of_the_examples_is_current_and_of_the_page(tmp_path: Path) -> None:
    changing = r"fedlens \S+ on \S+|versions\.\w+ text\[\d+\]|some \d+ B"  # with the day and the packages
    kept, now = (re.sub(changing, "", text) for text in (DOSSIER.read_text(encoding="utf-8"), made(tmp_path)))
    assert kept == now, "write it anew: python -m tools.sample_dossier"
    assert str(tmp_path.parent) not in kept
    page = (DOCS / PAGES[0]).read_text(encoding="utf-8")
    bound = re.findall(r"^(?:digest|data use agreement, SHA-256): (\w{64})$", page, re.MULTILINE)
    assert len(bound) >= 2
    assert [each for each in bound if each not in kept] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_one(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (fedlens [^>\n]+)", text, flags=re.MULTILINE)
    said = re.findall(r"`(fedlens (?:federation|site|serve) [^`]+)`", text)
    whole = [command for command in said if " hospitals" in command or "--" in command]
    assert shown + whole
    for command in shown + whole:
        parsed(command.strip())
