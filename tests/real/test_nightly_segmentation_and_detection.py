"""Segmentation on CamVid and detection on BCCD, centralized: three seeds beside three bare loops of the same budget.

About an hour of one core in all; `pytest -m nightly tests/real/test_nightly_segmentation_and_detection.py`. Both are
noisy on the way, so the score after the last round counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest
import torch

from fedlens.api import Experiment
from tests.real import bare_detection, bare_segmentation

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(3 * 3600)]

SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    """The bare loops set PyTorch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def final(recipe: str, metric: str, root: Path, out: Path) -> list[float]:
    """The metric of the last round of a recipe, one run for each seed, on one thread."""
    reached = []
    for seed in SEEDS:
        experiment = Experiment.load(recipe, [f"seed={seed}", "engine.name=inline", "engine.threads=1"])
        result = experiment.run(out / f"{seed}", data_dir=root)
        assert result.metrics[-1]["round"] == experiment.config.rounds
        reached.append(result.metrics[-1][f"test_{metric}"])
    return reached


def agree(ours: list[float], bare: list[float]) -> None:
    """Whether the means differ by no more than the seeds of either side do."""
    sys.stdout.write(f"fedlens {ours}, bare loop {bare}\n")
    spread = max(max(ours) - min(ours), max(bare) - min(bare))
    assert abs(mean(ours) - mean(bare)) <= spread, (ours, bare)


def compared(recipe: str, metric: str, bare: Callable[[int], float], root: Path, out: Path) -> list[float]:
    """The scores of fedlens, after a comparison with those of the bare loop."""
    ours = final(recipe, metric, root, out)
    agree(ours, [bare(seed) for seed in SEEDS])
    return ours


def test_u_net_on_camvid_reaches_what_a_bare_loop_reaches(real_data: Path, tmp_path: Path) -> None:
    """A bare loop of one seed gave a mean IoU of 0.302."""
    if not (real_data / "CamVid").is_dir():
        pytest.skip("no CamVid below FEDLENS_DATA")
    pytest.importorskip("segmentation_models_pytorch")
    epochs = Experiment.load("camvid/drives-centralized").config.rounds
    ours = compared(
        "camvid/drives-centralized",
        "mean_iou",
        lambda seed: bare_segmentation.train(real_data, seed, epochs),
        real_data,
        tmp_path,
    )
    assert mean(ours) >= 0.27, ours


def test_yolov5n_on_bccd_reaches_what_a_bare_loop_reaches(real_data: Path, tmp_path: Path) -> None:
    """A bare loop of one seed gave a map50 of 0.85 and a map of 0.50."""
    if not (real_data / "BCCD").is_dir():
        pytest.skip("no BCCD below FEDLENS_DATA")
    pytest.importorskip("pycocotools")
    epochs = Experiment.load("bccd/centralized").config.rounds
    ours = compared(
        "bccd/centralized",
        "map50",
        lambda seed: bare_detection.train(real_data, seed, epochs)["map50"],
        real_data,
        tmp_path,
    )
    assert mean(ours) >= 0.75, ours
