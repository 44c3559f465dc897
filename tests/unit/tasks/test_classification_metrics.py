"""The metrics of classification against scikit-learn, at the edges, and whatever the cut into batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured, total
from fedlens.tasks.classification import BINS, Classification, classification

TASK = Classification()


def drawn(n: int, classes: int, seed: int = 0, missing: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Logits float64 [n, classes] that lean to the truth, and the truth, without the `missing` classes."""
    g = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([k for k in range(classes) if k not in missing])
    y = allowed[torch.randint(0, len(allowed), (n,), generator=g)]
    logits = torch.randn(n, classes, generator=g, dtype=torch.float64) * 2
    logits[torch.arange(n), y] += 1.5
    return logits, y


@pytest.mark.parametrize(
    ("n", "classes", "missing"), [(200, 10, ()), (57, 7, (2, 5)), (1, 3, ()), (40, 1203, ())]
)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
def test_the_metrics_are_those_of_scikit_learn(n: int, classes: int, missing: tuple[int, ...]) -> None:
    logits, y = drawn(n, classes, missing=missing)
    found = TASK.metrics(TASK.measure(logits, y))
    answers, probabilities = logits.argmax(1), logits.softmax(1)
    names = list(range(classes))
    assert found["accuracy"] == sk.accuracy_score(y, answers)
    assert found["accuracy_balanced"] == pytest.approx(sk.balanced_accuracy_score(y, answers), abs=1e-12)
    assert found["loss"] == pytest.approx(sk.log_loss(y, probabilities, labels=names), rel=1e-12)
    if classes > 5:
        assert found["accuracy_top5"] == pytest.approx(sk.top_k_accuracy_score(y, logits, k=5, labels=names))
    else:
        assert "accuracy_top5" not in found


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    logits, y = drawn(300, 12, missing=(3,))
    measured = TASK.measure(logits, y)
    expected = sk.confusion_matrix(y, logits.argmax(1), labels=list(range(12)))
    assert np.array_equal(measured.sums["confusion"].numpy(), expected)
    assert measured.sums["confusion"].dtype == torch.int64


def test_the_calibration_error_by_a_loop_over_examples() -> None:
    logits, y = drawn(500, 4)
    confidence, answers = logits.softmax(1).max(1)
    error = 0.0
    for b in range(BINS):
        last = b == BINS - 1
        inside = [
            i for i, c in enumerate(confidence.tolist()) if b / BINS <= c and (c < (b + 1) / BINS or last)
        ]
        right = sum(int(answers[i] == y[i]) for i in inside)
        error += abs(right - sum(confidence[i].item() for i in inside)) / len(y)
    assert TASK.metrics(TASK.measure(logits, y))["calibration_error"] == pytest.approx(error, abs=1e-12)
    assert error > 0.01


def test_a_sure_and_right_model_is_calibrated_and_a_sure_and_wrong_one_is_not() -> None:
    sure = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    assert TASK.metrics(TASK.measure(sure, torch.tensor([0, 1])))["calibration_error"] == 0
    assert TASK.metrics(TASK.measure(sure, torch.tensor([1, 0])))["calibration_error"] == 1


def test_a_class_without_examples_is_left_out_of_the_balanced_accuracy_and_of_the_details() -> None:
    logits = torch.eye(3)[[0, 1, 1]]
    measured = TASK.measure(logits, torch.tensor([0, 0, 1]))
    assert TASK.metrics(measured)["accuracy_balanced"] == (0.5 + 1.0) / 2
    assert TASK.details(measured, ["a", "b", "c"]) == {"accuracy_a": 0.5, "accuracy_b": 1.0}


def test_of_equal_outputs_the_first_classes_are_the_top_5() -> None:
    same = torch.zeros(8, 8)
    found = TASK.metrics(TASK.measure(same, torch.arange(8)))
    assert (found["accuracy"], found["accuracy_top5"]) == (1 / 8, 5 / 8)
    above = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]]).expand(8, 8)
    assert TASK.metrics(TASK.measure(above, torch.arange(8)))["accuracy_top5"] == 5 / 8


def test_outputs_that_are_not_numbers_are_in_no_top_5() -> None:
    found = TASK.metrics(TASK.measure(torch.full((3, 8), torch.nan), torch.tensor([7, 7, 7])))
    assert (found["accuracy_top5"], found["accuracy"]) == (0, 0)
    assert np.isnan(found["loss"])


@pytest.mark.parametrize("classes", [3, 9, 1203])
def test_measurements_do_not_depend_on_the_cut_nor_on_the_grouping(classes: int) -> None:
    logits, y = drawn(101, classes)
    whole = TASK.measure(logits, y)
    cuts = [0, 1, 8, 40, 41, 101]
    parts = [TASK.measure(logits[a:b], y[a:b]) for a, b in pairwise(cuts)]
    left = total(parts)
    right = parts[0] + (parts[1] + (parts[2] + (parts[3] + parts[4])))
    sent = total([Measured.from_payload(part.to_payload()) for part in parts])
    for other in (left, right, sent):
        assert other.sums.keys() == whole.sums.keys()
        for name, value in whole.sums.items():
            if value.is_floating_point():
                torch.testing.assert_close(other.sums[name], value, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(other.sums[name], value), name


def test_a_condensed_measurement_gives_the_same_metrics_without_the_matrix() -> None:
    measured = TASK.measure(*drawn(64, 7))
    condensed = TASK.condensed(measured)
    assert "confusion" not in condensed.sums
    assert TASK.metrics(condensed) == TASK.metrics(measured)


# -- label smoothing and class weights -----------------------------------------------------------------------


def test_metrics_use_neither_class_weights_nor_smoothing() -> None:
    logits, y = drawn(50, 4)
    other = classification(label_smoothing=0.3, class_weights=[1.0, 0.0, 2.0, 5.0])
    assert other.metrics(other.measure(logits, y)) == TASK.metrics(TASK.measure(logits, y))


def test_label_smoothing_divides_a_share_of_the_target_evenly() -> None:
    logits, y = drawn(20, 4)
    target = 0.8 * torch.nn.functional.one_hot(y, 4) + 0.2 / 4
    expected = -(target * logits.log_softmax(1)).sum(1)
    task = classification(label_smoothing=0.2)
    torch.testing.assert_close(task.loss(logits, y), expected.mean())
    torch.testing.assert_close(task.losses(logits, y), expected)


def test_weights_weigh_the_terms_and_the_denominator() -> None:
    logits, y = drawn(20, 3)
    w = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(TASK.loss(logits, y, w), (w[y] * each).sum() / w[y].sum())
    torch.testing.assert_close(TASK.loss(logits, y, w, normalize=False), (w[y] * each).mean())
    torch.testing.assert_close(TASK.loss(logits, y, w), torch.nn.functional.cross_entropy(logits, y, w))
    assert TASK.loss(logits, y, torch.zeros(3)).item() == 0


def test_balanced_weights_are_scikit_learns_at_a_client_with_every_class() -> None:
    y = torch.tensor([0, 0, 0, 1, 2, 2])
    weights = classification(class_weights="balanced").client_weights(lambda: torch.bincount(y))
    from sklearn.utils.class_weight import compute_class_weight

    expected = compute_class_weight("balanced", classes=np.arange(3), y=y.numpy())
    assert weights.tolist() == pytest.approx(expected.tolist())
    assert TASK.client_weights(lambda: torch.bincount(y)) is None


def test_a_task_with_class_weights_has_no_losses_of_single_examples() -> None:
    assert classification(class_weights="balanced").losses is None
    assert classification(class_weights=[1.0, 2.0]).losses is None
    assert classification().losses is not None


def test_weights_that_do_not_fit_are_refused() -> None:
    info = DatasetInfo("mine", "classification", ("a", "b", "c"), (1, 8, 8))
    with pytest.raises(ConfigError, match=r"has 2 weights, but the dataset has 3 classes"):
        classification(class_weights=[1.0, 2.0]).validate(info)
    with pytest.raises(ConfigError, match=r"all weights in task.class_weights are 0"):
        classification(class_weights=[0.0, 0.0])
    with pytest.raises(
        ConfigError, match=r"the task is classification, but the dataset 'mine' is for detection"
    ):
        TASK.validate(DatasetInfo("mine", "detection", ("a",), (1, 8, 8)))
