"""LightSecAgg beside the same sum without masks: equal to the bit, whoever drops out."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from fedlens.aggregate.secure.keys import digest
from fedlens.aggregate.secure.lightsecagg import LightSecAgg
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.aggregate.secure.secagg_server import MASKED
from fedlens.algorithms.client_sampling import Everyone
from fedlens.base.errors import RoundRefused
from fedlens.engines.inline import inline
from tests.identity.identity_kit import same
from tests.identity.test_quantized import FAMILY
from tests.identity.test_secagg import ENGINES, STEPS, TWENTY, Lossy, run, states_of
from tests.unit.engines import ray_kit
from tests.unit.engines.ray_kit import NEEDS_RAY

LONG = [
    pytest.param(name, marks=pytest.mark.nightly) for name in FAMILY if name not in ("fedavg", "scaffold")
]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", *LONG])
def test_it_is_the_sum_without_masks_to_the_bit(name: str) -> None:
    plain, secure = run(name, Quantized), run(name, LightSecAgg)
    for one, other in zip(plain.steps, secure.steps, strict=True):
        assert one.tally.replied == other.tally.replied
        assert digest(one.after) == digest(other.after)
        assert not other.tally.norms
        assert all(row.keys() == {"client", "exchange"} for row in other.tally.per_client)
    assert states_of(plain.states) == states_of(secure.states)


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.nightly])])
def test_whoever_drops_out_the_others_are_summed(engine: str, quick_workers: None) -> None:
    """U = 14 of 20 clients must last, and 7 may collude."""
    draw, opened = random.Random(3), 0
    made = ENGINES.get(engine, partial(ray_kit.made, cpus=0.2))
    for attempt in range(2 if engine == "inline" else 1):
        rate = 0.05 if attempt % 2 == 0 else 0.25
        fates = [next((step for step in range(4) if draw.random() < rate), 4) for _ in TWENTY]

        def lost(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(op)

        def untrained(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(MASKED)

        how: dict[str, Any] = {"sizes": TWENTY, "select": Everyone(), "rounds": 1, "norm": False}
        secure = partial(run, "scaffold", LightSecAgg, engine=Lossy(made(), lost), **how)
        if sum(fate == 4 for fate in fates) < 14:
            with pytest.raises(RoundRefused, match="and 14 must last"):
                secure()
            continue
        opened += 1
        plain = run("scaffold", Quantized, engine=Lossy(inline(), untrained), **how)
        assert same(secure().final, plain.final)
    assert opened >= 1
