"""A run lists what it takes from the clients: messages, over pauses too, and what it computes of all data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import fedlens
from fedlens import Experiment, Result, resume
from fedlens.data.dataset import Dataset
from fedlens.pages.run_page import write_report
from fedlens.run import run_description
from fedlens.run.progress import ProgressBase
from tests.unit.data.pictures import pixels
from tests.unit.data.vertical.tables import write_parties
from tests.unit.pages.reading import read_page

LEAST: dict[str, Any] = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 3}},
    "engine": "inline",
}


def own() -> Dataset:
    """Thirty grey images of two classes."""
    images = np.arange(40 * 16, dtype=np.uint8).reshape(40, 4, 4)
    labels = np.arange(40) % 2
    return fedlens.dataset(images[:30], labels[:30], images[30:], labels[30:])


def run(path: Path, **changes: Any) -> Result:
    return Experiment(**{**LEAST, **changes}).run(path, report=False)


def facts(result: Result) -> str:
    return " ".join(result.summary["pooled"])


def test_the_pooled_mean_and_deviation_of_own_images_are_listed(tmp_path: Path) -> None:
    data = {"dataset": own, "partition": {"name": "iid", "clients": 3}}
    moments = "The mean and the standard deviation of each channel, of 30 training images of all clients"
    assert moments in facts(run(tmp_path / "standard", data=data))
    for name, changed in (("unit", {**data, "normalize": "unit"}), ("digits", LEAST["data"])):
        assert "deviation" not in facts(run(tmp_path / name, data=changed)), name  # digits': published


def test_data_that_the_server_holds_or_pools_is_listed(tmp_path: Path) -> None:
    data = {**LEAST["data"], "validation": 0.1}
    pooled = run(tmp_path / "a", data=data, evaluation={"train": True})
    assert pooled.summary["traffic"]["server"] == {"evaluate": ["@test", "@train", "@validation"]}
    words = read_page(write_report(pooled.directory).read_text(encoding="utf-8")).words
    assert (
        "The server ran evaluate on the test data and on the training examples of all clients together and on the "
        "training examples that are held out, of all clients together." in words
    )
    clients = run(tmp_path / "b", data={**data, "validation_from": "client"}, algorithm="centralized")
    assert "How many training examples of each class each client holds, and how many it holds out" in facts(
        clients
    )
    assert clients.summary["traffic"] == {
        "clients": {},
        "server": {"evaluate": ["@test", "@validation"], "train": ["@train"]},
    }


@pytest.mark.parametrize("described", [True, False])
def test_the_size_of_the_images_is_listed_over_a_pause_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    """config.toml has the size, so that a resumed run does not choose it: not even before its first round."""
    for k in range(24):
        path = tmp_path / f"scans/{'ab'[k % 2]}/{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 4), k).save(path)
    settings = {**LEAST, "data": {**LEAST["data"], "dataset": {"name": "image-folder"}}}
    settings["data"]["dataset"]["path"] = str(tmp_path / "scans")
    if described:
        Experiment(**settings).run(tmp_path / "paused", report=False, until=1)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(run_description, "data_digest", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Experiment(**settings).run(tmp_path / "paused", report=False)
    listed = resume(tmp_path / "paused", report=False).summary["pooled"]
    assert listed == run(tmp_path / "whole", **settings).summary["pooled"]
    assert "The size of the images, chosen from the sizes of all images (data.dataset.size)." in listed


def interrupted(*given: Any) -> None:
    raise KeyboardInterrupt


def test_messages_are_counted_over_a_pause(tmp_path: Path) -> None:
    class Stops(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 1:
                raise KeyboardInterrupt

    settings = {**LEAST, "algorithm": {"name": "fedir", "target": "population"}}
    with pytest.raises(KeyboardInterrupt):
        Experiment(**settings).run(tmp_path / "paused", progress=Stops(), report=False)
    whole, paused = run(tmp_path / "whole", **settings), resume(tmp_path / "paused", report=False)
    rows = whole.summary["traffic"]["clients"]
    assert paused.summary["traffic"] == whole.summary["traffic"]
    assert rows["class-counts"]["up"] == {"counts": 10, "weight": 1}  # asked once, before the pause
    assert rows["class-counts"]["rounds"] == [1, 1]
    assert rows["train"]["up"]["update"] == 650
    assert rows["train"]["rounds"] == [1, 2]
    assert rows["train"]["bytes_up"] + rows["class-counts"]["bytes_up"] == whole.summary["totals"]["bytes_up"]


def test_parties_with_their_own_data_have_moments_of_their_own(tmp_path: Path) -> None:
    files = write_parties(tmp_path / "data")
    result = run(tmp_path / "own", data={"parties": {"files": files, "align": "ids"}}, algorithm="vertical")
    assert "deviation" not in facts(result)
    assert "Which test and validation examples all parties have: their ids are compared" in facts(result)
    with safe_open(result.directory / "model.safetensors", "pt") as file:
        of_parties = json.loads(file.metadata()["preprocessing"])["parties"]
    assert list(of_parties) == ["grey", "colour"]
    grey = np.stack([pixels(i, 8, 8, 1) for i in (1, 2, 3, 6, 7, 9, 10, 11)]) / 255
    assert of_parties["grey"] == {
        "scale": "1/255",
        "mean": [pytest.approx(grey.mean())],
        "std": [pytest.approx(grey.std())],
        **{"channels": 1, "height": 8, "width": 8, "fit": "crop", "upright": True, "inverted": False},
    }
    assert [of_parties["colour"][name] for name in ("channels", "height", "width")] == [3, 6, 10]
    windows = {"dataset": own, "parties": {"split": "halves", "align": "ids"}}
    cut = run(tmp_path / "windows", data=windows, algorithm="vertical")
    assert "deviation" in facts(cut)  # one for all windows
