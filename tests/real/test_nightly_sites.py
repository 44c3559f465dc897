"""Real images at sites, each a process with its own files, over TLS: the digest of a simulation over the same images.

Ten minutes of one core; `pytest -m nightly tests/real/test_nightly_sites.py`. `camvid/drives` has three drives to train
on, so it has three sites.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tomli_w

from fedlens import Experiment
from fedlens.analyses.replay import data_of_sites, replay
from fedlens.core import tensorfile
from fedlens.core.tree import digest
from fedlens.data.dataset import Dataset
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.private_files import private_folder
from fedlens.identity.site_keys import SiteKeys
from fedlens.run.build import Built, build
from fedlens.settings.config import plain
from fedlens.settings.config_source import Source, read_source
from fedlens.settings.plan import plan_of
from fedlens.site.settings import SITE_FILE
from tests.faults.run_kit import environment
from tests.unit.identity.federation_kit import HOST, ROOT
from tests.unit.site.approval_kit import approve_run

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(3600)]

ROUNDS = 2
CORNERS = ("xmin", "ymin", "xmax", "ymax")
Write = Callable[[Path, Path, Dataset, list[int]], dict[str, Any]]


def sources(root: Path, data: Dataset, rows: list[int]) -> list[Path]:
    """The files of a client's images, and of one test image: readers need it, and a site does not use it."""
    train, test = data.train.files, data.test.files
    assert train is not None
    assert test is not None
    return [*(root / train[row] for row in rows), root / test[0]]


def write_masks(folder: Path, root: Path, data: Dataset, rows: list[int]) -> dict[str, Any]:
    """The frames of a drive and their masks, in the order of the client's examples."""
    for kind in ("images", "masks"):
        for split in ("train", "test"):
            (folder / kind / split).mkdir(parents=True)
    images = [f"train/{number:04}.png" for number in range(len(rows))]
    for where, image in zip([*images, "test/0.png"], sources(root, data, rows), strict=True):
        shutil.copy(image, folder / "images" / where)
        shutil.copy(
            image.parent.with_name(f"{image.parent.name}annot") / image.name, folder / "masks" / where
        )
    return {"name": "mask-folder", "classes": list(data.classes), "void": 11, "fit": "pad"}


def write_boxes(folder: Path, root: Path, data: Dataset, rows: list[int]) -> dict[str, Any]:
    """Photographs of blood and their XML files."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    names = [f"{number:04}" for number in range(len(rows))] + ["test"]
    for name, image in zip(names, sources(root, data, rows), strict=True):
        shutil.copy(image, folder / "JPEGImages" / f"{name}.jpg")
        boxes = ElementTree.parse(image.parent.with_name("Annotations") / f"{image.stem}.xml")
        for each in boxes.findall("object"):
            left, top, right, bottom = (int(each.findtext(f"bndbox/{key}", "")) for key in CORNERS)
            if right <= left or bottom <= top:  # two of the set, which its reader leaves out
                boxes.getroot().remove(each)
        boxes.write(folder / "Annotations" / f"{name}.xml")
    for split, listed in (("train", names[:-1]), ("test", names[-1:])):
        (folder / "ImageSets/Main" / f"{split}.txt").write_text("\n".join(listed) + "\n")
    return {"name": "voc-xml", "classes": list(data.classes)}


def settings_of(recipe: str) -> dict[str, Any]:
    """A recipe with few rounds, in one process."""
    changes = [f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}", "engine.name=inline", "engine.device=cpu"]
    return dict(read_source(recipe, changes).values)


def at_sites(made: Built, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment over sites; the server has the test images."""
    data, config = made.client_data.dataset, plain(made.config)
    form = {
        "name": "sites",
        "kind": data.kind,
        "classes": list(data.classes),
        "input_shape": list(data.input_shape),
        "mean": list(data.mean),
        "std": list(data.std),
        "test": config["data"]["dataset"],
    }
    kept = {key: value for key, value in settings["data"].items() if key not in ("dataset", "partition")}
    engine = {"name": "network", "max_share": 1.0, "device": "cpu"}
    return {**settings, "data": {**kept, "dataset": form}, "engine": engine}


@pytest.mark.parametrize(
    ("recipe", "write", "needs"),
    [("camvid/drives", write_masks, "CamVid"), ("bccd/four", write_boxes, "BCCD")],
    ids=["camvid", "bccd"],
)
def test_real_sites_give_the_digest_of_a_simulation(
    recipe: str, write: Write, needs: str, real_data: Path, tmp_path: Path
) -> None:
    if not (real_data / needs).is_dir():
        pytest.skip(f"no {needs} in FEDLENS_DATA")
    settings = settings_of(recipe)
    made = build(plan_of(Source(settings)), real_data, download=False)
    asked = at_sites(made, settings)
    federation = FederationFolder.create(tmp_path / "hospitals", (HOST, free_port()), ROOT)
    for row in range(len(made.partition)):
        folder = private_folder(tmp_path / f"site-{row}")
        rows = made.client_data.client_indices(row).tolist()
        dataset = {**write(folder / "scans", real_data, made.client_data.dataset, rows), "path": "scans"}
        text = tomli_w.dumps({"data": {"dataset": dataset}, "compute": {"device": "cpu"}})
        (folder / SITE_FILE).write_text(text)
        join(federation, folder)
    here = Experiment(**settings).run(tmp_path / "here", data_dir=real_data, report=False).directory
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(asked))
    folders = [tmp_path / f"site-{row}" for row in range(len(made.partition))]
    approve_run(tmp_path / "experiment.toml", tmp_path / "run", federation, folders)
    there = served(tmp_path, len(made.partition), real_data)
    assert model_of(here) == model_of(there)
    assert metrics_of(here) == metrics_of(there)
    assert str(replay(there, data_of_sites(there, tmp_path))) == f"same bits in {ROUNDS} rounds"


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def join(federation: FederationFolder, folder: Path) -> None:
    """Joins a federation, as invitation, `site join` and `federation accept` do."""
    invitation = federation.invite(folder.name)
    keys = SiteKeys.join(folder / "keys", invitation)
    keys.install(federation.enrol(keys.enrolment(invitation), HOST), time.time())
    federation.accept(folder.name, keys.identity().fingerprint)


def served(folder: Path, sites: int, real_data: Path) -> Path:
    """Runs the experiment with a process for the server and one for each site; returns the run directory."""
    server = f"serve experiment.toml --federation hospitals --out run --no-report --data-dir {real_data}"
    commands = [server, *(f"site start --once --folder site-{row}" for row in range(sites))]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "fedlens", *command.split()],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    return folder / "run"


def model_of(directory: Path) -> str:
    """The SHA-256 of the model file's tensors."""
    return digest(tensorfile.read(directory / "model.safetensors").tensors)


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """The metrics without times."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "elapsed")} for line in lines
    ]
