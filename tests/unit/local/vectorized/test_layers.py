"""Layers of stacked clients against each client's own layer, in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedlens.local.vectorized import convolution as stacked_convolution
from fedlens.local.vectorized.convolution import chosen
from fedlens.local.vectorized.layers import adapted, known
from fedlens.local.vectorized.stack import Masks, Stack

CLIENTS, BATCH = 3, 2
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def compare(
    layer: nn.Module,
    shape: tuple[int, ...],
    frozen: tuple[str, ...] = (),
    clients: int = CLIENTS,
    batch: int = BATCH,
) -> None:
    """Outputs, and the gradients of images and weights, are those of each client by itself."""
    g = torch.Generator().manual_seed(1)
    layer = layer.double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    own = {n: p for n, p in layer.named_parameters() if n not in frozen}
    stacked = {
        n: torch.randn(clients, *p.shape, generator=g, dtype=p.dtype).requires_grad_() for n, p in own.items()
    }
    images = torch.randn(clients * batch, *shape, generator=g, dtype=torch.float64, requires_grad=True)
    stack = Stack(Masks([]), clients)
    with adapted(layer, stack):
        out = torch.func.functional_call(layer, stacked, (images,))
    assert "forward" not in layer.__dict__
    slope = torch.randn(out.shape, generator=g, dtype=out.dtype)
    found = torch.autograd.grad((out * slope).sum(), [images, *stacked.values()])
    rows: list[list[Tensor]] = []
    outs = []
    for k, (x, s) in enumerate(zip(images.split(batch), slope.split(batch), strict=True)):
        x = x.detach().requires_grad_()
        alone = {n: w[k].detach().requires_grad_() for n, w in stacked.items()}
        outs.append(torch.func.functional_call(layer, alone, (x,)))
        rows.append(list(torch.autograd.grad((outs[-1] * s).sum(), [x, *alone.values()])))
    torch.testing.assert_close(out, torch.cat(outs), **CLOSE)
    of_images, *of_weights = zip(*rows, strict=True)
    torch.testing.assert_close(found[0], torch.cat(of_images), **CLOSE)
    for mine, theirs in zip(found[1:], of_weights, strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs), **CLOSE)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "no bias": {"bias": False}, "padded": {"padding": (1, 2)}, "strides": {"stride": (2, 3)},
    "dilated": {"dilation": (2, 1), "padding": 2}, "same": {"padding": "same"}, "valid": {"padding": "valid"},
    "even, same": {"padding": "same", "kernel_size": 2}, "reflected": {"padding": 1, "padding_mode": "reflect"},
    "circular, strides": {"padding": (2, 1), "padding_mode": "circular", "stride": 2},
    "a pixel": {"kernel_size": 1, "stride": 2}, "all of it": {"padding": (2, 1), "stride": 2, "dilation": (1, 2)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("form", ["grouped", "each", "unfolded"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_form_of_a_convolution_is_that_of_each_client(name: str, form: str, monkeypatch) -> None:
    monkeypatch.setattr(stacked_convolution, "chosen", lambda *given: form)
    compare(nn.Conv2d(4, 6, **{"kernel_size": (3, 2)} | CONVOLUTIONS[name]), (4, 8, 7))


@pytest.mark.parametrize("form", ["grouped", "each", "unfolded"])
@pytest.mark.parametrize(("clients", "batch", "channels"), [(1, 2, 6), (3, 1, 6), (3, 2, 1), (3, 2, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_what_comes_after_may_work_in_place_and_turn_axes(
    form: str, clients: int, batch: int, channels: int, bias: bool, monkeypatch
) -> None:
    """A ReLU in place, and gradients whose rows and columns lie the other way round."""

    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(2, 3).contiguous()

    monkeypatch.setattr(stacked_convolution, "chosen", lambda *given: form)
    layer = nn.Conv2d(4, channels, (3, 2), bias=bias)
    compare(nn.Sequential(layer, nn.ReLU(inplace=True), Turned()), (4, 8, 7), (), clients, batch)
    compare(nn.Sequential(layer, Turned()), (4, 8, 7), (), clients, batch)


@pytest.mark.parametrize("form", ["grouped", "each"])
@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",)])
def test_convolutions_in_groups_and_half_frozen_ones(form: str, frozen: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setattr(stacked_convolution, "chosen", lambda *given: form)
    compare(nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5), frozen)


@pytest.mark.parametrize(
    ("layer", "shape", "form"),
    [
        (nn.Conv2d(1, 32, 5, padding=2), (1, 28, 28), "each"),
        (nn.Conv2d(32, 64, 5, padding=2), (32, 14, 14), "grouped"),
        (nn.Conv2d(3, 64, 5, padding=2), (3, 32, 32), "each"),
        (nn.Conv2d(1, 16, 3, padding=1), (1, 8, 8), "unfolded"),
        (nn.Conv2d(4, 4, 3, groups=4), (4, 8, 8), "each"),
    ],
)
def test_the_form_is_chosen_by_shape_alone(layer: nn.Conv2d, shape: tuple[int, ...], form: str) -> None:
    images = torch.zeros(4 * 10, *shape)
    assert chosen(layer, images, 4, layer._reversed_padding_repeated_twice[:2]) == form


@pytest.mark.parametrize(
    ("layer", "shape", "batch", "clients", "forms"),
    [
        (nn.Conv2d(3, 64, 5, padding=2), (3, 32, 32), 32, 10, ("grouped", "grouped")),
        (nn.Conv2d(3, 64, 5, padding=2), (3, 32, 32), 32, 50, ("unfolded", "unfolded")),
        (nn.Conv2d(32, 64, 5, padding=2), (32, 14, 14), 10, 10, ("unfolded", "unfolded")),
        (nn.Conv2d(64, 64, 5, padding=2), (64, 16, 16), 32, 10, ("each", "grouped")),
        (nn.Conv2d(512, 512, 3, padding=1), (512, 4, 4), 32, 10, ("unfolded", "unfolded")),
        (nn.Conv2d(64, 64, 3, groups=2), (64, 8, 8), 32, 10, ("grouped", "grouped")),
    ],
)
def test_on_a_gpu_the_form_is_that_measured_to_be_the_fastest(
    layer: nn.Conv2d, shape: tuple[int, ...], batch: int, clients: int, forms: tuple[str, str]
) -> None:
    """In fp32 and in bf16; a tensor without data says that it is on a GPU."""
    for form, dtype in zip(forms, (torch.float32, torch.bfloat16), strict=True):
        with FakeTensorMode():
            images = torch.empty(clients * batch, *shape, dtype=dtype, device="cuda")
        assert chosen(layer, images, clients, layer._reversed_padding_repeated_twice[:2]) == form


@pytest.mark.parametrize(
    ("layer", "shape", "frozen"),
    [
        (nn.Linear(5, 4), (5,), ()),
        (nn.Linear(5, 4, bias=False), (3, 5), ()),
        (nn.Linear(5, 4), (2, 3, 5), ()),
        (nn.Linear(5, 4), (5,), ("weight",)),
        (nn.Linear(5, 4), (5,), ("bias",)),
        (nn.GroupNorm(2, 4), (4, 3, 2), ()),
        (nn.GroupNorm(2, 4), (4,), ("weight",)),
        (nn.LayerNorm(5), (2, 3, 5), ()),
        (nn.LayerNorm((3, 5)), (2, 3, 5), ("bias",)),
        (nn.LayerNorm(5, bias=False), (5,), ()),
    ],
)
def test_linear_layers_and_normalizations(layer: nn.Module, shape: tuple[int, ...], frozen: Any) -> None:
    compare(layer, shape, frozen)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "shape"), [(nn.Conv2d, (4, 8, 7)), (nn.Linear, (4,))])
def test_under_autocast_outputs_are_those_of_each_client_in_16_bits(
    kind: Any, shape: tuple[int, ...], bias: bool
) -> None:
    g = torch.Generator().manual_seed(3)
    layer = kind(4, 6, **{"kernel_size": 3} if kind is nn.Conv2d else {}, bias=bias)
    stacked = {n: torch.randn(CLIENTS, *p.shape, generator=g) for n, p in layer.named_parameters()}
    images = torch.randn(CLIENTS * BATCH, *shape, generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        with adapted(layer, Stack(Masks([]), CLIENTS)):
            out = torch.func.functional_call(layer, stacked, (images,))
        alone = [{n: w[k] for n, w in stacked.items()} for k in range(CLIENTS)]
        parts = zip(alone, images.split(BATCH), strict=True)
        each = torch.cat([torch.func.functional_call(layer, own, (x,)) for own, x in parts])
    assert out.dtype == each.dtype == torch.bfloat16
    torch.testing.assert_close(out, each, rtol=0.02, atol=0.1)


def test_a_product_left_behind_is_the_gradient_that_is_not_written() -> None:
    layer, g = nn.Linear(5, 4).double(), torch.Generator().manual_seed(2)
    weights = [
        torch.randn(CLIENTS, *p.shape, generator=g, dtype=p.dtype).requires_grad_()
        for p in layer.parameters()
    ]
    images = torch.randn(CLIENTS * BATCH, 5, generator=g, dtype=torch.float64)
    found = []
    for products in (None, []):
        stack = Stack(Masks([]), CLIENTS, products)
        with adapted(layer, stack):
            out = torch.func.functional_call(
                layer, dict(zip(("weight", "bias"), weights, strict=True)), (images,)
            )
        found.append(torch.autograd.grad(out.square().sum(), weights, allow_unused=True))
    assert products is not None
    ((weight, left, right),) = products
    assert weight.data_ptr() == weights[0].data_ptr()
    assert found[1][0] is None
    torch.testing.assert_close(left @ right, found[0][0], **CLOSE)
    torch.testing.assert_close(found[1][1], found[0][1], **CLOSE)


def test_a_weight_that_is_made_of_others_leaves_no_product() -> None:
    layer, stack = nn.Linear(5, 4).double(), Stack(Masks([]), CLIENTS, [])
    root = torch.ones(CLIENTS, 4, 5, dtype=torch.float64, requires_grad=True)
    with adapted(layer, stack):
        out = torch.func.functional_call(
            layer, {"weight": root * 2}, (torch.ones(CLIENTS * BATCH, 5, dtype=torch.float64),)
        )
    (found,) = torch.autograd.grad(out.sum(), root)
    assert stack.products == []
    assert torch.equal(found, torch.full_like(found, 2.0 * BATCH))


def test_only_layers_that_are_written_here_and_do_nothing_else_are_known() -> None:
    class Mine(nn.Linear):
        pass

    changed = nn.Linear(2, 2)
    changed.forward = lambda x: x  # type: ignore[method-assign]
    good = nn.Sequential(nn.Conv2d(1, 1, 1), nn.GroupNorm(1, 1), nn.Flatten(), nn.Dropout(), nn.Linear(4, 2))
    assert known(good)
    for layer in (
        Mine(2, 2),
        changed,
        nn.Conv1d(1, 1, 1),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ):
        assert not known(nn.Sequential(good, layer))
