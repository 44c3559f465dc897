"""The task detection: its loss, its counts, predictions, rows and pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.tasks.detection import KEPT, Detection, detection, dictionaries
from fedlens.tasks.picture import class_colour
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.change import Change
from fedlens.vision.mask_colors import mask_colors
from tests.unit.tasks.detection_kit import GridDetector, batch

TASK = Detection()


def answer(boxes: Any, labels: Any, scores: Any) -> dict[str, Tensor]:
    """The detections of one image."""
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "scores": torch.tensor(scores, dtype=torch.float32),
    }


def predicted(one: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """What `predict` says of one image, as arrays."""
    return {name: value[0].numpy() for name, value in TASK.predict([one]).items()}


def test_the_loss_is_the_sum_of_the_losses_that_the_module_returns() -> None:
    losses = {"box": torch.tensor(0.5), "class": torch.tensor([0.25])}
    assert TASK.loss(losses, batch(1)[1]).item() == 0.75
    assert TASK.loss(losses, batch(1)[1]).dim() == 0


@pytest.mark.parametrize("outputs", [{}, [], torch.zeros(2)])
def test_a_module_without_losses_is_refused(outputs: Any) -> None:
    with pytest.raises(ConfigError, match="in training mode, not its losses by name"):
        TASK.loss(outputs, batch(1)[1])


def test_boxes_without_an_area_take_no_part_in_training() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [3, 3, 3, 9], [5, 5, 9, 5], [1, 1, 9, 9]])
    targets = BoxBatch(boxes, torch.arange(4), torch.tensor([0, 0, 2, 2]), 3)
    assert [one["labels"].tolist() for one in dictionaries(targets)] == [[0], [], [3]]


def test_the_module_gets_targets_only_in_training() -> None:
    module, (images, targets) = GridDetector(2), batch(2, classes=2, size=(32, 32))
    assert set(TASK.outputs(module.train(), images, targets)) == {"box", "class", "object"}
    assert len(TASK.outputs(module.eval(), images, targets)) == 2
    assert len(TASK.outputs(module.eval(), images, None)) == 2


def test_a_batch_without_a_box_is_not_divided_by_zero() -> None:
    module, (images, targets) = GridDetector(2).train(), batch(2, size=(32, 32))
    nothing = BoxBatch(targets.boxes[:0], targets.labels[:0], targets.image[:0], 2)
    assert torch.isfinite(TASK.loss(TASK.outputs(module, images, nothing), nothing))


def test_counts_are_boxes_of_each_class() -> None:
    targets = BoxBatch(torch.zeros(4, 4), torch.tensor([1, 1, 0, 2]), torch.tensor([0, 0, 0, 2]), 3)
    assert TASK.counts(targets, 4).tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert TASK.most_counts((3, 20, 30)) == 600


def test_boxes_follow_a_flip() -> None:
    targets = BoxBatch(torch.tensor([[1.0, 2, 4, 6]]), torch.tensor([0]), torch.tensor([0]), 1)
    moved = TASK.move(targets, Change.flips(torch.tensor([True]), (10, 10)))
    assert moved.boxes.tolist() == [[6, 2, 9, 6]]


def test_a_prediction_is_sorted_padded_and_without_values_that_are_not_finite() -> None:
    one = answer([[0, 0, 1, 1], [0, 0, 2, 2], [0, 0, torch.nan, 2]], [0, 1, 2], [0.25, 0.5, 0.75])
    found = TASK.predict([one, answer([], [], [])])
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "boxes": (2, KEPT, 4), "labels": (2, KEPT), "scores": (2, KEPT),
    }  # fmt: skip
    assert found["labels"][0, :3].tolist() == [1, 0, -1]
    assert found["scores"][0, :3].tolist() == [0.5, 0.25, 0]
    assert (found["labels"][1] == -1).all()


def test_more_than_300_detections_are_cut_to_the_best() -> None:
    scores = torch.rand(500, generator=torch.Generator().manual_seed(0))
    one = {"boxes": torch.rand(500, 4), "labels": torch.zeros(500, dtype=torch.int64), "scores": scores}
    assert torch.equal(TASK.predict([one])["scores"][0], scores.sort(descending=True).values[:KEPT])


def test_every_image_has_the_same_columns() -> None:
    some = TASK.row(predicted(answer([[1, 2, 3, 4]], [1], [0.5])), ["cat", "dog"], top=2)
    none = TASK.row(predicted(answer([], [], [])), ["cat", "dog"], top=2)
    assert list(some) == list(none) == ["objects", "class", "score", "box", "class_2", "score_2", "box_2"]
    assert list(some.values()) == [1, "dog", 0.5, "1.0 2.0 3.0 4.0", None, None, None]
    assert none["objects"] == 0


def test_the_shown_score_chooses_what_is_drawn_and_counted() -> None:
    found = predicted(answer([[2, 2, 12, 12], [20, 20, 30, 30]], [0, 1], [0.9, 0.2]))
    assert TASK.row(found, ["cat", "dog"])["objects"] == 1
    assert detection(shown_score=0.1).row(found, ["cat", "dog"])["objects"] == 2
    image = np.zeros((3, 32, 32), np.uint8)
    assert (TASK.draw(image, found)[:448] == class_colour(0)).all(2).any()
    assert not (TASK.draw(image, found)[:448] == class_colour(1)).all(2).any()
    assert (detection(shown_score=0.1).draw(image, found)[:448] == class_colour(1)).all(2).any()


def test_pictures_have_the_colours_of_the_page() -> None:
    assert [class_colour(label) for label in range(90)] == list(map(tuple, mask_colors(90).tolist()))
    found = predicted(answer([[2, 12, 30, 30]], [5], [0.9]))
    picture = TASK.draw(np.zeros((3, 32, 32), np.uint8), found)
    yellow = (picture == mask_colors(6)[5]).all(2)
    assert yellow[:448].any()
    assert yellow[448:].any()  # the square before the name in the legend
    assert not (picture[:448] == 255).all(2).any()  # white letters could not be read on yellow


@pytest.mark.parametrize(("classes", "boxes"), [(1, 0), (1, 200), (80, 200), (3, 12)])
def test_a_picture_is_drawn_of_any_number_of_boxes_and_classes(classes: int, boxes: int) -> None:
    draw = np.random.default_rng(0)
    corner = draw.random((boxes, 2)) * 40
    found = predicted(
        answer(
            np.concatenate([corner, corner + 10], 1),
            draw.integers(0, classes, boxes),
            draw.random(boxes) / 2 + 0.5,
        )
    )
    image = draw.integers(0, 256, (1, 48, 64), np.uint8)
    truth = {"boxes": np.concatenate([corner, corner + 9], 1)[:3], "labels": np.zeros(min(3, boxes), int)}
    names = [f"class {label}" for label in range(classes)]
    picture = TASK.draw(image, found, truth, names)
    assert picture.dtype == np.uint8
    assert picture.shape[1] == 448
    assert picture.shape[0] > 336 + 20
    none = torch.empty(0, dtype=torch.int64)
    assert TASK.draw(image, found, BoxBatch(torch.empty(0, 4), none, none, 1), names).shape[1] == 448


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(2, 3),
        [answer([], [], [])],
        [{"boxes": torch.zeros(1, 4)}] * 2,
        [answer([[0, 0, 1, 1]], [3], [0.5])] * 2,
        [answer([[0, 0, 1, 1]], [-1], [0.5])] * 2,
        [{**answer([[0, 0, 1, 1]], [0], [0.5]), "labels": torch.tensor([0.0])}] * 2,
        [{**answer([[0, 0, 1, 1]], [0], [0.5]), "scores": torch.zeros(2)}] * 2,
    ],
)
def test_outputs_of_another_form_are_described(outputs: Any) -> None:
    assert "a list with one dictionary for each image" in str(
        TASK.misfit(outputs, torch.zeros(2, 3, 8, 8), 3)
    )


@pytest.mark.parametrize("label", [-1, 3])
def test_a_class_that_the_dataset_does_not_have_is_refused_when_it_is_found(label: int) -> None:
    task = TASK.fitted(DatasetInfo("mine", "detection", ("a", "b", "c"), (3, 8, 8)))
    none = torch.empty(0, dtype=torch.int64)
    truth = BoxBatch(torch.empty(0, 4), none, none, 2)
    with pytest.raises(
        ConfigError, match=f"of class {label}, but the 3 classes of the dataset are counted from 0"
    ):
        task.measure([answer([], [], []), answer([[0, 0, 1, 1]], [label], [0.5])], truth)
    task.measure([answer([], [], []), answer([[0, 0, 1, 1]], [2], [0.5])], truth)


def test_outputs_of_the_form_fit() -> None:
    answers = [answer([], [], []), answer([[0, 0, 1, 1]], [2], [0.5])]
    assert TASK.misfit(answers, torch.zeros(2, 3, 8, 8), 3) is None


def test_a_module_without_raw_outputs_has_no_graph() -> None:
    with pytest.raises(ConfigError, match=r"the model GridDetector has no `raw`") as caught:
        TASK.graph(GridDetector(2), torch.zeros(1, 3, 32, 32))
    assert "safetensors" in str(caught.value.hint)


def test_random_targets_lie_in_the_image() -> None:
    targets = TASK.random_targets(5, 3, (3, 20, 40), torch.Generator().manual_seed(0))
    assert len(targets) == 5
    assert targets.boxes[:, 0::2].max() <= 40
    assert targets.boxes[:, 1::2].max() <= 20
    assert TASK.loss(TASK.trial(GridDetector(3).train(), torch.zeros(2, 3, 32, 32), 3), targets).isfinite()


def test_the_values_of_an_evaluation_grow_with_the_image() -> None:
    small = TASK.output_values(DatasetInfo("mine", "detection", ("a",), (3, 64, 64)))
    assert TASK.output_values(DatasetInfo("mine", "detection", ("a",), (3, 128, 128))) == 4 * small


def test_other_kinds_of_data_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="the task is detection, but the dataset 'mine' is for classification"
    ):
        TASK.validate(DatasetInfo("mine", "classification", ("a",), (3, 64, 64)))


def test_half_precision_outputs_are_measured() -> None:
    one = answer([[0, 0, 8, 8]], [0], [0.5])
    truth = BoxBatch(one["boxes"], one["labels"], torch.zeros(1, dtype=torch.int64), 1)
    half = {"boxes": one["boxes"].half(), "labels": one["labels"], "scores": one["scores"].half()}
    assert TASK.metrics(TASK.measure([half], truth)) == {"map": 1.0, "map50": 1.0}
    assert TASK.predict([half])["scores"].dtype == torch.float32


def test_it_declares_what_a_rule_may_ask_for() -> None:
    assert TASK.losses is None
    assert not TASK.features
    assert not TASK.one_class
    assert TASK.placed
    assert not TASK.errors
