"""Segmentation: the loss against bare PyTorch and slow loops, the metrics against scikit-learn, and pictures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, balanced_accuracy_score, jaccard_score
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured, total
from fedlens.tasks.segmentation import Segmentation, segmentation
from fedlens.vision.change import Change

TASK = Segmentation()
CLASSES, VOID = 5, 255


def batch(
    seed: int = 0, n: int = 3, classes: int = CLASSES, size: tuple[int, int] = (6, 7), void: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Logits [n, classes, H, W] and masks uint8 [n, H, W]."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, *size, generator=g)
    masks = torch.randint(classes, (n, *size), generator=g, dtype=torch.uint8)
    return logits, masks.masked_fill(torch.rand(n, *size, generator=g) < void, VOID)


def with_gradient(loss, logits: Tensor) -> tuple[Tensor, Tensor]:
    given = logits.clone().requires_grad_()
    value = loss(given)
    (gradient,) = torch.autograd.grad(value, given)
    return value.detach(), gradient


# ---- loss


@pytest.mark.parametrize("void", [0.0, 0.2, 0.99])
@pytest.mark.parametrize("n", [1, 8])
def test_the_loss_and_its_gradient_are_bit_for_bit_those_of_a_bare_loop(n: int, void: float) -> None:
    logits, masks = batch(n, n=n, size=(32, 40), void=void)
    bare = with_gradient(lambda z: F.cross_entropy(z, masks.long(), ignore_index=255), logits)
    found = with_gradient(lambda z: TASK.loss(z, masks), logits)
    assert all(torch.equal(a, b) for a, b in zip(bare, found, strict=True))


@pytest.mark.parametrize("dice", [0.0, 1.0])
@pytest.mark.parametrize("weights", [None, torch.ones(CLASSES)])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_without_a_labelled_pixel_has_loss_0_and_gradient_0(dice, weights, normalize) -> None:
    logits, masks = batch(void=1.0)
    task = Segmentation(dice=dice)
    loss, gradient = with_gradient(lambda z: task.loss(z, masks, weights, normalize), logits)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.parametrize("dice", [0.0, 1.0])
def test_weights_of_0_alone_give_loss_0_and_gradient_0(dice: float) -> None:
    logits, masks = batch()
    loss, gradient = with_gradient(lambda z: Segmentation(dice=dice).loss(z, masks, torch.zeros(5)), logits)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(logits))


def slow_terms(logits: Tensor, masks: Tensor, weights: Tensor) -> tuple[float, float, int]:
    """(sum of w l, sum of w, labelled pixels) in a loop over pixels."""
    weighted, mass, pixels = 0.0, 0.0, 0
    for k, row, column in np.ndindex(*masks.shape):
        label = int(masks[k, row, column])
        if label != VOID:
            z = logits[k, :, row, column].double()
            weighted += float(weights[label]) * float(z.logsumexp(0) - z[label])
            mass, pixels = mass + float(weights[label]), pixels + 1
    return weighted, mass, pixels


def slow_dice(logits: Tensor, masks: Tensor, weights: Tensor) -> float:
    """The equation of the docstring, class by class and pixel by pixel."""
    parts = []
    for c in range(logits.shape[1]):
        both, sizes, true = 0.0, 0.0, 0.0
        for k, row, column in np.ndindex(*masks.shape):
            label = int(masks[k, row, column])
            if label == VOID:
                continue
            p = float(logits[k, :, row, column].double().softmax(0)[c])
            w, hit = float(weights[label]), float(label == c)
            both, sizes, true = both + w * p * hit, sizes + w * (p + hit), true + w * hit
        if true > 0:
            parts.append(2 * both / sizes)
    return 1 - sum(parts) / len(parts) if parts else 0.0


WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_weigh_each_labelled_pixel(normalize: bool) -> None:
    logits, masks = batch(2, n=2, size=(4, 5))
    weighted, mass, pixels = slow_terms(logits, masks, WEIGHTS)
    found = float(TASK.loss(logits, masks, WEIGHTS, normalize))
    assert found == pytest.approx(weighted / (mass if normalize else pixels), rel=1e-6)
    bare = F.cross_entropy(logits, masks.long(), WEIGHTS, ignore_index=255)
    if normalize:
        assert found == pytest.approx(float(bare), rel=1e-6)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("classes_there", [CLASSES, 2])
def test_dice_is_that_of_a_slow_loop(weights: Tensor | None, classes_there: int) -> None:
    logits, masks = batch(3, n=2, size=(4, 5))
    masks = torch.where(masks == VOID, masks, masks % classes_there)
    given = torch.ones(CLASSES) if weights is None else weights
    added = Segmentation(dice=0.7).loss(logits, masks, weights) - TASK.loss(logits, masks, weights)
    assert float(added) == pytest.approx(0.7 * slow_dice(logits, masks, given), rel=1e-5)


def test_a_right_answer_has_dice_0_and_void_pixels_do_not_count() -> None:
    _, masks = batch(4)
    logits = 50 * F.one_hot(masks.where(masks != VOID, 0).long(), CLASSES).movedim(-1, 1).float()
    assert float(Segmentation(dice=1.0).loss(logits, masks)) == pytest.approx(0, abs=1e-6)
    changed = torch.where((masks == VOID)[:, None], -logits, logits)
    both = [Segmentation(dice=1.0).loss(z, masks) for z in (logits, changed)]
    assert torch.equal(*both)


def test_balanced_weights_count_labelled_pixels() -> None:
    _, masks = batch()
    counts = TASK.counts(masks, CLASSES)
    assert counts.shape == (3, CLASSES)
    for k in range(3):
        assert counts[k].tolist() == [int((masks[k] == c).sum()) for c in range(CLASSES)]
    pooled = counts.sum(0)
    weights = Segmentation(class_weights="balanced").client_weights(lambda: pooled)
    assert weights is not None
    torch.testing.assert_close(weights, pooled.sum() / (CLASSES * pooled.double()))
    assert TASK.most_counts((3, 6, 7)) == 42
    assert TASK.losses is None


# ---- metrics


@pytest.mark.parametrize("seed", range(8))
def test_the_metrics_are_those_of_scikit_learn(seed: int) -> None:
    logits, masks = batch(seed, size=(9, 11), void=0.1 * seed)
    draw = np.random.default_rng(seed)
    masks[torch.from_numpy(np.isin(masks.numpy(), draw.choice(CLASSES, seed % 4, replace=False)))] = VOID
    logits[:, draw.choice(CLASSES, seed % 3, replace=False)] = -9.0  # classes that are never answered
    there = masks != VOID
    true, answer = masks[there].numpy(), logits.argmax(1)[there].numpy()
    found = TASK.metrics(TASK.measure(logits, masks))
    each = jaccard_score(true, answer, average=None, labels=range(CLASSES), zero_division=0)
    seen = sorted({*true.tolist(), *answer.tolist()})
    assert found["mean_iou"] == pytest.approx(jaccard_score(true, answer, average="macro"))
    assert found["mean_iou"] == pytest.approx(each[seen].mean())
    assert found["frequency_iou"] == pytest.approx(jaccard_score(true, answer, average="weighted"))
    assert found["accuracy"] == pytest.approx(accuracy_score(true, answer))
    present_only = np.isin(answer, np.unique(true))
    recall = [(answer[true == c] == c).mean() for c in np.unique(true)]
    assert found["accuracy_balanced"] == pytest.approx(np.mean(recall))
    if present_only.all():
        assert found["accuracy_balanced"] == pytest.approx(balanced_accuracy_score(true, answer))
    loss = F.cross_entropy(logits.double(), masks.long(), ignore_index=255)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-6)
    names = [f"c{c}" for c in range(CLASSES)]
    details = TASK.details(TASK.measure(logits, masks), names)
    assert details == {f"iou_c{c}": pytest.approx(each[c]) for c in seen}


def test_a_class_in_neither_truth_nor_answer_is_left_out_and_one_that_is_only_answered_counts_as_0() -> None:
    logits = torch.zeros(1, 3, 1, 4)
    masks = torch.tensor([[[0, 0, 0, VOID]]], dtype=torch.uint8)
    logits[0, 0] = 1.0
    assert TASK.metrics(TASK.measure(logits, masks))["mean_iou"] == 1.0
    logits[0, 1, 0, 0] = 2.0
    found = TASK.metrics(TASK.measure(logits, masks))
    assert found["mean_iou"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["frequency_iou"] == found["accuracy_balanced"] == pytest.approx(2 / 3)


def test_pixels_without_a_class_define_no_metric() -> None:
    logits, masks = batch(void=1.0)
    measured = TASK.measure(logits, masks)
    assert TASK.metrics(measured) == {}
    assert TASK.details(measured, "abcde") == {}
    assert float(measured.sums["loss"]) == 0


def test_of_equal_logits_the_first_class_is_the_answer() -> None:
    masks = torch.zeros(1, 2, 2, dtype=torch.uint8)
    assert TASK.metrics(TASK.measure(torch.zeros(1, 3, 2, 2), masks))["accuracy"] == 1.0
    assert TASK.predict(torch.zeros(1, 3, 2, 2))["class"].max() == 0


def test_one_class_and_one_image() -> None:
    logits, masks = batch(classes=1, n=1)
    found = TASK.metrics(TASK.measure(logits, masks))
    assert found["mean_iou"] == found["accuracy"] == found["frequency_iou"] == 1.0
    assert found["loss"] == 0.0
    assert Segmentation(dice=1.0).loss(logits, masks) == 0


def test_half_precision_is_measured_in_float32() -> None:
    logits, masks = batch()
    half = TASK.measure(logits.bfloat16(), masks)
    exact = TASK.measure(logits.bfloat16().float(), masks)
    assert all(torch.equal(half.sums[name], exact.sums[name]) for name in exact.sums)


def test_any_split_has_the_same_integers_and_so_have_the_numbers_of_clients() -> None:
    logits, masks = batch(n=12)
    whole = TASK.measure(logits, masks)
    for sizes in ([1] * 12, [5, 7], [11, 1], [2, 3, 7]):
        split = total(
            TASK.measure(z, y) for z, y in zip(logits.split(sizes), masks.split(sizes), strict=True)
        )
        assert torch.equal(split.sums["confusion"], whole.sums["confusion"])
        assert split.sums["pixels"] == whole.sums["pixels"] == whole.sums["confusion"].sum()
        small = total(
            Measured.from_payload(TASK.condensed(TASK.measure(z, y)).to_payload())
            for z, y in zip(logits.split(sizes), masks.split(sizes), strict=True)
        )
        assert "confusion" not in small.sums
        assert TASK.metrics(small) == {
            name: value if name != "loss" else pytest.approx(value, rel=1e-12)
            for name, value in TASK.metrics(whole).items()
        }
        assert TASK.details(small, "abcde") == TASK.details(whole, "abcde")


@pytest.mark.parametrize("call", ["measure", "counts"])
def test_an_id_beyond_the_classes_is_refused_with_its_number(call: str) -> None:
    logits, masks = batch()
    masks[1, 2, 3] = 7
    with pytest.raises(DataError, match=r"1 pixels of a mask have the id 7, but the dataset has 5 classes"):
        TASK.measure(logits, masks) if call == "measure" else TASK.counts(masks, CLASSES)


# ---- the task


def test_settings_and_datasets_that_do_not_fit_are_refused() -> None:
    info = DatasetInfo("mine", "segmentation", [str(k) for k in range(255)], (3, 8, 8))
    Segmentation().validate(info)
    with pytest.raises(ConfigError, match="256 classes, but a mask has room for 255"):
        Segmentation().validate(replace(info, classes=[str(k) for k in range(256)]))
    with pytest.raises(ConfigError, match="but the dataset 'mine' is for classification"):
        Segmentation().validate(replace(info, kind="classification"))
    with pytest.raises(ConfigError, match="has 2 weights, but the dataset has 255 classes"):
        segmentation(class_weights=[1.0, 2.0]).validate(info)
    assert Segmentation().output_values(info) == 255 * 64


@pytest.mark.parametrize("n", [0, 1, 3])
def test_classes_are_counted_in_each_mask(n: int) -> None:
    masks = torch.randint(0, 5, (n, 6, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    masks[masks == 4] = 255
    counted = TASK.counts(masks.mT, 5)  # not contiguous
    assert counted.tolist() == [[int((mask == c).sum()) for c in range(5)] for mask in masks]
    assert counted.shape == (n, 5)
    assert counted.dtype == torch.int64


def test_logits_of_another_form_or_size_do_not_fit() -> None:
    images = torch.zeros(2, 3, 8, 10)
    assert TASK.misfit(torch.zeros(2, 5, 8, 10), images, 5) is None
    for outputs in (torch.zeros(2, 5), torch.zeros(2, 4, 8, 10), {"out": torch.zeros(2, 5, 8, 10)}):
        assert "[2, 5, H, W]" in str(TASK.misfit(outputs, images, 5))
    assert "[2, 5, 8, 10], the size of the images" in str(TASK.misfit(torch.zeros(2, 5, 4, 5), images, 5))


def test_random_targets_have_classes_and_void() -> None:
    masks = TASK.random_targets(4, 3, (1, 20, 20), torch.Generator().manual_seed(0))
    assert masks.shape == (4, 20, 20)
    assert sorted(masks.unique().tolist()) == [0, 1, 2, VOID]
    assert TASK.loss(torch.zeros(4, 3, 20, 20), masks) == pytest.approx(np.log(3), rel=1e-6)


def test_a_prediction_is_the_class_of_the_metric_and_its_probability() -> None:
    logits, masks = batch()
    found = TASK.predict(logits)
    assert found["class"].dtype == torch.uint8
    assert torch.equal(found["class"].long(), logits.argmax(1))
    torch.testing.assert_close(found["confidence"], logits.softmax(1).amax(1))
    right = (found["class"] == masks).sum()
    measured = TASK.measure(logits, masks)
    assert right == measured.sums["confusion"].diagonal().sum()


def test_pytorch_can_trace_a_prediction() -> None:
    class Net(nn.Module):
        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return dict(TASK.graph(nn.Identity(), images))

    logits, _ = batch()
    program = torch.export.export(Net(), (logits,), dynamic_shapes={"images": {0: torch.export.Dim("n")}})
    one = batch(5, n=1)[0]
    for name, value in TASK.predict(one).items():
        assert torch.equal(program.module()(one)[name], value)


def test_a_row_has_the_classes_with_the_most_pixels() -> None:
    mask = np.array([[2, 2, 2, 1]], np.uint8)
    assert TASK.row({"class": mask}, ["a", "b", "c"], top=5) == {
        "class": "c", "share": 0.75, "class_2": "b", "share_2": 0.25, "class_3": "a", "share_3": 0.0
    }  # fmt: skip


def test_masks_follow_a_crop_and_a_flip_and_are_void_outside() -> None:
    masks = torch.arange(16, dtype=torch.uint8).view(1, 4, 4)
    change = Change.windows(torch.tensor([[1.0, -1.0, 2.0, 4.0]]), (2, 4), torch.tensor([True]))
    assert TASK.move(masks, change).tolist() == [[[6, 5, 4, VOID], [10, 9, 8, VOID]]]


@pytest.mark.parametrize("classes", [1, 3, 80])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_shows_masks_and_a_legend_and_leaves_void_alone(classes: int, channels: int) -> None:
    draw = np.random.default_rng(0)
    image = np.full((channels, 24, 32), 128, np.uint8)
    answer, truth = (draw.integers(0, classes, (24, 32), np.uint8) for _ in range(2))
    truth[:4] = VOID
    names = [f"class {k}" for k in range(classes)]
    alone = TASK.draw(image, {"class": answer}, classes=names)
    both = TASK.draw(image, {"class": answer}, truth, names)
    assert alone.dtype == np.uint8
    assert both.shape[1] == 2 * alone.shape[1] + 4
    height = 24 * 7
    assert (both[: 4 * 7, alone.shape[1] + 4 :] == 128).all()  # void
    assert (both[:height, : alone.shape[1]] == alone[:height]).all()
    assert not (alone[:height] == 128).all()
    assert len(alone) > height + 20 * min(classes, 10)
    assert TASK.draw(image, {"class": answer}).shape == alone.shape
