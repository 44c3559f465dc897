"""The two gains of a round against chen2022, Eq. 4, with clients of unequal weights."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedlens.analyses.dynamics import dynamics
from fedlens.analyses.opened_run import OpenedRun

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 12.0}
ACCURACY = {"before": 0.5, "a": 0.25, "b": 0.5, "c": 0.75, "after": 0.875}
LOSS = {"before": 2.0, "a": 4.0, "b": 2.5, "c": 1.0, "after": 0.5}


def opened(score: str | None) -> OpenedRun:
    """A run of one recorded round, whose models are their names."""

    def several(models: Iterable[str]) -> list[dict[str, float]]:
        return [{"accuracy": ACCURACY[model], "loss": LOSS[model]} for model in models]

    recorded = SimpleNamespace(
        round=1,
        trained=[SimpleNamespace(client=client, weight=weight) for client, weight in WEIGHTS.items()],
        before=lambda: "before",
        after=lambda: "after",
        local_model=lambda reply, before: reply.client,
    )
    run = SimpleNamespace(
        announce=lambda evaluations: None,
        with_models=[recorded],
        built=SimpleNamespace(task=SimpleNamespace(score=score)),
        evaluator=SimpleNamespace(several=several),
        metric=score or "loss",
    )
    return cast(OpenedRun, run)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (  # the mean of 0.25, 0.5 and 0.75 is 0.5, and weighted it is (0.25 + 1.5 + 9) / 16
            "accuracy",
            {"local": 0.5, "local_weighted": 0.671875, "local_gain": 0.0, "aggregation_gain": 0.375},
        ),
        (  # the mean of 4, 2.5 and 1 is 2.5, and weighted it is (4 + 7.5 + 12) / 16; a fall of the loss is a gain
            None,
            {"local": 2.5, "local_weighted": 1.46875, "local_gain": -0.5, "aggregation_gain": 2.0},
        ),
    ],
)
def test_every_client_counts_the_same_in_the_gains(score: str | None, expected: dict[str, Any]) -> None:
    (row,) = dynamics(opened(score))
    assert {name: row[name] for name in expected} == expected
    assert (row["loss_before"], row["loss_local"], row["loss_after"]) == (2.0, 2.5, 0.5)
    assert [client["weight"] for client in row["clients"]] == [1.0, 3.0, 12.0]
