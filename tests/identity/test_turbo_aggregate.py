"""Turbo-Aggregate beside the same sum without masks: equal to the bit, whoever drops out."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from fedlens.aggregate.secure.keys import digest
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, UNMASK
from fedlens.aggregate.secure.turbo_aggregate import TurboAggregate
from fedlens.aggregate.secure.turbo_server import PASS
from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.base.errors import RoundRefused
from fedlens.engines.inline import inline
from tests.identity.identity_kit import same
from tests.identity.test_quantized import FAMILY
from tests.identity.test_secagg import ENGINES, TWENTY, Lossy, run
from tests.unit.engines import ray_kit
from tests.unit.engines.ray_kit import NEEDS_RAY

STEPS = (KEYS, MASKED, PASS, UNMASK)
LONG = [
    pytest.param(name, marks=pytest.mark.nightly) for name in FAMILY if name not in ("fedavg", "scaffold")
]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", *LONG])
def test_it_is_the_sum_without_masks_to_the_bit(name: str) -> None:
    how: dict[str, Any] = {"sizes": TWENTY, "select": Uniform(15), "rounds": 2}
    plain, secure = run(name, Quantized, **how), run(name, TurboAggregate, **how)
    for one, other in zip(plain.steps, secure.steps, strict=True):
        assert one.tally.replied == other.tally.replied
        assert digest(one.after) == digest(other.after)
        assert not other.tally.norms
        assert all(row.keys() == {"client", "exchange"} for row in other.tally.per_client)
    for client in range(len(TWENTY)):
        assert digest(plain.states.get(client)) == digest(secure.states.get(client))


@pytest.mark.parametrize(
    "engine",
    [
        "inline",
        "vectorized",
        pytest.param("processes", marks=pytest.mark.nightly),
        pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.nightly]),
    ],
)
def test_whoever_drops_out_the_others_are_summed(engine: str, quick_workers: None) -> None:
    """Four groups of five clients, of which three of each must last."""
    draw, opened = random.Random(4), 0
    made = ENGINES.get(engine, partial(ray_kit.made, cpus=0.2))
    for attempt in range(2 if engine == "inline" else 1):
        rate = 0.05 if attempt == 0 else 0.25
        fates = [next((step for step in range(4) if draw.random() < rate), 4) for _ in TWENTY]

        def lost(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(op)

        def untrained(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(MASKED)

        how: dict[str, Any] = {"sizes": TWENTY, "select": Everyone(), "rounds": 1, "norm": False}
        secure = partial(run, "scaffold", TurboAggregate, engine=Lossy(made(), lost), **how)
        if any(sum(fates[k] > 2 for k in range(at, 20, 4)) < 3 for at in range(4)):
            with pytest.raises(RoundRefused, match="and 3 must last"):
                secure()
            continue
        opened += 1
        plain = run("scaffold", Quantized, engine=Lossy(inline(), untrained), **how)
        assert same(secure().final, plain.final)
    assert opened >= 1
