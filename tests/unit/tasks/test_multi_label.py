"""Multi-label classification: the loss by hand, the metrics against scikit-learn, predictions and pictures."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured, total
from fedlens.tasks.multi_label import MultiLabel, average_precision, multi_label
from fedlens.tasks.picture import BLACK, GREEN, RED

TASK = MultiLabel()
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=torch.uint8)


def drawn(seed: int, n: int, classes: int, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Random logits, with many equal ones if `ties`, and labels of which some classes have few or none."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g)
    labels = torch.rand(n, classes, generator=g) < torch.rand(classes, generator=g)
    return (logits * 2).round() / 2 if ties else logits, labels.to(torch.uint8)


def term(z: float, y: float) -> float:
    p = 1 / (1 + math.exp(-z))
    return -y * math.log(p) - (1 - y) * math.log(1 - p)


def by_hand(weights: list[float], smoothing: float = 0.0) -> tuple[float, float]:
    """(sum_ic w_c l_ic, sum_ic w_c), with a loop over examples and classes."""
    above, below = 0.0, 0.0
    for z, y in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        for c, weight in enumerate(weights):
            above += weight * term(z[c], (1 - smoothing) * y[c] + smoothing / 2)
            below += weight
    return above, below


def test_the_loss_is_the_mean_binary_cross_entropy_over_examples_and_classes() -> None:
    above, below = by_hand([1, 1, 1])
    assert below == 6
    assert math.isclose(TASK.loss(LOGITS, LABELS).item(), above / 6, rel_tol=1e-12)
    assert math.isclose(TASK.loss(torch.zeros(4, 5), torch.zeros(4, 5)).item(), math.log(2), rel_tol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [2.0, 0.5, 3.0], [0.0, 1.0, 0.0]])
def test_weights_weigh_each_class(weights: list[float]) -> None:
    above, below = by_hand(weights)
    w = torch.tensor(weights)
    assert math.isclose(TASK.loss(LOGITS, LABELS, w).item(), above / below, rel_tol=1e-12)
    assert math.isclose(TASK.loss(LOGITS, LABELS, w, normalize=False).item(), above / 6, rel_tol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_that_are_all_0_give_loss_0_and_no_gradient(normalize: bool) -> None:
    logits = LOGITS.clone().requires_grad_()
    loss = TASK.loss(logits, LABELS, torch.zeros(3), normalize)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_label_smoothing_moves_the_targets_towards_one_half() -> None:
    above, below = by_hand([1, 1, 1], smoothing=0.2)
    assert math.isclose(
        MultiLabel(label_smoothing=0.2).loss(LOGITS, LABELS).item(), above / below, rel_tol=1e-12
    )


def test_the_losses_are_those_of_each_example_and_their_mean_is_the_loss() -> None:
    for task in (TASK, MultiLabel(label_smoothing=0.1)):
        losses = task.losses(LOGITS, LABELS)
        assert losses.shape == (2,)
        torch.testing.assert_close(losses.mean(), task.loss(LOGITS, LABELS))
    assert MultiLabel(class_weights=(1.0, 2.0, 1.0)).losses is None
    assert MultiLabel(class_weights="balanced").losses is None


def test_class_weights_come_from_the_settings_or_the_counts_of_the_client() -> None:
    counts = torch.tensor([6, 3, 0])
    assert TASK.client_weights(lambda: counts) is None
    assert MultiLabel(class_weights=(1.0, 2.0, 0.0)).client_weights(lambda: counts).tolist() == [1, 2, 0]
    assert MultiLabel(class_weights="balanced").client_weights(lambda: counts).tolist() == [0.5, 1.0, 0.0]


def test_metrics_use_neither_class_weights_nor_smoothing() -> None:
    other = MultiLabel(label_smoothing=0.3, class_weights=(5.0, 0.0, 1.0))
    assert other.metrics(other.measure(LOGITS, LABELS)) == TASK.metrics(TASK.measure(LOGITS, LABELS))


def sklearn_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The same metrics, of the classes with positives, class by class: with one class, `macro` means another thing."""
    y, z, p = labels.numpy(), logits.numpy(), (logits >= 0).numpy()
    there = np.flatnonzero(y.any(axis=0))
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len(there):
            found["average_precision"] = np.mean([average_precision_score(y[:, c], z[:, c]) for c in there])
            found["f1_macro"] = np.mean([f1_score(y[:, c], p[:, c]) for c in there])
        if y.any() or p.any():
            found["f1_micro"] = f1_score(y.ravel(), p.ravel())
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_the_metrics_are_those_of_scikit_learn(ties: bool) -> None:
    for seed in range(60):
        logits, labels = drawn(seed, 1 + seed % 23, 1 + seed % 5, ties)
        found = TASK.metrics(TASK.measure(logits, labels))
        expected = sklearn_metrics(logits, labels)
        assert set(found) == {"loss", *expected}
        for name, value in expected.items():
            assert math.isclose(found[name], value, rel_tol=1e-12, abs_tol=1e-12), (seed, name)
        mean = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
        assert math.isclose(found["loss"], mean, rel_tol=1e-12)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_metrics_where_all_labels_are_the_same(value: int, sign: float) -> None:
    logits, labels = torch.full((4, 2), sign), torch.full((4, 2), value, dtype=torch.uint8)
    found = TASK.metrics(TASK.measure(logits, labels))
    if value:
        expected = {"average_precision": 1.0, "f1_micro": float(sign > 0), "f1_macro": float(sign > 0)}
    else:
        # No class has a positive example; with predictions all of them are wrong, without any nothing is defined.
        expected = {"f1_micro": 0.0} if sign > 0 else {}
    assert {name: found[name] for name in found if name != "loss"} == expected


def test_equal_scores_are_one_step_whatever_the_order() -> None:
    scores, labels = torch.zeros(6, 1), torch.tensor([[1], [0], [1], [0], [0], [0]], dtype=torch.uint8)
    assert average_precision(scores, labels).item() == pytest.approx(2 / 6)
    for order in (torch.tensor([5, 4, 3, 2, 1, 0]), torch.tensor([1, 3, 4, 5, 0, 2])):
        assert average_precision(scores[order], labels[order]).item() == pytest.approx(2 / 6)


def test_a_score_that_is_nan_is_the_lowest() -> None:
    labels = torch.tensor([[1], [0], [1]], dtype=torch.uint8)
    nan = average_precision(torch.tensor([[math.nan], [0.5], [0.9]]), labels)
    low = average_precision(torch.tensor([[-math.inf], [0.5], [0.9]]), labels)
    assert nan.item() == low.item()
    found = TASK.metrics(TASK.measure(torch.full((3, 1), math.nan), labels))
    assert math.isnan(found["loss"])
    assert found["f1_micro"] == 0
    assert not average_precision(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.uint8)).isfinite().any()


def test_a_class_without_positives_is_left_out() -> None:
    logits, labels = drawn(3, 30, 4)
    labels[:, 2] = 0
    found, details = (
        f(TASK.measure(logits, labels))
        for f in (TASK.metrics, lambda m: TASK.details(m, ["a", "b", "c", "d"]))
    )
    kept = [0, 1, 3]
    alone = TASK.metrics(TASK.measure(logits[:, kept], labels[:, kept]))
    for name in ("average_precision", "f1_macro"):
        assert math.isclose(found[name], alone[name], rel_tol=1e-12)
    assert set(details) == {f"{m}_{c}" for m in ("average_precision", "f1") for c in "abd"}
    named = [details[f"average_precision_{c}"] for c in "abd"]
    assert math.isclose(sum(named) / 3, found["average_precision"], rel_tol=1e-12)


def test_any_cut_of_the_examples_gives_the_same_metrics() -> None:
    logits, labels = drawn(7, 50, 4, ties=True)
    whole = TASK.measure(logits, labels)
    for bounds in ([0, 1, 50], [0, 13, 27, 50], list(range(51))):
        parts = [TASK.measure(logits[a:b], labels[a:b]) for a, b in pairwise(bounds)]
        for order in (parts, parts[::-1]):
            found = total(Measured.from_payload(part.to_payload()) for part in order)
            for name, value in whole.sums.items():
                if name == "loss":
                    assert math.isclose(found.sums[name].item(), value.item(), rel_tol=1e-12)
                else:
                    assert torch.equal(found.sums[name], value)
                    assert value.dtype == torch.int64
            for name, value in TASK.metrics(found).items():
                assert math.isclose(value, TASK.metrics(whole)[name], rel_tol=1e-12)


def test_what_clients_send_has_no_row_of_an_image_and_the_same_metrics() -> None:
    logits, labels = drawn(11, 40, 3)
    whole = TASK.measure(logits, labels)
    parts = [TASK.condensed(TASK.measure(logits[at], labels[at])) for at in (slice(0, 15), slice(15, 40))]
    for part in parts:
        assert (part.rows["scores"].diff(dim=0) <= 0).all()
    assert TASK.metrics(total(parts)) == pytest.approx(TASK.metrics(whole), rel=1e-12)


def test_confident_logits_do_not_tie() -> None:
    logits = torch.tensor([[30.0], [40.0], [50.0]])  # float32 probabilities of 1
    labels = torch.tensor([[0], [0], [1]], dtype=torch.uint8)
    assert TASK.metrics(TASK.measure(logits, labels))["average_precision"] == 1.0


def test_counts_are_the_labels() -> None:
    counts = TASK.counts(LABELS, 3)
    assert counts.dtype == torch.int64
    assert counts.tolist() == LABELS.tolist()


def test_a_class_is_predicted_from_one_half_on() -> None:
    found = TASK.predict(torch.tensor([[-0.1, 0.0, 3.0]]))
    assert found["present"].tolist() == [[False, True, True]]
    torch.testing.assert_close(found["scores"], torch.tensor([[-0.1, 0.0, 3.0]]).sigmoid())


def arrays(logits: list[float]) -> dict[str, Any]:
    return {name: value[0].numpy() for name, value in TASK.predict(torch.tensor([logits])).items()}


def test_a_row_has_the_predicted_names_and_the_most_probable_classes() -> None:
    names = ["cat", "dog", "cow"]
    row = TASK.row(arrays([1.0, -1.0, 2.0]), names, top=2)
    assert list(row) == ["classes", "class", "score", "class_2", "score_2"]
    assert (row["classes"], row["class"], row["class_2"]) == ("cow;cat", "cow", "cat")
    assert TASK.row(arrays([-1.0, -2.0, -3.0]), names)["classes"] == ""
    assert len(TASK.row(arrays([-1.0, -2.0, -3.0]), names, top=5)) == 7


def test_a_picture_shows_the_predicted_and_the_true_names() -> None:
    image = np.full((1, 8, 8), 200, np.uint8)

    def colours(picture: np.ndarray) -> set[tuple[int, ...]]:
        below = picture[picture.shape[1] :].reshape(-1, 3)
        return {colour for colour in (BLACK, GREEN, RED) if (below == colour).all(axis=1).any()}

    alone = TASK.draw(image, arrays([1.0, -1.0, 2.0]), classes=["cat", "dog", "cow"])
    assert alone.dtype == np.uint8
    assert alone.shape[1:] == (224, 3)
    assert (alone[:224] == 200).all()
    assert colours(alone) == {BLACK}
    target = np.array([1, 0, 0], np.uint8)
    assert colours(TASK.draw(image, arrays([1.0, -1.0, 2.0]), target)) == {BLACK, GREEN, RED}
    assert colours(TASK.draw(image, arrays([1.0, -1.0, -2.0]), target)) == {BLACK, GREEN}
    assert colours(TASK.draw(image, arrays([-1.0, -1.0, -2.0]), target)) == {BLACK, RED}
    nothing = TASK.draw(np.zeros((3, 300, 250), np.uint8), arrays([-1.0] * 3), np.zeros(3, np.uint8))
    assert nothing.shape[1] == 250
    many = TASK.draw(image, arrays([1.0] * 80), np.ones(80, np.uint8))
    assert many.shape[0] < 400


def test_random_targets_and_misfits() -> None:
    targets = TASK.random_targets(50, 3, (1, 8, 8), torch.Generator().manual_seed(0))
    assert (targets.shape, targets.dtype) == ((50, 3), torch.uint8)
    assert set(targets.flatten().tolist()) == {0, 1}
    images = torch.zeros(2, 1, 8, 8)
    assert TASK.misfit(torch.zeros(2, 3), images, 3) is None
    for outputs in (torch.zeros(2, 4), torch.zeros(2, 3, 1), {"logits": torch.zeros(2, 3)}):
        assert TASK.misfit(outputs, images, 3) == "[2, 3]: one number a class"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: multi_label(class_weights=[0.0, 0.0]), "all weights in task.class_weights are 0"),
        (
            lambda: multi_label(class_weights=[1.0]).validate(
                DatasetInfo("x", "multi-label", "ab", (1, 8, 8))
            ),
            r"has 1 weights, but the dataset has 2 classes \(task.class_weights\)",
        ),
        (
            lambda: TASK.validate(DatasetInfo("x", "classification", "ab", (1, 8, 8))),
            "the task is multi-label, but the dataset 'x' is for classification",
        ),
    ],
)
def test_settings_that_do_not_fit_are_a_sentence(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_score_is_one_of_the_metrics() -> None:
    found = TASK.metrics(TASK.measure(LOGITS, LABELS))
    for score in ("average_precision", "f1_micro", "f1_macro"):
        assert multi_label(score=score).score in found
