"""What the tests of stacked clients share: a course of one client after the other, and the same of groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlens.engines.vectorized import Vectorized
from fedlens.local.vectorized import batched_train
from tests.identity.identity_kit import World, course, same

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
STEPS = {"lr": 0.2, "epochs": 3, "batch_size": 4}
LOCAL: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.7}, "nesterov": {"momentum": 0.7, "nesterov": True}, "decay": {"weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1}, "clipped": {"clip_norm": 0.8},
    "stragglers": {"stragglers": 0.6}, "steps": {"epochs": None, "steps": 5}, "whole": {"batch_size": "all"},
    "virtual": {"examples": 4, "batch_size": 2}, "lr decay": {"lr_decay": 0.5},
    "whole batches": {"last_batch": "drop"}, "adamw": {"optimizer": "adamw", "lr": 0.05, "weight_decay": 0.1},
    "rate by step": {"lr_schedule": "cosine", "lr_warmup": 1, "lr_change": "step"},
    "dropped stragglers": {"stragglers": 0.6, "straggler_work": "drop"},
}  # fmt: skip


def sizes_of_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives the number of clients of each group that trains together from here on."""
    sizes: list[int] = []
    original = batched_train.train_together

    def counted(train: Any, calls: Any) -> Any:
        sizes.append(len(calls))
        return original(train, calls)

    monkeypatch.setattr(batched_train, "train_together", counted)
    return sizes


def agree(made: Any, there: World, rounds: int = 3, group: int | None = None) -> None:
    """Models, rules' states, metrics and client states' effect over the rounds are those of one by one."""
    one = course(made, there, rounds)
    many = course(made, there, rounds, engine=Vectorized(group=group))
    for a, b in zip(one.steps, many.steps, strict=True):
        torch.testing.assert_close(dict(b.after["model"]), dict(a.after["model"]), **CLOSE)
        assert (b.cohort, b.tally.replies, b.tally.failed) == (a.cohort, a.tally.replies, a.tally.failed)
        for row, other in zip(b.tally.per_client, a.tally.per_client, strict=True):
            assert row.keys() == other.keys()
            assert row == pytest.approx(other, rel=1e-10)
    assert not same(one.final, one.steps[0].before["model"])
