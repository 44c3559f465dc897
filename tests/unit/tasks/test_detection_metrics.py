"""Average precision of boxes against both COCO evaluators, and its independence of order and split."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedlens.core.measured import Measured, total
from fedlens.tasks.box_average_precision import RECALLS, THRESHOLDS, curve, matched
from fedlens.tasks.detection import Detection
from fedlens.vision.box_batch import BoxBatch
from tests.unit.tasks.box_cases import Case, evaluated_by_coco, random_case

TASK = Detection()
CASES = [pytest.param(seed, marks=() if seed < 10 else pytest.mark.nightly) for seed in range(200)]


def whole(measured: Measured, classes: int) -> dict[str, float]:
    """The metrics with those of each class."""
    return TASK.metrics(measured) | TASK.details(measured, [str(label) for label in range(classes)])


def ap(values: dict[str, float]) -> dict[str, float]:
    """The average precisions alone."""
    return {name: value for name, value in values.items() if name.startswith(("ap", "map"))}


@pytest.mark.parametrize("fast", [False, True], ids=["pycocotools", "faster-coco-eval"])
@pytest.mark.parametrize("seed", CASES)
def test_average_precision_is_that_of_coco(seed: int, fast: bool) -> None:
    pytest.importorskip("faster_coco_eval" if fast else "pycocotools")
    case = random_case(seed)
    own = ap(whole(TASK.measure(case.outputs, case.truth), case.classes))
    expected = evaluated_by_coco(case, fast)
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        assert own[name] == pytest.approx(value, abs=1e-6), name


def test_the_random_cases_have_what_they_are_meant_to_have() -> None:
    cases = [random_case(seed) for seed in range(200)]
    assert any(not len(case.truth.boxes) for case in cases)
    assert any(all(not len(one["scores"]) for one in case.outputs) for case in cases)
    per_class = [
        int(torch.bincount(one["labels"]).max())
        for case in cases
        for one in case.outputs
        if len(one["labels"])
    ]
    assert max(per_class) > 100
    areas = torch.cat(
        [(one["boxes"][:, 2:] - one["boxes"][:, :2]).prod(1) for case in cases for one in case.outputs]
    )
    assert (areas == 0).any()
    assert {case.classes for case in cases} == {1, 2, 3, 6}


def test_the_levels_are_those_of_pycocotools_to_the_last_bit() -> None:
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    params = evaluation.Params(iouType="bbox")
    assert params.iouThrs.tolist() == THRESHOLDS.tolist()
    assert params.recThrs.tolist() == RECALLS.tolist()


def split(case: Case, cuts: list[int]) -> list[Measured]:
    """The measurements of stretches of the images between the cuts."""
    edges = sorted({0, *cuts, len(case.truth)})
    return [
        TASK.measure(case.outputs[start:stop], case.truth.take(torch.arange(start, stop)))
        for start, stop in pairwise(edges)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_any_split_in_any_order_gives_the_same_bits_with_ties(seed: int) -> None:
    case = random_case(1000 + seed)
    for one in case.outputs:  # many scores are equal, within an image and between images
        one["scores"] = (one["scores"] * 5).round() / 5
    draw = np.random.default_rng(seed)
    expected = whole(TASK.measure(case.outputs, case.truth), case.classes)
    for _ in range(5):
        cuts = sorted(draw.integers(0, len(case.truth) + 1, 3).tolist())
        parts = split(case, cuts)
        order = draw.permutation(len(parts)).tolist()
        together = total([parts[at] for at in order])
        assert whole(together, case.classes) == expected
        condensed = total([TASK.condensed(parts[at]) for at in order])
        assert whole(condensed, case.classes) == expected
        sent = [Measured.from_payload(TASK.condensed(part).to_payload()) for part in parts]
        assert whole(total(sent), case.classes) == expected


def test_a_sent_detection_takes_eight_bytes_and_its_image_does_not_show() -> None:
    case = random_case(3)
    measured = TASK.condensed(TASK.measure(case.outputs, case.truth))
    rows = measured.rows
    assert sum(rows[name].element_size() for name in ("label", "score", "match")) == 8
    assert rows["score"].dim() == rows["label"].dim() == 1
    keys = list(zip(rows["label"].tolist(), (-rows["score"]).tolist(), rows["match"].tolist(), strict=True))
    assert keys == sorted(keys)
    backwards = list(reversed(case.outputs))
    order = torch.arange(len(case.truth)).flip(0)
    other = TASK.condensed(TASK.measure(backwards, case.truth.take(order)))
    assert all(torch.equal(rows[name], other.rows[name]) for name in rows)


def test_equal_scores_are_one_step() -> None:
    """Two detections of one score, one right: both orders give precision 1/2 at recall 1, not 1 or 1/2 by order."""
    for bits in ([1, 0], [0, 1]):
        one = curve(np.array([0.5, 0.5], np.float32), np.array(bits, np.int16), 1)
        assert one.average_precision()[0] == pytest.approx(0.5)


def test_a_true_box_is_found_once_and_the_better_overlap_does_not_wait() -> None:
    """By hand: the first detection, by score, takes the box; the second, of larger overlap, finds none."""
    truth = BoxBatch(torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([0]), torch.tensor([0]), 1)
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 6]])  # overlaps 1 and 0.6
    labels, image = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    _, scores, bits = matched(boxes, labels, torch.tensor([0.25, 0.5]), image, truth)
    assert scores.tolist() == [0.5, 0.25]
    assert bits.tolist() == [0b0000000111, 0b1111111000]


def test_other_classes_and_other_images_match_nothing() -> None:
    truth = BoxBatch(torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([1]), torch.tensor([0]), 2)
    boxes = torch.tensor([[0.0, 0, 10, 10]] * 2)
    _, _, bits = matched(boxes, torch.tensor([0, 1]), torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), truth)
    assert bits.tolist() == [0, 0]


def test_precision_and_recall_at_the_best_f1_by_hand() -> None:
    """Scores 0.9 right, 0.8 wrong, 0.7 right, and 3 true boxes: F1 is 2/4, 2/5, 4/6."""
    truth = BoxBatch(
        torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 50, 50]]),
        torch.tensor([0, 0, 1]),
        torch.zeros(3, dtype=torch.int64),
        1,
    )
    boxes = torch.tensor([[0.0, 0, 10, 10], [60, 60, 70, 70], [40, 40, 50, 50]])
    found = {"boxes": boxes, "labels": torch.tensor([0, 0, 1]), "scores": torch.tensor([0.9, 0.8, 0.7])}
    values = TASK.details(TASK.measure([found], truth), ["a", "b"])
    assert values["precision"] == pytest.approx(2 / 3)
    assert values["recall"] == pytest.approx(2 / 3)
    assert values["f1"] == pytest.approx(2 / 3)
    assert values["best_score"] == pytest.approx(0.7)
    assert values["ap_b"] == 1.0


def test_detections_that_are_not_finite_are_left_out_and_counted() -> None:
    case = random_case(5)
    expected = whole(TASK.measure(case.outputs, case.truth), case.classes)
    spoilt = [dict(one) for one in case.outputs]
    for name, value in (("boxes", torch.nan), ("scores", torch.nan), ("boxes", torch.inf)):
        one = spoilt[0]
        extra = {
            "boxes": torch.tensor([[0.0, 0, 9, 9]]),
            "labels": torch.tensor([0]),
            "scores": torch.tensor([0.999]),
        }
        extra[name] = torch.full_like(extra[name], value)
        spoilt[0] = {key: torch.cat([one[key], extra[key]]) for key in one}
    got = whole(TASK.measure(spoilt, case.truth), case.classes)
    assert got.pop("detections_not_finite") == 3
    assert got == expected


def test_without_a_true_box_both_means_are_left_out() -> None:
    nothing = BoxBatch(
        torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 1
    )
    found = {"boxes": torch.ones(1, 4), "labels": torch.tensor([0]), "scores": torch.tensor([0.5])}
    assert whole(TASK.measure([found], nothing), 2) == {}
    none = {name: value[:0] for name, value in found.items()}
    assert whole(TASK.measure([none], nothing), 2) == {}
    assert TASK.metrics(TASK.condensed(TASK.measure([none], nothing))) == {}


def test_no_detection_at_all_is_a_precision_of_zero() -> None:
    truth = BoxBatch(torch.tensor([[0.0, 0, 9, 9]]), torch.tensor([1]), torch.tensor([0]), 1)
    none = {
        "boxes": torch.empty(0, 4),
        "labels": torch.empty(0, dtype=torch.int64),
        "scores": torch.empty(0),
    }
    assert whole(TASK.measure([none], truth), 2) == {
        "map": 0.0, "map50": 0.0, "ap_1": 0.0, "ap50_1": 0.0, "precision": 0.0, "recall": 0.0, "f1": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("classes", [1, 80])
def test_many_detections_of_one_image_are_cut_to_a_hundred_a_class(classes: int) -> None:
    n = 500
    draw = torch.Generator().manual_seed(0)
    boxes = torch.rand(n, 4, generator=draw)
    labels = torch.arange(n) % classes
    scores = torch.rand(n, generator=draw)
    nothing = BoxBatch(
        torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 1
    )
    found, kept, _ = matched(boxes, labels, scores, torch.zeros(n, dtype=torch.int64), nothing)
    assert len(found) == (100 if classes == 1 else n)
    if classes == 1:
        assert kept.tolist() == scores.sort(descending=True).values[:100].tolist()
