"""Multiply-adds of a forward pass: the same as PyTorch's own counter, and None where they are not known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlens.models.counts import multiply_adds
from fedlens.models.registry import MODELS


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear", (1, 8, 8)),
        ("mlp", (1, 8, 8)),
        ("small-cnn", (1, 28, 28)),
        ("resnet20", (3, 32, 32)),
        ("mobilenet-v3-large", (3, 64, 64)),
        ("vit-tiny", (3, 224, 224)),
    ],
)
def test_a_model_has_as_many_as_pytorch_counts(name: str, shape: tuple[int, ...]) -> None:
    if name.startswith(("mobilenet", "vit")):
        pytest.importorskip("timm", reason="needs timm: pip install 'fedlens[vision]'")

    module: nn.Module = MODELS.find(name)(shape, 10)
    assert multiply_adds(module, torch.zeros(1, *shape)) == counted_by_pytorch(module, shape)


def counted_by_pytorch(module: nn.Module, shape: tuple[int, ...]) -> int:
    # On the meta device and with gradients: elsewhere attention takes a path that the counter does not see.
    with FlopCounterMode(display=False) as counter:
        module.to("meta").eval()(torch.zeros(1, *shape, device="meta"))
    return counter.get_total_flops() // 2


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 5, 3)
        self.deep = nn.Conv2d(5, 10, 3, groups=5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.up(x)).flatten(2)
        return torch.bmm(x @ x.transpose(1, 2), x).matmul(torch.ones(x.shape[-1], 2, device=x.device))


def test_every_kind_of_product_counts_as_in_pytorch() -> None:
    assert multiply_adds(Products(), torch.zeros(1, 3, 6, 6)) == counted_by_pytorch(Products(), (3, 6, 6))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTMCell(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[0])[0]
        return out


class Packed(nn.Module):
    """Texts of 4 and 2 tokens, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(nn.utils.rnn.pack_sequence([x[0, :4], x[0, :2]]))[0].data
        return out


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.LSTM(3, 5, batch_first=True), 7 * 4 * 5 * (3 + 5)),
        (nn.LSTM(3, 5, 2, batch_first=True), 7 * 4 * 5 * (3 + 5) + 7 * 4 * 5 * (5 + 5)),
        (nn.LSTM(3, 5, bidirectional=True, batch_first=True), 2 * 7 * 4 * 5 * (3 + 5)),
        (nn.GRU(3, 5, batch_first=True), 7 * 3 * 5 * (3 + 5)),
        (nn.RNN(3, 5, batch_first=True), 7 * 5 * (3 + 5)),
        (Packed(), 6 * 4 * 5 * (3 + 5)),
    ],
)
def test_a_recurrent_layer_counts_each_weight_once_for_each_token(layer: nn.Module, expected: int) -> None:
    assert multiply_adds(layer, torch.zeros(1, 7, 3)) == expected


def test_the_lstm_of_the_documents_counts_by_hand() -> None:
    module: nn.Module = MODELS.find("lstm")((80,), 90)
    by_hand = 80 * (4 * 256 * (8 + 256) + 4 * 256 * (256 + 256)) + 256 * 90
    assert multiply_adds(module, torch.zeros(1, 80, dtype=torch.int64)) == by_hand == 63_592_960


def test_a_layer_that_is_not_known_gives_none_and_not_a_number_too_small() -> None:
    assert multiply_adds(Recurrent(), torch.zeros(1, 8, 8)) is None


def test_counting_draws_no_random_number() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1) + torch.rand(64))

    module = Noisy(64, 3)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert multiply_adds(module, torch.zeros(1, 1, 8, 8)) == 192
    assert torch.equal(torch.rand(1), expected)
