"""U-Net and DeepLabV3+ in runs: refusals before them, weights of another run, and exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from fedlens import Experiment, Result, dataset
from fedlens.base.errors import ConfigError
from fedlens.data.dataset import Dataset
from fedlens.run.build import Built, build
from fedlens.run.rundir import RunDir
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.use.export import export
from fedlens.use.trained_model import read_trained


def streets(*, classes: int = 3, side: tuple[int, int] = (64, 64), images: int = 5) -> Dataset:
    """Images whose classes are bands of brightness, with a void row."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (images + 2, side[0] // 8, side[1] // 8))
    grey = coarse.repeat(8, 1).repeat(8, 2).astype(np.uint8)
    masks = (grey.astype(np.int64) * classes // 256).astype(np.uint8)
    masks[:, 0] = 255
    names = [f"band{k}" for k in range(classes)]
    colour = np.stack([grey, 255 - grey, grey], axis=-1)
    return dataset(colour[2:], masks[2:], colour[:2], masks[:2], classes=names)


class Coarse(torch.nn.Module):
    """Logits at a sixteenth of the size, normalized over the batch, and enlarged."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, num_classes, 16, 16),
            torch.nn.BatchNorm2d(num_classes),
            torch.nn.Upsample(scale_factor=16),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(images)
        return logits


COARSE = f"{__file__}:Coarse"


def run_of(out: Path, model: Any, data: Any = streets, **local: Any) -> Result:
    return Experiment(
        rounds=1,
        model=model,
        local={"lr": 0.01, "batch_size": 2, "last_batch": "drop", **local},
        data={"dataset": data, "partition": {"name": "iid", "clients": 2}},
        select={"clients_per_round": 1},
        engine="inline",
    ).run(out)


@pytest.mark.parametrize(
    "model",
    [
        COARSE,
        pytest.param({"name": "unet"}, marks=pytest.mark.nightly),
        pytest.param({"name": "deeplabv3plus", "atrous": "plain"}, marks=pytest.mark.nightly),
        pytest.param({"name": "deeplabv3plus", "atrous": "separable"}, marks=pytest.mark.nightly),
    ],
    ids=["own", "unet", "plain", "separable"],
)
def test_exported_graphs_give_the_runs_numbers_for_any_number_of_images(model: Any, tmp_path: Path) -> None:
    result = run_of(tmp_path / "run", model)
    trained = read_trained(RunDir.open(result.directory), "last")
    exported = export(trained, tmp_path / "model.onnx")
    assert exported.error is not None
    assert exported.error <= 1e-4
    images = np.random.default_rng(7).integers(0, 256, (5, 3, 64, 64)).astype(np.uint8)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, {"images": images}), strict=True))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (trained.mean, trained.std))
    with torch.inference_mode():
        logits = trained.module.eval()((torch.from_numpy(images) / 255 - mean) / std)
    assert logits.shape == (5, 3, 64, 64)
    np.testing.assert_allclose(found["confidence"], logits.softmax(1).amax(1), atol=1e-4)
    two = logits.topk(2, dim=1).values
    clear = ((two[:, 0] - two[:, 1]) > 1e-3).numpy()
    assert clear.mean() > 0.9
    assert (found["class"] == logits.argmax(1).numpy())[clear].all()


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
@pytest.mark.parametrize("model", [{"name": "unet"}, {"name": "deeplabv3plus"}], ids=lambda m: m["name"])
def test_images_that_are_padded_inside_are_exported_too(
    model: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    result = run_of(tmp_path / "run", model, data=lambda: streets(side=(40, 56)))
    trained = read_trained(RunDir.open(result.directory), "last")
    exported = export(trained, tmp_path / f"model.{ending}")
    assert exported.error is not None
    assert exported.error <= 1e-4


def test_a_client_with_a_batch_of_one_image_is_refused_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match="of 2 clients train on a batch of one image, on which 'deeplabv3"
    ) as c:
        run_of(Path("unused"), {"name": "deeplabv3plus"}, last_batch="keep")
    assert c.value.hint == "set local.last_batch = 'drop', or another local.batch_size"
    assert not Path("unused").exists()


def test_a_crop_on_which_a_batch_of_one_image_fails_is_refused_before_the_run(tmp_path: Path) -> None:
    def made(crop: int) -> Built:
        values = {
            "rounds": 1,
            "model": COARSE,
            "local": {"lr": 0.01, "batch_size": 2},
            "data": {
                "dataset": f"{__file__}:streets",
                "partition": {"name": "iid", "clients": 2},
                "augment": [{"name": "scale-crop", "crop": crop}],
            },
        }
        return build(plan(read_config(values), Source(values)), tmp_path, False)

    assert made(32).client_data.training_shape == (3, 32, 32)
    with pytest.raises(ConfigError, match="of 2 clients train on a batch of one image"):
        made(16)


def test_the_automatic_batch_of_an_evaluation_fits_images_that_are_enlarged_for_it(tmp_path: Path) -> None:
    def batch(size: Any) -> int:
        values = {
            "rounds": 1,
            "model": COARSE,
            "local": {"lr": 0.01, "last_batch": "drop"},
            "data": {"dataset": f"{__file__}:streets", "partition": {"name": "iid", "clients": 2}},
            "evaluation": {"size": size},
        }
        made = build(plan(read_config(values), Source(values)), tmp_path, False)
        evaluate: Any = made.algorithm.ops["evaluate"]
        return int(evaluate.batch_size)

    assert batch("full") == batch([32, 32]) == batch({"window": 32, "stride": 16}) == 500
    assert batch([1024, 2048]) == 3  # 6 values a pixel: 50 MB an image


def test_a_classifier_is_refused_on_masks() -> None:
    with pytest.raises(
        ConfigError, match=r"'resnet20' is for classification, but the dataset .* for segm"
    ) as c:
        run_of(Path("unused"), {"name": "resnet20"})
    assert "unet, deeplabv3plus" in str(c.value.hint)


def test_a_run_starts_from_one_with_other_classes_with_a_new_head(tmp_path: Path) -> None:
    small = {"name": "unet", "norm": "group", "freeze": "backbone"}
    first = run_of(tmp_path / "first", small)
    second = run_of(
        tmp_path / "second",
        {**small, "weights": f"run:{first.directory}"},
        data=lambda: streets(classes=4),
        lr_scale={"decoder": 10, "segmentation_head": 10},
    )
    notes = " ".join(second.summary["notes"])
    assert "segmentation_head.0.weight, segmentation_head.0.bias (the classifier)" in notes
    assert first.summary["model"]["trainable"] < first.summary["model"]["parameters"] - 2_000_000
    before, after = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("encoder."))
    assert not torch.equal(
        before["decoder.blocks.0.conv1.0.weight"], after["decoder.blocks.0.conv1.0.weight"]
    )
