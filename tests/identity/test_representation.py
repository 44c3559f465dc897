"""Linear CKA against its form with Gram matrices, and neural collapse on features that are made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlens.analyses.model_evaluation import ModelEvaluator, evaluator_of
from fedlens.analyses.representation import (
    classifier_inputs,
    default_layers,
    features,
    linear_cka,
    neural_collapse,
    similarity,
)
from fedlens.base.errors import ConfigError
from fedlens.tasks.segmentation import Segmentation
from tests.unit.analyses.analysis_kit import built_of, models_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_cka(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with the Gram matrices K = X X^T and L = Y Y^T, centered."""
    n = len(x)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    a, b = h @ (x @ x.T) @ h, h @ (y @ y.T) @ h
    return float((a * b).sum() / ((a * a).sum() * (b * b).sum()) ** 0.5)


@pytest.mark.parametrize(("d1", "d2"), [(3, 5), (40, 7), (1, 1)])
def test_cka_is_that_of_the_gram_matrices(d1: int, d2: int) -> None:
    x, y = random(20, d1) + 3, random(20, d2, seed=1)
    y[:, 0] += x[:, 0]
    (_, found), (same, one) = linear_cka([x, y])
    assert found == same == pytest.approx(gram_cka(x, y), rel=1e-9)
    assert 0 < found < one == pytest.approx(1)


def test_cka_sees_neither_rotation_nor_scale() -> None:
    x = random(30, 6)
    rotation, _ = torch.linalg.qr(random(6, 6, seed=2))
    turned, stretched = 5 * x @ rotation - 2, x * torch.tensor([1.0, 1, 1, 1, 1, 30])
    alike, apart, constant = linear_cka([x, turned, stretched, torch.ones(30, 2)])[0][1:]
    assert alike == pytest.approx(1)
    assert apart < 0.9
    assert constant is None


def test_similarity_of_models_is_the_cka_of_their_features() -> None:
    built = built_of("evaluation.batch_size=16")
    evaluator, models = evaluator_of(built), models_of(built, 3)
    found = similarity(models, evaluator, examples=40)
    layers = [
        name
        for name, layer in built.model.build().named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    assert list(found.layers) == layers
    apart = [features(model, evaluator, None, 40) for model in models]
    for layer, matrix in zip(found.layers, found.values, strict=True):
        assert [matrix[k][k] for k in range(3)] == pytest.approx([1, 1, 1])
        assert (
            matrix[0][2]
            == matrix[2][0]
            == pytest.approx(gram_cka(apart[0][layer].double(), apart[2][layer].double()))
        )
    assert len(found.rows()) == 3 * len(layers)
    with pytest.raises(ConfigError, match="needs 2"):
        similarity(models[:1], evaluator)


def test_features_are_the_outputs_of_layers_averaged_over_space() -> None:
    built = built_of("evaluation.batch_size=16")
    evaluator, (tree,) = evaluator_of(built), models_of(built, 1)
    found = features(tree, evaluator, examples=40)
    module = built.model.build().eval()
    module.load_state_dict(tree)
    inputs, _ = evaluator.data.stretch(0, 40)
    first, *_, last = found
    with torch.no_grad():
        torch.testing.assert_close(found[first], module.get_submodule(first)(inputs).mean((2, 3)))
        torch.testing.assert_close(found[last], module(inputs), rtol=1e-5, atol=2e-5)
    assert list(features(tree, evaluator, [last], 5)) == [last]
    with pytest.raises(ConfigError, match="no layer 'head9'"):
        features(tree, evaluator, ["head9"])
    assert not module.get_submodule(first)._forward_hooks


def test_of_many_layers_twelve_are_taken() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    names = default_layers(net)
    assert (len(names), names[0], names[-1]) == (12, "0", "29")
    assert len(set(names)) == 12


def simplex(classes: int) -> Tensor:
    """The corners of a regular simplex around 0, [classes, classes]."""
    return torch.eye(classes, dtype=torch.float64) - 1 / classes


def test_features_on_a_simplex_have_collapsed() -> None:
    labels = torch.arange(4).repeat(5)
    found = neural_collapse(simplex(4)[labels] * 3 + 1, labels, 7 * simplex(4))
    assert found.classes == 4
    assert (found.within, found.norms, found.angles, found.simplex, found.classifier) == pytest.approx(
        (0,) * 5, abs=1e-12
    )


def test_neural_collapse_of_two_classes_by_hand() -> None:
    # Means (2, 0) and (-2, 0): Sigma_B = diag(4, 0). Each class spreads by 1 on the first axis and 3 on the second.
    spread = torch.tensor([[1.0, 3.0], [-1.0, -3.0]])
    x = torch.cat([spread + torch.tensor([2.0, 0.0]), spread - torch.tensor([2.0, 0.0])])
    labels = torch.tensor([5, 5, 9, 9])  # other classes have no example
    weights = torch.zeros(10, 2)
    weights[5], weights[9] = torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0])
    found = neural_collapse(x, labels, weights)
    assert found.within == pytest.approx(1 / 4 / 2)
    assert (found.norms, found.angles, found.simplex) == pytest.approx((0, 0, 0), abs=1e-12)
    assert found.classifier == pytest.approx(2**0.5)  # orthogonal matrices of norm 1


def test_norms_and_angles_of_three_means_by_hand() -> None:
    # Around their mean (0, 0): lengths 2, 1, 1 and cosines -1, -1, 1.
    x = torch.tensor([[2.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    found = neural_collapse(x, torch.arange(3))
    assert found.norms == pytest.approx((2 / 9) ** 0.5 / (4 / 3))
    assert found.angles == pytest.approx((8 / 9) ** 0.5)
    assert found.simplex == pytest.approx((0.5 + 0.5 + 1.5) / 3)
    assert found.classifier is None


def test_the_collapse_of_a_model_is_that_of_its_last_features() -> None:
    built = built_of("evaluation.batch_size=16")
    evaluator, (tree,) = evaluator_of(built), models_of(built, 1)
    found = neural_collapse(*classifier_inputs(tree, evaluator))
    module, heard = built.model.build().eval(), []
    module.load_state_dict(tree)
    last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    inputs, labels = evaluator.data.stretch(0, evaluator.examples)
    with torch.no_grad():
        module(inputs)
    by_hand = neural_collapse(heard[0], labels, last.weight.detach())
    assert found.within == pytest.approx(by_hand.within, rel=1e-3)
    assert found.classifier == pytest.approx(by_hand.classifier)
    assert found.classes == 10


def test_what_has_no_collapse_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 class"):
        neural_collapse(torch.ones(3, 2), torch.zeros(3).long())
    with pytest.raises(ConfigError, match="mean of all classes"):
        neural_collapse(torch.ones(4, 2), torch.tensor([0, 0, 1, 1]))
    built = built_of("model.name='linear'")
    whole = evaluator_of(built)
    other = ModelEvaluator(whole.model, Segmentation(), whole.data, 5, 5)
    with pytest.raises(ConfigError, match="segmentation does not have"):
        classifier_inputs(models_of(built, 1)[0], other)
