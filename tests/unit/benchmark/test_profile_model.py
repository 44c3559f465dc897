from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlens.benchmark.profile_model import cost_of
from fedlens.models.simple import hsu_cnn, linear, mcmahan_cnn, small_cnn


def test_a_linear_layer_is_what_one_counts_by_hand() -> None:
    cost = cost_of(lambda: linear((1, 28, 28), 10), (1, 28, 28), batch=10)
    assert (cost.trainable, cost.frozen, cost.buffers, cost.nbytes) == (7850, 0, 0, 4 * 7850)
    assert cost.forward == 2 * 784 * 10
    assert cost.macs == 7840
    # Backward has the gradient of the weights alone: nobody asks for that of the images.
    assert cost.step == 10 * 2 * cost.forward
    assert cost.step_an_image == 2 * cost.forward
    assert [layer.kind for layer in cost.layers] == ["Flatten", "Linear"]


def test_the_cnn_of_hsu2019_is_what_one_counts_by_hand() -> None:
    first, second = 32 * 32 * 64 * (25 * 3), 16 * 16 * 64 * (25 * 64)
    dense = 64 * 8 * 8 * 384, 384 * 192, 192 * 10
    cost = cost_of(lambda: hsu_cnn((3, 32, 32), 10), (3, 32, 32), batch=32)
    assert cost.trainable == 1_756_426
    assert cost.macs == first + second + sum(dense) == 32_778_112
    # A training step: forward, the weights' gradient, and the input's, which the first layer has no need of.
    assert cost.step == 32 * 2 * (2 * first + 3 * (second + sum(dense)))
    flops = [layer.flops for layer in cost.layers if layer.flops]
    assert flops == [2 * macs for macs in (first, second, *dense)]
    assert [layer.output for layer in cost.layers][:3] == [(64, 32, 32), (64, 32, 32), (64, 16, 16)]
    assert cost.layers[0].activation_bytes == 4 * 64 * 32 * 32
    assert sum(layer.parameters for layer in cost.layers) == cost.trainable


def test_the_cnn_of_mcmahan() -> None:
    cost = cost_of(lambda: mcmahan_cnn((1, 28, 28), 10), (1, 28, 28), batch=10)
    assert cost.macs == 28 * 28 * 32 * 25 + 14 * 14 * 64 * 25 * 32 + 3136 * 512 + 512 * 10


def test_frozen_weights_and_buffers_are_told_apart() -> None:
    def build() -> nn.Module:
        module = small_cnn((1, 8, 8), 10, norm="batch")
        next(module.parameters()).requires_grad_(False)
        return module

    cost = cost_of(build, (1, 8, 8), batch=10)
    assert (cost.trainable, cost.frozen) == (9930 - 144 + 2 * 48, 144)
    assert cost.buffers == 2 * 48  # means and variances; the two counters are none
    assert cost.nbytes == 4 * (9930 + 4 * 48) + 2 * 8


class _Twice(nn.Module):
    """A layer that is called twice, a product outside of any layer, and a look at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.inner(x.flatten(1)))
        if float(x.detach().sum()) > 1e9:  # a tensor without content has no value
            return x
        return x @ self.own


def test_a_model_that_looks_at_its_values_is_counted_on_real_ones() -> None:
    cost = cost_of(_Twice, (1, 2, 2), batch=5)
    assert cost.forward == 2 * (16 + 16 + 12)
    inner, rest = cost.layers
    assert (inner.flops, inner.parameters, inner.activation_bytes) == (64, 20, 32)
    assert (rest.name, rest.flops, rest.parameters) == ("(between the layers)", 24, 12)


def test_the_random_state_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    cost_of(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 2)), (1, 2, 2), batch=2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("batch", [1, 7])
def test_training_costs_the_same_for_each_image(batch: int) -> None:
    cost = cost_of(lambda: small_cnn((1, 8, 8), 10), (1, 8, 8), batch)
    assert cost.step_an_image == 2 * (2 * 9216 + 3 * (73728 + 5120))
