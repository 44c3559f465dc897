"""Runs on masks: engines, per-client metrics, evaluation.size and predictions, bad masks; CamVid where it is."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from torch import Tensor, nn

from fedlens import Experiment, Result, dataset
from fedlens.base.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles, Paths
from fedlens.tasks.evaluation_size import Resized, Windows
from fedlens.tasks.segmentation import Segmentation

CLASSES = ("ground", "disc", "never")
SIZE = (16, 20)
OWN = str(Path(__file__))


def discs(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, H, W, 3] of a bright disc with noise, and masks with a void border."""
    draw = np.random.default_rng(seed)
    rows, columns = np.indices(SIZE)
    centres, radii = draw.uniform(4, 12, (n, 2)), draw.uniform(3, 5, n)
    disc = np.hypot(rows - centres[:, :1, None], columns - centres[:, 1:, None]) < radii[:, None, None]
    masks = disc.astype(np.uint8)
    masks[:, :, 0] = 255
    noise = draw.integers(0, 60, (n, *SIZE, 3))
    return (noise + 130 * disc[..., None]).astype(np.uint8), masks


def made(masks: Any = None, test_masks: Any = None) -> Dataset:
    images, own = discs(40, 0)
    test, test_own = discs(13, 1)
    return dataset(
        images,
        own if masks is None else masks(own),
        test,
        test_own if test_masks is None else test_masks(test_own),
        classes=CLASSES,
        clients=[f"client {k % 4}" for k in range(40)],
        name="discs",
    )


def some_discs() -> Dataset:
    return made()


def convolutions(input_shape: Sequence[int], classes: int, *, stride: int = 1) -> nn.Module:
    """Two convolutions; with a stride, logits are smaller than the image."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 6, 3, padding=1, stride=stride),
        nn.ReLU(),
        nn.Conv2d(6, classes, 3, padding=1),
    )


def experiment(*overrides: str, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {
            "dataset": some_discs,
            "partition": "natural",
            "validation": 0.2,
            "validation_from": "client",
        },
        "model": convolutions,
        "local": {"lr": 0.5, "batch_size": 4},
        "engine": {"name": "inline", "threads": 1},
    }
    return Experiment(**(settings | changed)).with_settings(*overrides)


def lines(result: Result) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in result.metrics]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("discs") / "run"
    return experiment("rounds=12", "evaluation.clients=all", "evaluation.every=4").run(out, report=False)


def normalized(images: np.ndarray) -> Tensor:
    data = some_discs()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return (torch.from_numpy(images.transpose(0, 3, 1, 2)).float() / 255 - mean) / std


def test_a_run_learns_and_its_metrics_are_those_of_scikit_learn_on_its_model(trained: Result) -> None:
    images, masks = discs(13, 1)
    with torch.inference_mode():
        logits = trained.model.eval()(normalized(images))
    there, last = masks != 255, trained.metrics[-1]
    true, answer = masks[there], logits.argmax(1).numpy()[there]
    assert last["test_mean_iou"] > 0.9
    assert last["test_accuracy"] == pytest.approx(accuracy_score(true, answer), abs=1e-6)
    assert last["test_mean_iou"] == pytest.approx(jaccard_score(true, answer, average="macro"), abs=1e-6)
    loss = F.cross_entropy(logits, torch.from_numpy(masks).long(), ignore_index=255)
    assert last["test_loss"] == pytest.approx(float(loss), rel=1e-4)
    summary = trained.summary
    assert summary["best"]["metric"] == "validation_mean_iou"
    assert set(summary["details"]) == {"test_iou_ground", "test_iou_disc"}
    assert any(
        "no test image has the class 'never': its IoU is left out" in note for note in summary["notes"]
    )
    assert last["clients_mean_iou_mean"] > 0.8


@pytest.mark.nightly  # CamVid does the same below
def test_two_processes_give_the_same_bits(tmp_path: Path, quick_workers: None) -> None:
    runs = [
        experiment("evaluation.clients=all", "algorithm=fedir", engine=engine).run(
            tmp_path / name, report=False
        )
        for name, engine in (
            ("one", {"name": "inline", "threads": 1}),
            ("two", {"name": "processes", "workers": 2, "threads": 1}),
        )
    ]
    assert lines(runs[0]) == lines(runs[1])
    trees = [result.model.state_dict() for result in runs]
    assert all(torch.equal(trees[0][name], trees[1][name]) for name in trees[0])


def test_the_stored_size_as_evaluation_size_changes_no_bit(tmp_path: Path) -> None:
    full = experiment().run(tmp_path / "full", report=False)
    same = experiment("evaluation.size=[16, 20]").run(tmp_path / "same", report=False)
    assert lines(full) == lines(same)


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        ("[8, 10]", Resized((8, 10))),
        ("{window = 8, stride = [8, 5]}", Windows((8, 8), (8, 5))),
    ],
)
def test_server_clients_and_predictions_take_the_same_size(
    setting: str, size: Any, tmp_path: Path, trained: Result
) -> None:
    result = experiment(f"evaluation.size={setting}", "evaluation.clients=all").run(
        tmp_path / "run", report=False
    )
    images, masks = discs(13, 1)
    task = Segmentation()
    with torch.inference_mode():
        logits = size(task, result.model.eval(), normalized(images), None)
        plain = result.model(normalized(images))
    expected = task.metrics(task.measure(logits, torch.from_numpy(masks)))
    last = result.metrics[-1]
    for name, value in expected.items():
        assert last[f"test_{name}"] == pytest.approx(value, rel=1e-5), name
    assert expected["loss"] != pytest.approx(
        task.metrics(task.measure(plain, torch.from_numpy(masks)))["loss"], rel=1e-3
    )
    folder = tmp_path / "images"
    folder.mkdir()
    for k in range(3):
        Image.fromarray(images[k]).save(folder / f"{k}.png")
    rows = list(result.predict(folder, out=tmp_path / "out"))
    answers = logits.argmax(1)
    for k, row in enumerate(rows):
        share = float((answers[k] == CLASSES.index(row["class"])).float().mean())
        assert row["share"] == pytest.approx(share, abs=1e-6)
    with open(tmp_path / "out" / "predictions.csv", newline="") as file:
        assert list(csv.DictReader(file).fieldnames or [])[:3] == ["path", "class", "share"]
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 3


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("[0, 8]", "must be"),
        ("'half'", "must be"),
        ("[8, 8, 8]", "must"),
        ("{window = 8}", "must have window and stride alone"),
        ("{window = 8, stride = 4, step = 2}", "must have window and stride alone"),
        ("{window = 0, stride = 4}", "must have window and stride alone"),
        ("{window = 32, stride = 4}", "the window is 32x32 pixels .* the images are 16x20"),
        ("{window = 8, stride = 9}", "the stride is 9x9 pixels .* but the window is 8x8"),
    ],
)
def test_a_wrong_size_is_refused_before_the_run(setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        experiment(f"evaluation.size={setting}").run(tmp_path / "run")
    assert "evaluation.size" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_an_exported_model_is_the_forward_pass_and_says_at_what_size_the_run_evaluated(
    tmp_path: Path, trained: Result
) -> None:
    small = experiment("evaluation.size=[8, 10]").run(tmp_path / "run", report=False)
    for result, size in ((trained, None), (small, {"size": [8, 10]})):
        made = result.export(tmp_path / f"{size is None}.pt2")
        facts = json.loads(made.with_name(f"{made.name}.json").read_text())
        assert facts.get("evaluation_size") == size
        assert {one["name"]: one["type"] for one in facts["outputs"]} == {
            "class": "uint8", "confidence": "float32"
        }  # fmt: skip
        assert [one["shape"] for one in facts["outputs"]] == [["n", *SIZE]] * 2


@pytest.mark.parametrize("weights", ["balanced", [1.0, 2.0, 0.5]])
def test_class_weights_and_dice_train(weights: Any, tmp_path: Path) -> None:
    task = {"class_weights": weights, "dice": 0.5}
    result = experiment(task=task, rounds=4).run(tmp_path / "run", report=False)
    assert result.metrics[-1]["test_mean_iou"] > result.metrics[0]["test_mean_iou"]


# ---- masks that do not fit


def with_id_7(masks: np.ndarray) -> np.ndarray:
    changed = masks.copy()
    changed[5, 3, 4] = 7
    return changed


def all_void(masks: np.ndarray) -> np.ndarray:
    return np.full_like(masks, 255)


def wrong_train() -> Dataset:
    return made(with_id_7)


def wrong_test() -> Dataset:
    return made(None, with_id_7)


def void_test() -> Dataset:
    return made(None, all_void)


def one_void() -> Dataset:
    def change(masks: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(masks))[:, None, None] < 2, 255, masks)

    return made(change)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (wrong_train, r"mask 5 has the id 7 in 1 pixels, but ids must be 0 to 2, or 255"),
        (wrong_test, r"mask 5 has the id 7 in 1 pixels, but ids must be 0 to 2, or 255"),
        (void_test, r"no test image of 'discs' has a class, so no metric is defined"),
    ],
)
def test_masks_that_cannot_be_measured_are_refused(name: Any, says: str, tmp_path: Path) -> None:
    data = {"dataset": name, "partition": "natural"}
    with pytest.raises(DataError, match=says):
        experiment(data=data).run(tmp_path / "run")


def test_masks_in_files_beyond_the_classes_are_refused_with_the_file(tmp_path: Path) -> None:
    _, masks = discs(4, 0)
    masks = with_id_7(np.concatenate([masks, masks]))
    for k, mask in enumerate(masks[:6]):
        Image.fromarray(mask).save(tmp_path / f"{k}.png")
    files = ImageFiles(tmp_path, Paths.of([f"{k}.png" for k in range(6)]), 0, *SIZE)
    pixels = np.zeros((6, 3, *SIZE), np.uint8)
    held = Examples(pixels, masks[:4].repeat(2, 0)[:6])
    built = Dataset("mine", Examples(pixels, files), held, CLASSES, (0.5,) * 3, (0.2,) * 3, "", "")
    with pytest.raises(DataError, match=r"the mask has the id 7") as refused:
        built.table()
    assert str(refused.value.where).endswith("5.png")


def test_masks_without_a_class_are_counted_in_a_note(tmp_path: Path) -> None:
    result = experiment(data={"dataset": one_void, "partition": "natural"}).run(
        tmp_path / "run", report=False
    )
    notes = " ".join(result.summary["notes"])
    assert "2 of 40 training masks have no class in any pixel: nothing is learned from them" in notes
    assert np.isfinite(result.metrics[-1]["test_loss"])


def test_what_has_no_place_in_segmentation_is_refused_with_the_reason(tmp_path: Path) -> None:
    for overrides, says in (
        (
            ["algorithm=moon"],
            "compares one feature vector per example, and models for segmentation have none",
        ),
        (["engine=vectorized"], "the loss of a batch is not the mean of losses of its examples"),
        (
            [f"model={{name = '{OWN}:convolutions', stride = 2}}"],
            r"returns \[2, 3, 8, 10\] .* must return \[2, 3, 16, 20\], the size of the images",
        ),
        (["task.class_weights=[1.0, 2.0]"], "has 2 weights, but the dataset has 3 classes"),
    ):
        with pytest.raises(ConfigError, match=says):
            experiment(*overrides).run(tmp_path / "run")


# ---- CamVid


@pytest.mark.nightly
@pytest.mark.real
def test_camvid_trains_on_two_engines_with_the_same_bits(
    real_data: Path, tmp_path: Path, quick_workers: None
) -> None:
    if not (real_data / "CamVid").is_dir():
        pytest.skip("no CamVid below FEDLENS_DATA")
    data = {
        "dataset": {"name": "camvid", "size": [32, 40]},
        "partition": "natural",
        "validation": 0.1,
        "validation_from": "client",
    }
    runs = [
        experiment(
            "local.batch_size=16",
            "evaluation.clients=all",
            "local.lr=0.1",
            "algorithm=fedir",
            data=data,
            engine=engine,
        ).run(tmp_path / name, report=False, data_dir=real_data)
        for name, engine in (
            ("one", {"name": "inline", "threads": 1}),
            ("two", {"name": "processes", "workers": 2, "threads": 1}),
        )
    ]
    assert lines(runs[0]) == lines(runs[1])
    last = runs[0].metrics[-1]
    assert last["test_loss"] < runs[0].metrics[0]["test_loss"]
    assert last["test_accuracy_balanced"] > 1.3 / 11, last  # of a constant answer: 1 / 11
    assert 0.01 < last["test_mean_iou"] < last["test_accuracy"]
    shutil.rmtree(tmp_path / "two")
