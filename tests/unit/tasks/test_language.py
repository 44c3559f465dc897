"""The task of language: the loss against PyTorch's, tokens that do not count, and metrics against a slow loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured, total
from fedlens.tasks.language import Language, language

CLASSES, LENGTH = 7, 5
TEXT = DatasetInfo("plays", "language", [str(k) for k in range(CLASSES)], (LENGTH,), vocabulary=11)
LAST = Language().fitted(TEXT)
EACH = Language().fitted(replace(TEXT, target_shape=(LENGTH,)))


def drawn(seed: int, n: int, by_position: bool, absent: float = 0.0) -> tuple[Tensor, Tensor]:
    """Random logits and targets, of which a share is -1."""
    g = torch.Generator().manual_seed(seed)
    shape = (n, LENGTH) if by_position else (n,)
    logits, targets = torch.randn(*shape, CLASSES, generator=g), torch.randint(CLASSES, shape, generator=g)
    return logits, torch.where(torch.rand(shape, generator=g) < absent, -1, targets)


def by_loop(logits: Tensor, targets: Tensor, weights: list[float]) -> tuple[float, float, int, int]:
    """(sum of w l, sum of w, counted tokens, correct tokens), token by token in Python."""
    above, below, tokens, correct = 0.0, 0.0, 0, 0
    for z, y in zip(logits.view(-1, CLASSES).double().tolist(), targets.flatten().tolist(), strict=True):
        if y != -1:
            above += weights[y] * (math.log(sum(math.exp(value) for value in z)) - z[y])
            below, tokens = below + weights[y], tokens + 1
            correct += z.index(max(z)) == y
    return above, below, tokens, correct


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_a_target_a_text_has_the_bits_of_pytorchs_cross_entropy(seed: int) -> None:
    logits, targets = drawn(seed, 37, by_position=False)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, bare = LAST.loss(one, targets), F.cross_entropy(other, targets)
    assert torch.equal(loss, bare)
    assert torch.equal(*torch.autograd.grad(loss, one), *torch.autograd.grad(bare, other))


@pytest.mark.parametrize("by_position", [False, True])
def test_a_target_of_minus_1_counts_for_nothing(by_position: bool) -> None:
    task = EACH if by_position else LAST
    logits, targets = drawn(0, 40, by_position, absent=0.4)
    logits.requires_grad_()
    counted = targets != -1
    loss = task.loss(logits, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits[counted], targets[counted]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[~counted].any()
    assert gradient[counted].any()
    changed = torch.where(counted[..., None], logits, 9.0)
    assert torch.equal(task.loss(changed, targets), loss)


@pytest.mark.parametrize("weights", [None, torch.ones(CLASSES), torch.zeros(CLASSES)])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_without_a_token_has_loss_0_and_no_gradient(weights: Tensor | None, normalize: bool) -> None:
    logits = drawn(0, 4, by_position=True)[0].requires_grad_()
    loss = EACH.loss(logits, torch.full((4, LENGTH), -1), weights, normalize)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("by_position", [False, True])
def test_weights_weigh_each_token_by_its_class(by_position: bool) -> None:
    task = EACH if by_position else LAST
    logits, targets = drawn(1, 20, by_position, absent=0.2)
    weights = [0.0, 1.0, 2.0, 0.5, 3.0, 0.1, 1.0]
    above, below, tokens, _ = by_loop(logits, targets, weights)
    w = torch.tensor(weights)
    assert task.loss(logits, targets, w).item() == pytest.approx(above / below, rel=1e-5)
    assert task.loss(logits, targets, w, normalize=False).item() == pytest.approx(above / tokens, rel=1e-5)
    assert task.loss(logits, targets, torch.zeros(CLASSES)).item() == 0


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("absent", [0.0, 0.5])
def test_the_metrics_are_those_of_a_slow_loop(by_position: bool, absent: float) -> None:
    task = EACH if by_position else LAST
    logits, targets = drawn(2, 50, by_position, absent)
    above, _, tokens, correct = by_loop(logits, targets, [1.0] * CLASSES)
    metrics = task.metrics(task.measure(logits, targets))
    assert set(metrics) == {"loss", "accuracy", "perplexity"}
    assert metrics["accuracy"] == correct / tokens
    assert metrics["loss"] == pytest.approx(above / tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(above / tokens), rel=1e-6)


def test_metrics_of_any_split_over_clients_are_the_same() -> None:
    logits, targets = drawn(3, 60, by_position=True, absent=0.3)
    whole = EACH.metrics(EACH.measure(logits, targets))
    for cuts in ([60], [1] * 60, [7, 0, 13, 40], [40, 13, 0, 7]):
        parts = zip(logits.split(cuts), targets.split(cuts), strict=True)
        merged = total(EACH.measure(*part) for part in parts)
        assert int(merged.sums["tokens"]) == int((targets != -1).sum())
        found = EACH.metrics(merged)
        assert found["accuracy"] == whole["accuracy"]
        assert found["loss"] == pytest.approx(whole["loss"], rel=1e-14)


def test_without_a_token_no_metric_is_defined() -> None:
    assert EACH.metrics(EACH.measure(torch.zeros(2, LENGTH, CLASSES), torch.full((2, LENGTH), -1))) == {}


def test_the_perplexity_of_a_diverged_model_is_infinite_and_no_error() -> None:
    measured = LAST.measure(torch.tensor([[0.0, 2000.0]]), torch.tensor([0]))
    assert LAST.metrics(measured)["perplexity"] == math.inf


def test_measurements_are_sums_without_rows() -> None:
    measured = LAST.measure(*drawn(0, 9, by_position=False))
    assert {name: value.dtype for name, value in measured.sums.items()} == {
        "loss": torch.float64, "tokens": torch.int64, "correct": torch.int64,
    }  # fmt: skip
    assert isinstance(measured, Measured)
    assert not measured.rows


def test_the_losses_of_texts_exist_where_their_mean_is_the_loss() -> None:
    logits, targets = drawn(0, 8, by_position=False)
    assert LAST.losses is not None
    torch.testing.assert_close(LAST.losses(logits, targets).mean(), LAST.loss(logits, targets))
    assert Language().fitted(replace(TEXT, gaps=True)).losses is None
    assert Language(class_weights="balanced").fitted(TEXT).losses is None
    assert EACH.losses is None


def test_targets_by_position_give_no_feature_vector_of_a_text() -> None:
    assert LAST.features
    assert not EACH.features


def test_a_fitted_task_keeps_its_settings() -> None:
    task = language(class_weights=[1.0] * CLASSES).fitted(replace(TEXT, target_shape=(LENGTH,)))
    assert task.class_weights == (1.0,) * CLASSES
    assert task.info is not None


@pytest.mark.parametrize("by_position", [False, True])
def test_counts_are_those_of_the_tokens_of_each_text(by_position: bool) -> None:
    _, targets = drawn(4, 12, by_position, absent=0.3)
    counts = (EACH if by_position else LAST).counts(targets, CLASSES)
    expected = [[row.count(c) for c in range(CLASSES)] for row in targets.view(12, -1).tolist()]
    assert counts.tolist() == expected
    assert (EACH.most_counts((LENGTH,)), LAST.most_counts((LENGTH,))) == (LENGTH, 1)


def test_the_module_gets_int64_tokens() -> None:
    seen: list[torch.dtype] = []

    class Net(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            seen.append(tokens.dtype)
            return torch.zeros(len(tokens), CLASSES)

    for dtype in (torch.int16, torch.int32, torch.int64):
        LAST.outputs(Net(), torch.zeros(2, LENGTH, dtype=dtype), None)
    assert seen == [torch.int64] * 3


def test_trials_get_tokens_of_the_vocabulary_and_targets_of_the_datasets_form() -> None:
    g = torch.Generator().manual_seed(0)
    assert LAST.blank(2, (LENGTH,)).tolist() == [[10] * LENGTH] * 2
    tokens = LAST.random_inputs(500, (LENGTH,), g)
    assert (tokens.dtype, int(tokens.min()), int(tokens.max())) == (torch.int64, 0, 10)
    assert LAST.random_targets(3, CLASSES, (LENGTH,), g).shape == (3,)
    assert EACH.random_targets(3, CLASSES, (LENGTH,), g).shape == (3, LENGTH)


class Doubled(Language):
    """A task of a user's own."""

    def loss(self, outputs: Tensor, targets: Tensor, *more: object, **other: object) -> Tensor:
        return 2 * super().loss(outputs, targets)


@pytest.mark.parametrize("target_shape", [(), (LENGTH,)])
def test_a_task_that_inherits_from_language_stays_itself_on_its_dataset(
    target_shape: tuple[int, ...],
) -> None:
    task = Doubled(score="perplexity").fitted(replace(TEXT, target_shape=target_shape))
    assert isinstance(task, Doubled)
    assert task.score == "perplexity"
    assert task.features is not bool(target_shape)
    assert (task.losses is None) is bool(target_shape)


def test_outputs_of_another_form_are_named() -> None:
    texts = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert LAST.misfit(torch.zeros(2, CLASSES), texts, CLASSES) is None
    assert LAST.misfit(torch.zeros(2, LENGTH, CLASSES), texts, CLASSES) == "[2, 7]: one number a class"
    assert EACH.misfit(torch.zeros(2, LENGTH, CLASSES), texts, CLASSES) is None
    assert EACH.misfit(torch.zeros(2, CLASSES, LENGTH), texts, CLASSES) == (
        "[2, 5, 7]: one number a class at each position"
    )


def test_an_evaluation_counts_the_logits_of_all_positions() -> None:
    assert LAST.output_values(TEXT) == CLASSES
    assert EACH.output_values(replace(TEXT, target_shape=(LENGTH,))) == LENGTH * CLASSES


def test_class_weights_of_another_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 weights, but the dataset has 7 classes"):
        language(class_weights=[1.0, 2.0]).validate(TEXT)


def test_images_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="the task is language, but the dataset 'digits' is for classification"
    ):
        Language().validate(DatasetInfo("digits", "classification", ["0", "1"], (1, 8, 8)))
