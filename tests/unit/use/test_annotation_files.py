"""What `predict` writes of masks and boxes: palette PNGs and a COCO file in the pixels of the image files."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens import Result
from fedlens.base.errors import ConfigError
from fedlens.data.decoding import ImageForm
from fedlens.run.rundir import RunDir
from fedlens.use.annotation_files import in_file, mask_of_file
from fedlens.use.predict import Output, predict
from fedlens.use.trained_model import read_trained
from fedlens.vision.mask_colors import mask_colors
from tests.unit.use import placed_kit as kit


@pytest.fixture(scope="module")
def masks_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return kit.run(tmp_path_factory.mktemp("masks") / "run", kit.masks, "pixels", rounds=2)


@pytest.fixture(scope="module")
def boxes_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return kit.run(tmp_path_factory.mktemp("boxes") / "run", kit.boxes, "spots", rounds=1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three files: of the model's size, wide, and high."""
    (tmp_path / "photos").mkdir()
    images = kit.scenes(3, 5)[0]
    for k, size in enumerate([(32, 24), (90, 40), (30, 70)]):
        picture = Image.fromarray(images[k].transpose(1, 2, 0)).resize(size, Image.Resampling.NEAREST)
        picture.save(tmp_path / "photos" / f"{k}.png")
    return tmp_path / "photos"


def test_masks_have_the_size_of_the_files_and_class_ids_as_numbers(
    masks_run: Result, photos: Path, tmp_path: Path
) -> None:
    rows = masks_run.predict(photos, out=tmp_path / "out", round="last")
    files = sorted((tmp_path / "out" / "masks").iterdir())
    assert [file.name for file in files] == ["000001-0.png", "000002-1.png", "000003-2.png"]
    trained = read_trained(RunDir.open(masks_run.directory), "last")
    for file, row in zip(files, rows, strict=True):
        image = trained.form.decode(Path(row["path"]))
        inputs = (torch.from_numpy(image.copy()).float() / 255 - 0.5) / 0.25
        with torch.no_grad():
            answer = masks_run.model(inputs[None]).argmax(1)[0].numpy().astype(np.uint8)
        with Image.open(file) as mask, Image.open(row["path"]) as photo:
            assert (mask.mode, mask.size) == ("P", photo.size)
            expected = mask_of_file(answer, *photo.size, "crop")
            assert np.array_equal(np.asarray(mask), expected)
            assert np.array(mask.getpalette()).reshape(-1, 3)[:3].tolist() == mask_colors(3).tolist()
    assert (np.asarray(Image.open(files[1])) == 255).any()  # the crop cut off its sides
    assert not (tmp_path / "out" / "predictions.json").exists()
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 3


def coco(file: Path) -> Any:
    pycocotools = pytest.importorskip("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        return pycocotools.COCO(str(file))


def test_boxes_are_a_coco_file_that_pycocotools_reads(
    boxes_run: Result, photos: Path, tmp_path: Path
) -> None:
    boxes_run.predict(photos, out=tmp_path / "out", round="last", score=0.0)
    read = coco(tmp_path / "out" / "predictions.json")
    assert [image["file_name"] for image in read.loadImgs([1, 2, 3])] == [
        str(p) for p in sorted(photos.iterdir())
    ]
    assert [(image["width"], image["height"]) for image in read.loadImgs([1, 2, 3])] == [
        (32, 24),
        (90, 40),
        (30, 70),
    ]
    assert {c["id"]: c["name"] for c in read.loadCats(read.getCatIds())} == {1: "bright", 2: "dark"}
    trained = read_trained(RunDir.open(boxes_run.directory), "last")
    image = trained.form.decode(photos / "1.png")
    with torch.inference_mode():
        (one,) = trained.outputs((torch.from_numpy(image.copy())[None].float() / 255 - 0.5) / 0.25)
    # The wide file was scaled by 24 / 40 to 54 x 24 pixels, and its middle 32 of 54 were kept.
    expected = (one["boxes"].numpy() + np.array([11, 0, 11, 0])) / (24 / 40)
    own = read.loadAnns(read.getAnnIds(imgIds=[2]))
    found = np.array([each["bbox"] for each in own])
    assert found[:, :2] == pytest.approx(expected[:, :2], abs=0.01)
    assert found[:, 2:] == pytest.approx(expected[:, 2:] - expected[:, :2], abs=0.01)
    assert [each["score"] for each in own] == pytest.approx(one["scores"].tolist(), abs=1e-6)
    assert [each["category_id"] for each in own] == (one["labels"] + 1).tolist()
    # The annotations alone are COCO's format of results.
    with contextlib.redirect_stdout(io.StringIO()):
        assert len(read.loadRes(read.dataset["annotations"]).anns) == 9


def test_the_score_leaves_out_boxes_in_the_table_and_the_file(
    boxes_run: Result, photos: Path, tmp_path: Path
) -> None:
    counts = {}
    for score in (0.0, None, 0.5, 1.0):
        out = tmp_path / f"out-{score}"
        rows = boxes_run.predict(photos, out=out, round="last", score=score, pictures=False)
        found = json.loads((out / "predictions.json").read_text())["annotations"]
        counts[score] = [row["objects"] for row in rows]
        assert len(found) == sum(counts[score])
        assert all(each["score"] >= (0.25 if score is None else score) for each in found)
    assert counts[0.0] == [3, 3, 3]
    assert counts[1.0] == [0, 0, 0]
    assert sum(counts[0.0]) > sum(counts[None]) >= sum(counts[0.5]) > 0


@pytest.mark.parametrize("score", [-0.1, 1.5, float("nan")])
def test_a_score_outside_0_to_1_is_refused(boxes_run: Result, photos: Path, score: float) -> None:
    with pytest.raises(ConfigError, match="but must be in"):
        list(boxes_run.predict(photos, score=score))


def test_a_detector_that_gives_nan_writes_no_boxes(tmp_path: Path, photos: Path) -> None:
    result = kit.run(tmp_path / "run", kit.boxes, "lost", rounds=1)
    rows = result.predict(photos, out=tmp_path / "out", round="last", score=0.0)
    assert [row["objects"] for row in rows] == [0, 0, 0]
    assert coco(tmp_path / "out" / "predictions.json").dataset["annotations"] == []


def test_a_faulty_file_has_a_row_and_no_annotations(boxes_run: Result, photos: Path, tmp_path: Path) -> None:
    (photos / "1.png").write_bytes(b"damaged")
    rows = boxes_run.predict(photos, out=tmp_path / "out", round="last")
    assert [row["fault"] is None for row in rows] == [True, False, True]
    images = json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]
    assert [image["id"] for image in images] == [1, 3]


def test_earlier_masks_and_boxes_are_replaced_and_other_files_stay(
    masks_run: Result, boxes_run: Result, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    masks_run.predict(photos, out=out, round="last")
    (out / "masks" / "mine.png").touch()
    boxes_run.predict(photos, out=out, round="last", force=True)
    assert [file.name for file in (out / "masks").iterdir()] == ["mine.png"]
    masks_run.predict(photos / "0.png", out=out, round="last", force=True)
    assert not (out / "predictions.json").exists()
    assert sorted(file.name for file in (out / "masks").iterdir()) == ["000001-0.png", "mine.png"]


def test_rows_alone_are_predicted_without_files(masks_run: Result, photos: Path) -> None:
    trained = read_trained(RunDir.open(masks_run.directory), "last")
    assert [row["fault"] for row in predict(trained, [str(photos)])] == [None] * 3
    assert Output(photos.parent / "none").masks_folder == photos.parent / "none" / "masks"


def test_the_boxes_of_the_table_are_those_of_the_coco_file(
    boxes_run: Result, photos: Path, tmp_path: Path
) -> None:
    rows = boxes_run.predict(photos, out=tmp_path / "out", round="last", score=0.0)
    found = json.loads((tmp_path / "out" / "predictions.json").read_text())["annotations"]
    for at, row in enumerate(rows):
        left, top, width, height = next(each["bbox"] for each in found if each["image_id"] == at + 1)
        assert [float(v) for v in row["box"].split()] == pytest.approx(
            [left, top, left + width, top + height], abs=0.1
        )


def test_boxes_in_the_padding_alone_are_left_out() -> None:
    form = ImageForm(3, 50, 50, "pad")  # 200 x 100 pixels take the rows 12 to 37
    boxes = np.array([[0, 0, 50, 10], [0, 20, 50, 30]], np.float32)
    prediction = {"boxes": boxes, "labels": np.array([0, 1]), "scores": np.array([0.9, 0.5])}
    found = in_file(prediction, form, (200, 100))
    assert (found["boxes"].tolist(), found["labels"].tolist()) == ([[0, 32, 200, 72]], [1])
