"""held_out.npz: the same values as clients.jsonl, the right images, and no image unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from fedlens import Experiment, Result, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.data.datasets.digits import digits
from fedlens.data.partition.partition import Partition
from fedlens.observers.held_out_predictions import PICTURED, HeldOutPredictions, most_suspicious
from fedlens.pages.run_page import write_report
from fedlens.run.progress import ProgressBase
from fedlens.tasks.classification import Classification
from tests.unit.pages.reading import read_page

TRAIN = digits(Path(), False, 0).train
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {
        "dataset": "digits",
        "partition": {"name": "iid", "clients": 5},
        "validation": 0.2,
        "validation_from": "client",
    },
    "evaluation": {"clients": "all"},
    "engine": "inline",
}


def predictions_of(result: Result) -> HeldOutPredictions:
    return HeldOutPredictions.read(result.directory / "held_out.npz")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Experiment(**SETTINGS).run(tmp_path_factory.mktemp("run") / "run", report=False)


def test_it_has_the_values_that_were_measured_and_the_images_that_each_client_holds_out(
    result: Result,
) -> None:
    found = predictions_of(result)
    lines = [json.loads(line) for line in (result.directory / "clients.jsonl").read_text().splitlines()]
    measured = {row["client"]: row for row in lines if row["round"] == 2}
    assert found.clients == tuple(sorted(measured))
    for k, client in enumerate(found.clients):
        own = slice(found.offsets[k], found.offsets[k + 1])
        assert found.right[own].mean() == pytest.approx(measured[client]["validation_accuracy"])
        loss = -np.log(found.confidence[own].astype(np.float64)).mean()
        assert loss == pytest.approx(measured[client]["validation_loss"], rel=1e-5)
    trained = set(Partition.load(result.directory / "partition.npz").indices.tolist())
    assert not trained & set(found.index.tolist())
    assert found.label.tolist() == TRAIN.targets[found.index].tolist()
    assert (np.diff(found.scores) <= 0).all()


def test_the_most_suspicious_images_are_kept_unless_the_settings_leave_images_out(
    result: Result, tmp_path: Path
) -> None:
    found = predictions_of(result)
    assert found.images is not None
    assert found.pictured is not None
    assert found.pictured.tolist() == most_suspicious(found).tolist()
    assert 0 < len(found.pictured) <= PICTURED
    first = int(found.pictured[0])
    assert found.contradictions.margins.argmax() == first
    assert np.array_equal(found.images[0], TRAIN.inputs[found.index[first]])
    without = Experiment(**SETTINGS, record={"images": False}).run(tmp_path / "run", report=False)
    assert predictions_of(without).images is None
    assert predictions_of(without).index.tolist() == found.index.tolist()


def test_names_and_pixels_of_held_out_images_are_among_what_left_the_clients(result: Result) -> None:
    kept = predictions_of(result)
    assert kept.images is not None
    named = replace(kept, files=tuple(f"{k}.png" for k in kept.index))
    for shown in (kept, named, replace(named, pictured=None, images=None)):
        shown.write(result.directory / "held_out.npz")
        words = read_page(write_report(result.directory).read_text("utf-8")).words
        pixels = f"{len(kept.images)} held-out images, with their pixels (held_out.npz, record.images)."
        assert (pixels in words) == (shown.images is not None)
        assert (f"The names of {len(kept.files or kept.index)} held-out images" in words) == bool(shown.files)
    kept.write(result.directory / "held_out.npz")


def test_images_are_removed_if_the_settings_leave_them_out_later(result: Result, tmp_path: Path) -> None:
    paused = Experiment(**{**SETTINGS, "rounds": 3}).run(tmp_path / "run", until=1, report=False)
    assert not (paused.directory / "held_out.npz").exists()
    predictions_of(result).write(paused.directory / "held_out.npz")
    config = paused.directory / "config.toml"
    config.write_text(config.read_text().replace('images = "auto"', "images = false"))
    resume(paused.directory, until=2, report=False)
    assert predictions_of(paused).images is None


@pytest.mark.parametrize("algorithm", ["local-only", "centralized", "fedbn"])
def test_models_of_the_clients_own_are_asked_too(algorithm: str, tmp_path: Path) -> None:
    model = {"name": "small-cnn", "norm": "batch"} if algorithm == "fedbn" else "linear"
    settings = {**SETTINGS, "algorithm": {"name": algorithm}, "model": model, "rounds": 1}
    result = Experiment(**settings).run(tmp_path / "run", report=False)
    found, lines = predictions_of(result), (result.directory / "clients.jsonl").read_text().splitlines()
    measured = [row for row in map(json.loads, lines) if row["round"] == 1]
    shares = [found.right[found.offsets[k] : found.offsets[k + 1]].mean() for k in range(len(found.clients))]
    assert shares == pytest.approx([row["validation_accuracy"] for row in measured])


class Odd(Classification):
    """A task of the user's own, whose `confidences` has too few rows."""

    def confidences(self, outputs: Tensor, targets: Tensor, most: int) -> dict[str, Tensor]:
        return {"label": targets}


def test_a_run_is_not_ended_by_confidences_that_do_not_fit(tmp_path: Path) -> None:
    heard = Noted()
    settings = {**SETTINGS, "task": f"{__name__}:Odd", "rounds": 1}
    result = Experiment(**settings).run(tmp_path / "run", report=False, progress=heard)
    assert result.summary["status"] == "finished"
    assert not (result.directory / "held_out.npz").exists()
    (note,) = [note for note in heard.notes if note.startswith("the page lists no suspicious labels: ")]
    assert "'confidence'" in note


class Noted(ProgressBase):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_images_from_files_keep_their_names(tmp_path: Path) -> None:
    scans = load_digits()
    for k in range(60):
        folder = tmp_path / "scans" / str(scans.target[k])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scans.images[k] * 15).astype(np.uint8)).save(folder / f"{k:03}.png")
    data = {
        **SETTINGS["data"],
        "dataset": {"name": "image-folder", "path": str(tmp_path / "scans"), "channels": 1},
    }
    names = {}
    for cache in (1.0, 0.0):  # decoded in memory, and on demand
        settings = {**SETTINGS, "data": {**data, "cache": cache}, "rounds": 1}
        found = predictions_of(Experiment(**settings).run(tmp_path / f"run{cache}", report=False))
        names[cache] = found.files
        assert [name.split("/")[0] for name in found.files] == [found.classes[label] for label in found.label]
    assert names[1.0] == names[0.0]


def test_no_client_measured_no_file_and_a_corrupt_one_is_named_on_the_page(
    result: Result, tmp_path: Path
) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "evaluation"} | {"rounds": 1}
    unmeasured = Experiment(**settings).run(tmp_path / "run", report=False)
    path = unmeasured.directory / "held_out.npz"
    assert not path.exists()
    assert "Labels to check" not in read_page(write_report(unmeasured.directory).read_text("utf-8")).text
    predictions_of(result).write(path)
    page = write_report(unmeasured.directory).read_text("utf-8")
    assert "Labels to check" in read_page(page).text
    path.write_bytes(b"damaged")
    page = write_report(unmeasured.directory).read_text("utf-8")
    assert "This section is missing: held_out.npz is corrupt" in read_page(page).text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label", lambda v: v + 10),
        ("top", lambda v: v - 1),
        ("scores", lambda v: v[:, :0]),
        ("confidence", lambda v: v * np.nan),
        ("offsets", lambda v: v[::-1].copy()),
        ("images", lambda v: v[:-1]),
        ("files", lambda v: ("one",)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    result: Result, tmp_path: Path, name: str, value: Any
) -> None:
    found = predictions_of(result)
    replace(found, **{name: value(vars(found)[name])}).write(tmp_path / "held_out.npz")
    with pytest.raises(
        RunDirectoryError, match=r"held_out.npz is corrupt: the values of '\w+' are not valid"
    ):
        HeldOutPredictions.read(tmp_path / "held_out.npz")


def test_the_predictions_are_not_counted_as_bytes_of_the_federation(result: Result) -> None:
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[1], lines[2]  # predictions are asked for in the last round alone
    assert (last["bytes_up"], last["bytes_down"]) == (first["bytes_up"], first["bytes_down"])
