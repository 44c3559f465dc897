"""Reliability against hand-computed values, and against the metrics of the task."""

from __future__ import annotations

import pytest
import torch

from fedlens.analyses.calibration import reliability, reliability_of
from fedlens.analyses.model_evaluation import ModelEvaluator, evaluator_of
from fedlens.base.errors import ConfigError
from fedlens.tasks.segmentation import Segmentation
from tests.unit.analyses.analysis_kit import built_of, models_of


def test_bins_of_hand_made_probabilities() -> None:
    # Bin 14: 0.95 and 0.97, one right. Bin 9: 0.62, wrong. Bin 7: 0.5, right.
    p = torch.tensor([[0.95, 0.05], [0.03, 0.97], [0.62, 0.38], [0.5, 0.5]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 0])
    found = reliability(p.log(), labels)
    counts = {k: each.count for k, each in enumerate(found.bins) if each.count}
    assert counts == {7: 1, 9: 1, 14: 2}
    assert found.bins[14].confidence == pytest.approx(0.96)
    assert found.bins[14].accuracy == 0.5
    assert (found.bins[0].confidence, found.bins[0].accuracy) == (None, None)
    assert (found.bins[14].lower, found.bins[14].upper) == (14 / 15, 1)
    assert found.error == pytest.approx((2 * 0.46 + 0.62 + 0.5) / 4)
    assert found.nll == pytest.approx(-torch.tensor([0.95, 0.03, 0.38, 0.5]).log().mean().item())
    assert found.brier == pytest.approx(2 * (0.05**2 + 0.97**2 + 0.62**2 + 0.5**2) / 4)
    assert (found.accuracy, found.examples) == (0.5, 4)
    assert [row["count"] for row in found.rows()] == [each.count for each in found.bins]


def test_certain_and_right_has_no_error() -> None:
    found = reliability(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log(), torch.tensor([0, 1]))
    assert (found.error, found.nll, found.brier, found.bins[14].count) == (0, 0, 0, 2)


def test_a_model_has_the_metrics_of_its_task() -> None:
    built = built_of("model.name='linear'", "evaluation.batch_size=100")
    evaluator, (tree,) = evaluator_of(built), models_of(built, 1)
    found, metrics = reliability_of(tree, evaluator), evaluator.metrics(tree)
    assert (found.nll, found.accuracy) == (metrics["loss"], metrics["accuracy"])
    assert found.error == metrics["calibration_error"] > 0
    inputs, labels = evaluator.data.stretch(0, evaluator.examples)
    with torch.no_grad():
        p = evaluator.learner(tree).module(inputs).softmax(1)
    assert found.brier == pytest.approx(float((p - torch.eye(10)[labels]).square().sum(1).mean()), rel=1e-6)


def test_what_has_no_class_probabilities_is_refused() -> None:
    built = built_of("model.name='linear'")
    whole = evaluator_of(built)
    other = ModelEvaluator(whole.model, Segmentation(), whole.data, 5, 5)
    with pytest.raises(ConfigError, match="segmentation does not have"):
        reliability_of(models_of(built, 1)[0], other)
    for logits, labels in ((torch.zeros(0, 2), torch.zeros(0)), (torch.zeros(3, 2), torch.zeros(2))):
        with pytest.raises(ConfigError, match="the logits are"):
            reliability(logits, labels.long())
