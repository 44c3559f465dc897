"""Runs over images in files: all in memory, some of them, or none, on both engines, and gone on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.api import Experiment, resume
from fedlens.base.errors import RunDirectoryError
from tests.contract.contract_kit import Stopping, nightly_but, outcome

pytestmark = pytest.mark.usefixtures("quick_workers")

CACHES = {"all": 2.0, "some": 8000 / 2**30, "none": 0.0}  # GiB; the images take 19,200 bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """100 images in two classes, from four wards; uncompressed, so that none changes its size."""
    draw = np.random.RandomState(0)
    for number in range(100):
        bright = 150 if number % 2 else 60
        pixels = np.clip(draw.normal(bright, 40, (8, 8, 3)), 0, 255).astype(np.uint8)
        path = tmp_path / "images" / ("day" if number % 2 else "night") / f"ward{number % 4}_{number}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "images"


def experiment(folder: Path, cache: float, engine: str = "inline") -> Experiment:
    dataset = {"name": "image-folder", "path": str(folder), "client_pattern": "(ward[0-9])", "size": 8}
    return Experiment(
        rounds=3,
        model="small-cnn",
        data={"dataset": dataset, "partition": "natural", "cache": cache, "augment": "flip"},
        local={"lr": 0.1, "epochs": 2, "batch_size": 10},
        engine=engine,
        record={"clients": True},
    )


@pytest.mark.parametrize(
    "shared", [["some"], pytest.param(["all", "none"], marks=pytest.mark.nightly)], ids=["some", "others"]
)
def test_however_much_is_kept_on_whatever_engine_the_numbers_are_the_same(
    shared: list[str], folder: Path, tmp_path: Path
) -> None:
    runs = [
        experiment(folder, CACHES[name], engine).run(tmp_path / f"{name}-{engine}")
        for engine, names in (("inline", CACHES), ("processes", shared))
        for name in names
    ]
    assert runs[0].metrics[-1]["test_accuracy"] == 1.0
    assert all(outcome(run) == outcome(runs[0]) for run in runs[1:])


@pytest.mark.parametrize("cache", nightly_but({"some"}, CACHES))
def test_a_run_goes_on_over_the_same_files_only(folder: Path, tmp_path: Path, cache: str) -> None:
    whole = experiment(folder, CACHES[cache]).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        experiment(folder, CACHES[cache]).run(tmp_path / "stopped", progress=Stopping(2))
    changed = folder / "day" / "ward1_1.bmp"
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 255]))
    with pytest.raises(
        RunDirectoryError, match="the images or labels differ from those at the start of the run"
    ):
        resume(tmp_path / "stopped")
    changed.write_bytes(content)
    assert outcome(resume(tmp_path / "stopped")) == outcome(whole)


@pytest.mark.parametrize("cache", CACHES)
def test_what_cannot_be_decoded_is_left_out_of_every_run_alike(
    folder: Path, tmp_path: Path, cache: str
) -> None:
    bad = folder / "night" / "ward0_0.png"
    good = folder / "night" / "ward0_0.bmp"
    Image.open(good).save(bad)
    good.unlink()
    content = bytearray(bad.read_bytes())
    content[60] ^= 255  # the checksum of the pixels tells, and nothing before it
    bad.write_bytes(content)
    with pytest.raises(Exception, match=r"ward0_0\.png"):
        experiment(folder, CACHES[cache]).run(tmp_path / "strict")
    assert not (tmp_path / "strict").exists()
    skipping = experiment(folder, CACHES[cache]).with_settings("data.dataset.on_error=skip")
    result = skipping.run(tmp_path / "skipping")
    assert any("ward0_0.png" in note for note in result.summary["notes"])
    assert result.metrics[-1]["failed"] == 0
