"""The [local] table: what it refuses, and how much work it comes to."""

import pytest
from pydantic import ValidationError

from fedlens.local.settings import LocalSettings


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lr": 0.0}, "greater than 0"),
        ({"lr": 0.1, "momentum": 1.0}, "less than 1"),
        ({"lr": 0.1, "epochs": 1, "steps": 1}, "epochs and steps are both set"),
        ({"lr": 0.1, "nesterov": True}, "nesterov needs"),
        ({"lr": 0.1, "optimizer": "adam", "momentum": 0.9}, "adam has betas"),
        ({"lr": 0.1, "optimizer": "adam", "betas": (0.9, 1.0)}, "betas must be"),
        ({"lr": 0.1, "stragglers": 0.5}, "stragglers run fewer epochs"),
        ({"lr": 0.1, "stragglers": 0.5, "steps": 1}, "stragglers run fewer epochs"),
        ({"lr": 0.1, "straggler_work": "drop"}, "straggler_work has no effect"),
        ({"lr": 0.1, "lr_schedule": "linear", "lr_decay": 0.5}, "set one of them"),
        ({"lr": 0.1, "lr_final": 0.1}, "lr_final has no effect"),
        ({"lr": 0.1, "lr_schedule": "linear", "lr_power": 2}, "lr_power belongs to"),
        ({"lr": 0.1, "lr_change": "step"}, "needs an lr_schedule or lr_warmup"),
        ({"lr": 0.1, "optimizer": "adamw", "momentum": 0.9}, "adamw has betas"),
        (
            {"lr": 0.1, "optimizer": "lars", "momentum": 0.9, "nesterov": True},
            "nesterov needs optimizer = 'sgd'",
        ),
        ({"lr": 0.1, "optimizer": "lars", "eps": 1e-3}, "lars has momentum"),
        ({"lr": 0.1, "trust": 0.1}, "belong to optimizer = 'lars'"),
        ({"lr": 0.1, "optimizer": "adam", "lars_leaves": "all"}, "belong to optimizer = 'lars'"),
        ({"lr": 0.1, "batch_size": 0}, "batch_size"),
        ({"lr": 0.1, "batch_size": "some"}, "batch_size"),
        ({"lr": 0.1, "epoch": 1}, "Extra inputs"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({}, "lr"),
    ],
)
def test_what_is_refused(settings, what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        LocalSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "examples", "batch", "steps"),
    [
        ({}, 100, 32, 4),
        ({"epochs": 3}, 100, 32, 12),
        ({"epochs": 3, "batch_size": "all"}, 100, 100, 3),
        ({"epochs": 3, "batch_size": 200}, 100, 100, 3),
        ({"epochs": 2, "batch_size": 10}, 100, 10, 20),
        ({"epochs": 2, "batch_size": 10}, 101, 10, 22),
        ({"epochs": 2, "batch_size": 10}, 1, 1, 2),
        ({"epochs": 2, "batch_size": 10, "last_batch": "drop"}, 101, 10, 20),
        ({"epochs": 2, "batch_size": 10, "last_batch": "drop"}, 3, 3, 2),
        ({"steps": 7}, 100, 32, 7),
        ({"steps": 7, "batch_size": "all"}, 1, 1, 7),
    ],
)
def test_batches_and_steps(settings, examples: int, batch: int, steps: int) -> None:
    local = LocalSettings(lr=0.1, **settings)
    assert (local.batch(examples), local.steps_at(examples)) == (batch, steps)


def test_partial_work_counts_in_what_the_settings_count_in() -> None:
    assert LocalSettings(lr=0.1, epochs=5, batch_size=10).steps_at(95, work=2) == 20
    assert LocalSettings(lr=0.1, steps=5, batch_size=10).steps_at(95, work=2) == 2


def test_the_learning_rate_of_a_round() -> None:
    local = LocalSettings(lr=0.1, lr_decay=0.1, lr_decay_every=30)
    assert [local.lr_at(r, 100) for r in (1, 30)] == [0.1, 0.1]
    assert [local.lr_at(r, 100) for r in (31, 60, 61)] == pytest.approx([0.01, 0.01, 0.001])
    assert LocalSettings(lr=0.1).lr_at(1000, 1000) == 0.1
