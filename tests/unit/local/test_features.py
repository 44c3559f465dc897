"""The features of models that enter their last layer more than once for a batch."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.local.features import OWN, ModelFeatures


def test_the_last_pass_of_a_batch_counts_and_nothing_of_a_batch_is_kept() -> None:
    def outputs(module: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
        module(inputs)
        out: Tensor = module(inputs + 1)
        return out

    layer, images = nn.Linear(2, 1), torch.arange(6.0).view(3, 2)
    with ExitStack() as closing:
        problem: Any = SimpleNamespace(
            learner=SimpleNamespace(module=layer),
            closing=closing,
            task=SimpleNamespace(outputs=outputs),
            twin=lambda name, tree: SimpleNamespace(module=nn.Linear(2, 1)),
        )
        features = ModelFeatures(SimpleNamespace(problem=problem), {"arrived": {}})  # type: ignore[arg-type]
        outputs(layer, images, None)
        found = features.take(images, None)
        torch.testing.assert_close(found, {OWN: images + 1, "arrived": images + 1})
        assert not features.own
        assert not features.others["arrived"][1]
