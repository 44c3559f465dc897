"""Local optimizers against torch.optim: the same bits for SGD, the last bits for Adam."""

import itertools

import pytest
import torch
from torch import nn

from fedlens.local.optimizers import clip, optimizer
from fedlens.local.settings import LocalSettings

STEPS = 25


def gradients(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (5,), (3, 2, 3, 3), ()]
    return [[torch.randn(s, generator=g, dtype=dtype) for s in shapes] for _ in range(STEPS)]


def ours(settings: LocalSettings, start: list[torch.Tensor], course) -> tuple[list[torch.Tensor], dict]:
    weights, state = [w.clone() for w in start], {}
    step = optimizer(settings, state)
    for gradient in course:
        before = [g.clone() for g in gradient]
        step(weights, gradient, settings.lr)
        assert all(torch.equal(a, b) for a, b in zip(before, gradient, strict=True))  # inputs stay
    return weights, state


def torchs(make, start: list[torch.Tensor], course) -> list[torch.Tensor]:
    weights = [w.clone().requires_grad_() for w in start]
    step = make(weights)
    for gradient in course:
        for w, g in zip(weights, gradient, strict=True):
            w.grad = g.clone()
        step.step()
    return [w.detach() for w in weights]


SGD = [
    dict(zip(("momentum", "nesterov", "weight_decay"), row, strict=True))
    for row in itertools.product((0.0, 0.9), (False, True), (0.0, 0.01))
    if row[0] or not row[1]
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", SGD, ids=str)
def test_sgd_gives_the_bits_of_torch(how, dtype) -> None:
    start, *course = gradients(dtype)
    weights, _ = ours(LocalSettings(lr=0.05, **how), start, course)
    reference = torchs(lambda p: torch.optim.SGD(p, lr=0.05, **how), start, course)
    assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))


def lars_loop(start, course, lr, momentum, decay, trust, every_leaf):
    """Algorithm 1 of You et al. 2017, one leaf and one number after the other."""
    weights = [w.flatten().tolist() for w in start]
    velocities = [[0.0] * len(w) for w in weights]
    for gradient in course:
        for leaf, (w, v, g) in enumerate(zip(weights, velocities, gradient, strict=True)):
            slopes = g.flatten().tolist()
            size, slope = (sum(x * x for x in values) ** 0.5 for values in (w, slopes))
            scales = (every_leaf or start[leaf].dim() > 1) and size > 0 and slope > 0
            ratio = trust * size / (slope + decay * size) if scales else 1.0
            wd = decay if every_leaf or start[leaf].dim() > 1 else 0.0
            for i, s in enumerate(slopes):
                v[i] = momentum * v[i] + lr * ratio * (s + wd * w[i])
                w[i] -= v[i]
    return [torch.tensor(w, dtype=torch.float64).view_as(s) for w, s in zip(weights, start, strict=True)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("leaves", ["weights", "all"])
def test_lars_is_the_equation(momentum, decay, leaves) -> None:
    start, *course = gradients(torch.float64)
    course[3][0].zero_()  # a leaf without gradient
    start[2].zero_()  # a leaf that begins at 0
    settings = LocalSettings(
        optimizer="lars", lr=0.5, momentum=momentum, weight_decay=decay, trust=0.02, lars_leaves=leaves
    )
    weights, state = ours(settings, start, course)
    expected = lars_loop(start, course, 0.5, momentum, decay, 0.02, leaves == "all")
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-13)
    assert set(state) == ({"momentum"} if momentum else set())


def test_lars_takes_a_rate_for_each_leaf() -> None:
    start, *course = gradients(torch.float64)
    settings = LocalSettings(optimizer="lars", lr=0.5, momentum=0.9)
    weights = [w.clone() for w in start]
    step = optimizer(settings, {})
    for gradient in course:
        step(weights, gradient, [0.5, 0.1, 0.5, 0.5])
    expected = lars_loop([start[1]], [[g[1]] for g in course], 0.1, 0.9, 0.0, 0.001, False)
    torch.testing.assert_close(weights[1], expected[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("how", [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.8), "eps": 1e-3}], ids=str)
def test_adam_agrees_with_torch(how) -> None:
    start, *course = gradients(torch.float64)
    weights, state = ours(LocalSettings(optimizer="adam", lr=0.05, **how), start, course)
    reference = torchs(lambda p: torch.optim.Adam(p, lr=0.05, **how), start, course)
    torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-14)
    assert state["steps"][0] == STEPS - 1


@pytest.mark.parametrize(
    "how", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.5, "betas": (0.5, 0.8)}], ids=str
)
def test_adamw_agrees_with_torch(how) -> None:
    start, *course = gradients(torch.float64)
    weights, _ = ours(LocalSettings(optimizer="adamw", lr=0.05, **how), start, course)
    reference = torchs(lambda p: torch.optim.AdamW(p, lr=0.05, **{"weight_decay": 0.0, **how}), start, course)
    torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_the_state_is_all_that_has_to_be_kept(name: str) -> None:
    settings = LocalSettings(lr=0.05, **({"momentum": 0.9} if name == "sgd" else {"optimizer": name}))
    start, *course = gradients(torch.float32)
    whole, _ = ours(settings, start, course)
    half, state = ours(settings, start, course[:10])
    copied = {kind: [t.clone() for t in tensors] for kind, tensors in state.items()}
    step = optimizer(settings, copied)
    for gradient in course[10:]:
        step(half, gradient, 0.05)
    assert all(torch.equal(a, b) for a, b in zip(half, whole, strict=True))


@pytest.mark.parametrize("largest", [0.1, 3.0, 1e6])
def test_clipping_is_that_of_torch(largest: float) -> None:
    given = gradients(torch.float64)[0]
    parameters = [nn.Parameter(g.clone()) for g in given]
    for p, g in zip(parameters, given, strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(parameters, largest)
    clipped = clip(given, largest)
    torch.testing.assert_close(clipped, [p.grad for p in parameters], rtol=1e-12, atol=0)
    total = torch.cat([g.flatten() for g in clipped]).norm()
    assert total <= largest * (1 + 1e-9)
    assert all(torch.equal(a, b) for a, b in zip(clipped, given, strict=True)) == (largest == 1e6)
