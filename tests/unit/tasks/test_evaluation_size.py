"""evaluation.size: the stored size, another size, and windows, against slow loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.tasks.classification import Classification
from fedlens.tasks.detection import Detection
from fedlens.tasks.evaluation_size import FULL, Resized, Windows, evaluation_size
from fedlens.tasks.segmentation import Segmentation
from fedlens.vision.box_batch import BoxBatch

TASK = Segmentation()
SHAPE = (3, 11, 14)


def net() -> nn.Module:
    """A network whose logits depend on a neighbourhood, so that windows differ at their borders."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).eval()


def images(n: int = 2) -> Tensor:
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(1))


def slow_windows(module: nn.Module, inputs: Tensor, window, stride) -> Tensor:
    """For every pixel the mean of its logits in all windows, each window cut out on its own."""
    height, width = inputs.shape[2:]
    tops = {min(top, height - window[0]) for top in range(0, height, stride[0])}
    lefts = {min(left, width - window[1]) for left in range(0, width, stride[1])}
    seen: dict[tuple[int, int], list[Tensor]] = {}
    for top in tops:
        for left in lefts:
            out = module(inputs[:, :, top : top + window[0], left : left + window[1]])
            for i in range(window[0]):
                for j in range(window[1]):
                    seen.setdefault((top + i, left + j), []).append(out[:, :, i, j])
    result = torch.empty(len(inputs), 2, height, width)
    for (i, j), parts in seen.items():
        result[:, :, i, j] = torch.stack(parts).mean(0)
    return result


@pytest.mark.parametrize(
    ("window", "stride"),
    [((4, 5), (2, 3)), ((4, 5), (4, 5)), ((11, 6), (11, 1)), ((3, 14), (2, 14)), ((7, 7), (5, 5))],
)
def test_windows_average_logits_as_a_slow_loop_does(window, stride) -> None:
    module, inputs = net(), images()
    with torch.inference_mode():
        found = Windows(window, stride)(TASK, module, inputs, None)
        torch.testing.assert_close(found, slow_windows(module, inputs, window, stride))
        one = Windows(window, stride)(TASK, module, inputs[:1], None)
    torch.testing.assert_close(one, found[:1])


def test_the_last_window_ends_at_the_border_and_none_comes_twice() -> None:
    assert Windows((4, 4), (4, 4)).starts((11, 12)) == ([0, 4, 7], [0, 4, 8])
    assert Windows((4, 4), (3, 2)).starts((4, 5)) == ([0], [0, 1])


def test_one_window_of_the_whole_image_and_the_stored_size_are_the_full_size() -> None:
    module, inputs = net(), images()
    with torch.inference_mode():
        expected = module(inputs)
        for size in (FULL, Windows((11, 14), (11, 14)), Resized((11, 14))):
            assert torch.equal(size(TASK, module, inputs, None), expected)


def test_another_size_is_bilinear_both_ways() -> None:
    module, inputs = net(), images()
    with torch.inference_mode():
        found = Resized((6, 8))(TASK, module, inputs, None)
        small = F.interpolate(inputs, (6, 8), mode="bilinear", align_corners=False)
        expected = F.interpolate(module(small), (11, 14), mode="bilinear", align_corners=False)
    assert torch.equal(found, expected)
    assert found.shape == (2, 2, 11, 14)


def test_detections_come_back_in_pixels_of_the_stored_images() -> None:
    class Whole(nn.Module):
        """Answers with the box of the whole image, and of its top left quarter."""

        def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
            _, _, height, width = images.shape
            boxes = torch.tensor([[0.0, 0, width, height], [0, 0, width / 2, height / 2]])
            labels, scores = torch.tensor([0, 1]), torch.tensor([0.5, 0.25])
            return [{"boxes": boxes, "labels": labels, "scores": scores} for _ in images]

    task, module = Detection(), Whole().eval()
    assert evaluation_size([6, 8], task, SHAPE) == Resized((6, 8))
    truth = BoxBatch(torch.tensor([[0.0, 0, 14, 11]]), torch.tensor([0]), torch.tensor([1]), 2)
    for size in (Resized((6, 8)), Resized((22, 30)), FULL):
        found = size(task, module, images(), truth)
        for one in found:
            torch.testing.assert_close(one["boxes"], torch.tensor([[0.0, 0, 14, 11], [0, 0, 7, 5.5]]))
            assert one["scores"].tolist() == [0.5, 0.25]
    with pytest.raises(ConfigError, match=r"not evaluated in windows .*'full', or \[height, width\]"):
        evaluation_size({"window": 8, "stride": 8}, task, SHAPE)


def test_settings_become_sizes() -> None:
    assert evaluation_size("full", Classification(), (1, 8, 8)) is FULL
    assert evaluation_size([6, 8], TASK, SHAPE) == Resized((6, 8))
    assert evaluation_size({"window": 8, "stride": [4, 6]}, TASK, SHAPE) == Windows((8, 8), (4, 6))


@pytest.mark.parametrize(
    ("setting", "task", "says"),
    [
        ([4, 4], Classification(), "models for classification are not evaluated at another size"),
        ({"window": 4, "stride": 4}, Classification(), "models for classification are not evaluated in wind"),
        ({"window": 12, "stride": 4}, TASK, r"the window is 12x12 pixels \(height x width\), but the images"),
        ({"window": [4, 5], "stride": [4, 6]}, TASK, "the stride is 4x6 pixels .* but the window is 4x5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(setting, task, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        evaluation_size(setting, task, SHAPE)
    assert str(refused.value.where).startswith("evaluation.size")


def test_kept_features_have_no_other_size() -> None:
    with pytest.raises(ConfigError, match="features of images are kept at the stored size"):
        evaluation_size([4, 4], TASK, SHAPE, features=True)
