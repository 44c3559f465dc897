"""Which form a model takes for stacked clients, and that trying it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.core.modules import module_in
from fedlens.core.protocol import ModelSpec
from fedlens.local.stacked_model import StackedModel


class Odd(nn.Module):
    """Linear layers, and something between them that one large batch would do in another way."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.first, self.last = what, nn.Linear(4, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.what == "tied":
            x = functional.linear(x, self.first.weight)
        elif self.what == "the weight itself":
            x = x * self.first.weight.norm()
        elif self.what == "mixing":
            x = x - x.mean(0)
        elif self.what == "dropping by itself":
            x = functional.dropout(x, 0.5, self.training)
        elif self.what == "counting":
            self.seen += 1
        elif self.what == "dropout":
            x = self.dropout(x)
        out: Tensor = self.last(x)
        return out


def stacked(what: str) -> tuple[StackedModel, dict[Any, Any]]:
    def factory(input_shape: Sequence[int], classes: int) -> nn.Module:
        return Odd(what)

    spec, scratch = ModelSpec(factory, "odd", {}, (4,), 3, 0), dict[Any, Any]()
    return StackedModel(module_in(spec, scratch, torch.device("cpu")), scratch), scratch


@pytest.mark.parametrize("what", ["tied", "the weight itself", "mixing", "dropping by itself"])
def test_what_one_large_batch_would_get_wrong_stays_under_vmap(what: str) -> None:
    assert not stacked(what)[0].flat


@pytest.mark.parametrize("what", ["nothing", "dropout", "counting"])
def test_the_rest_is_one_large_batch_and_is_tried_once(what: str, monkeypatch) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    model, scratch = stacked(what)
    assert model.flat
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.learner.rest["seen"]) == 0
    assert "forward" not in model.learner.module.first.__dict__
    monkeypatch.setattr(StackedModel, "_alike", lambda self: pytest.fail("tried again"))
    assert StackedModel(model.learner, scratch).flat


@pytest.mark.parametrize("flat", [True, False])
def test_both_forms_hear_what_enters_the_last_linear_layer(flat: bool) -> None:
    model, _ = stacked("nothing")
    model.flat = flat
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(2, *w.shape, generator=g) for w in model.learner.trainable.values()]
    images = torch.randn(2, 3, 4, generator=g)
    with model.ready([]):
        outputs, features = model.with_features(weights, images)
        assert torch.equal(outputs, model(weights, images))
    assert features is not None
    for k in range(2):
        z = torch.tanh(images[k] @ weights[0][k].T + weights[1][k])
        torch.testing.assert_close(features[k], z)
        torch.testing.assert_close(outputs[k], z @ weights[2][k].T + weights[3][k])
