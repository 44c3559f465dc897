"""Launches are counted by the step, and only those of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlens.base.profiling import recording, scoped
from fedlens.benchmark.profile_client import LaunchCounter, count_launches
from fedlens.core.protocol import Failure
from fedlens.engines.executor import Executor
from tests.unit.benchmark.profile_kit import built, first_ask


def test_views_allocations_and_transfers_are_no_launches() -> None:
    x, y, elsewhere = torch.ones(4, 3), torch.zeros(4, 3), torch.ones(4, 3, device="meta")
    counter = LaunchCounter("cpu")
    with counter, recording(counter.scope), torch.no_grad():
        x.add_(1)  # before the first step
        for part in scoped("data", range(7)):
            if part == 0:
                x.t().reshape(3, 4)[0], x.detach(), torch.empty(3), x.unsqueeze_(0).squeeze_(0)
            if part == 1:
                x.copy_(y), x.to(torch.float64), torch._foreach_copy_([x, y], [y, x])
            if part == 2:
                x.to("meta"), elsewhere.copy_(x)
            if part == 3:
                elsewhere.add_(1)
            if part == 4:
                torch._foreach_add_([x, y], 1.0)
            if part == 5:
                torch.ops.aten._unsafe_view(x, [3, 4])  # of a product of matrices with more dimensions
    assert counter.steps == [0, 4, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(("of_inputs", "backward"), [(False, 2), (True, 3)])
def test_a_convolution_launches_one_kernel_for_each_gradient(of_inputs: bool, backward: int) -> None:
    layer, x = nn.Conv2d(1, 2, 3), torch.ones(1, 1, 5, 5, requires_grad=of_inputs)
    counter = LaunchCounter("cpu")
    with counter, recording(counter.scope):
        for _ in scoped("data", range(1)):
            torch.autograd.grad(
                layer(x), [*layer.parameters(), *([x] if of_inputs else [])], torch.ones(1, 2, 3, 3)
            )
    assert counter.steps[0] == 1 + 1 + backward  # forward, the ones, backward


def test_a_step_of_sgd_on_a_linear_model_is_counted_in_full() -> None:
    experiment = built("model.name='linear'", "local.batch_size=20", "engine.name='inline'")
    counts = count_launches(experiment, first_ask(experiment), {})
    # Product, log-softmax and loss; the loss's own gradient, and theirs, with a sum for the bias; an update of each of
    # two leaves. An epoch's images are gathered at once, which the median leaves out.
    assert counts["alone"] == 3 + 1 + 4 + 2
    assert counts["together"] > counts["alone"]


def test_what_is_not_counted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = built("model.name='resnet20'", "model.norm='batch'", "engine.name='inline'")
    ask = first_ask(experiment)
    monkeypatch.setattr(
        Executor, "answer", lambda self, op, shared, item, expect: Failure(item.id, item.client, "x")
    )
    assert count_launches(experiment, ask, {}) == {}
