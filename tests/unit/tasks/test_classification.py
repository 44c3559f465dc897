"""Classification: cross-entropy and accuracy, in sums that add up."""

import math

import torch
import torch.nn.functional as F

from fedlens.core.measured import total
from fedlens.tasks.classification import Classification

TASK = Classification()


def test_the_loss_is_the_mean_cross_entropy_in_nats() -> None:
    even = torch.zeros(5, 4)
    assert TASK.loss(even, torch.tensor([0, 1, 2, 3, 0])).item() == torch.tensor(4.0).log().item()
    g = torch.Generator().manual_seed(0)
    logits, y = torch.randn(7, 3, generator=g), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    by_hand = -(logits.log_softmax(1)[torch.arange(7), y]).mean()
    torch.testing.assert_close(TASK.loss(logits, y), by_hand)


def test_the_losses_are_those_of_each_example_and_their_mean_is_the_loss() -> None:
    g = torch.Generator().manual_seed(0)
    logits, y = torch.randn(7, 3, generator=g, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    losses = TASK.losses(logits, y)
    torch.testing.assert_close(losses, -logits.log_softmax(1)[torch.arange(7), y])
    torch.testing.assert_close(losses.mean(), TASK.loss(logits, y))


def test_sums_add_up_over_batches_of_any_size() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (10,), generator=g)
    parts = [TASK.measure(logits[at], y[at]) for at in (slice(0, 1), slice(1, 8), slice(8, 10))]
    measured = TASK.metrics(total(parts))
    assert math.isclose(measured["loss"], F.cross_entropy(logits, y).item(), rel_tol=1e-12)
    assert measured["accuracy"] == (logits.argmax(1) == y).double().mean().item()
    assert set(measured) == {"loss", "accuracy", "accuracy_balanced", "calibration_error"}


def test_the_score_is_one_of_the_metrics() -> None:
    assert TASK.score in TASK.metrics(TASK.measure(torch.zeros(1, 2), torch.tensor([0])))


def test_random_targets_are_classes() -> None:
    targets = TASK.random_targets(200, 3, (1, 8, 8), torch.Generator().manual_seed(0))
    assert (targets.shape, targets.dtype) == ((200,), torch.int64)
    assert set(targets.tolist()) == {0, 1, 2}
    assert torch.isfinite(TASK.losses(torch.zeros(200, 3), targets)).all()


def test_targets_that_are_no_class_have_no_confidences() -> None:
    logits = torch.zeros(2, 3)
    assert TASK.confidences(logits, torch.tensor([0, -100]), 1) == {}
    assert TASK.confidences(logits, torch.full((2, 3), 1 / 3), 1) == {}
    assert TASK.confidences(logits, torch.tensor([0, 2]), 1)["label"].tolist() == [0, 2]
