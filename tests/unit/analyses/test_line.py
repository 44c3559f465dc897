"""Lines between models with batch normalization, on the digits: their statistics, and their ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.analyses.line import line, training_batches, with_statistics
from fedlens.analyses.loss_surface import plane
from fedlens.analyses.model_evaluation import evaluator_of
from fedlens.run.build import Built
from tests.unit.analyses.analysis_kit import built_of, models_of

NORMALIZED = "model={name='resnet20', norm='batch'}"


@pytest.fixture(scope="module")
def built() -> Built:
    return built_of(NORMALIZED)


def apart(built: Built, count: int) -> list[dict[str, Tensor]]:
    """Models whose running variances are positive."""
    return [
        {name: value.abs() if name.endswith("var") else value for name, value in model.items()}
        for model in models_of(built, count)
    ]


def test_statistics_are_the_means_over_the_batches(built: Built) -> None:
    evaluator, (tree,) = evaluator_of(built), apart(built, 1)
    batches = training_batches(built, 3)
    found = with_statistics(tree, evaluator, batches)
    module = built.model.build()
    module.load_state_dict(tree)
    seen: list[Tensor] = []
    name, layer = next((n, m) for n, m in module.named_modules() if isinstance(m, nn.BatchNorm2d))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for inputs, _ in batches:
            module.eval()(inputs)
    mean = torch.stack([inputs.mean((0, 2, 3)) for inputs in seen]).mean(0)
    variance = torch.stack([inputs.var((0, 2, 3)) for inputs in seen]).mean(0)
    torch.testing.assert_close(found[f"{name}.running_mean"], mean)
    torch.testing.assert_close(found[f"{name}.running_var"], variance)
    changed = {key for key in tree if not torch.equal(tree[key], found[key])}
    assert changed
    assert all(".running_" in key or key.endswith("num_batches_tracked") for key in changed)
    assert layer.momentum is not None
    assert with_statistics(tree, evaluator, batches)[f"{name}.running_mean"].equal(
        found[f"{name}.running_mean"]
    )


def test_the_ends_of_a_line_are_the_models(built: Built) -> None:
    evaluator, (first, second) = evaluator_of(built), apart(built, 2)
    batches = training_batches(built, 2)
    plain, again = line(first, second, evaluator, 3), line(first, second, evaluator, 3, batches)
    assert (plain.statistics, again.statistics) == ("interpolated", "recomputed")
    for tree, at in ((first, 0), (second, -1)):
        assert plain.losses[at] == evaluator.metrics(tree)["loss"]
        assert plain.scores[at] == evaluator.metrics(tree)["accuracy"]
        assert again.losses[at] == evaluator.metrics(with_statistics(tree, evaluator, batches))["loss"]
    middle = {
        name: (first[name] + second[name]) / 2 if value.is_floating_point() else value
        for name, value in second.items()
    }
    assert plain.losses[1] == pytest.approx(evaluator.metrics(middle)["loss"], rel=1e-4)


def test_a_model_without_batch_normalization_says_so() -> None:
    built = built_of("model.name='linear'")
    first, second = models_of(built, 2)
    found = line(first, second, evaluator_of(built), 3, training_batches(built, 1))
    assert found.statistics == "none"


def test_a_plane_extrapolates_no_variance(built: Built) -> None:
    first, second, third = apart(built, 3)
    first = {name: 9 * value if name.endswith("var") else value for name, value in first.items()}
    evaluator = evaluator_of(built)
    found = plane([first, second, third], evaluator, points=3, margin=2.0)
    assert all(row["loss"] == row["loss"] for row in found.rows())
    assert found.model_losses[0] == pytest.approx(evaluator.metrics(first)["loss"], rel=1e-6)


@pytest.mark.parametrize(("size", "sizes"), [("10", [10, 10]), ("'all'", [1360])])
def test_batches_of_training_data_are_of_the_runs_size(size: str, sizes: list[Any]) -> None:
    batches = training_batches(built_of("model.name='linear'", f"local.batch_size={size}"), 2)
    assert [len(targets) for _, targets in batches] == sizes
    assert len(set(batches[0][1].tolist())) > 2  # of several clients, each of which has two digits
