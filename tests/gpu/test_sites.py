"""A site that computes on its GPU: the answer that it sends is that of the processor, and lies in ordinary memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedlens.core.protocol import Id, Reply, RoundContext
from fedlens.core.random import Rng
from fedlens.core.wire.message import Caps, read_payload
from fedlens.engines.executor import Executor, Item
from fedlens.engines.links.post import answer_body
from fedlens.site.settings import SITE_FILE
from tests.gpu.device_kit import GPU
from tests.unit.site.site_kit import opened, plan_at_server, write_images, write_site

SETTINGS = {
    "rounds": 1,
    "model": "mlp",
    "algorithm": "fedavg",
    "local": {"lr": 0.1, "steps": 2, "batch_size": 4},
    "evaluation": {"clients": "all"},
    "data": {
        "dataset": {"name": "sites", "classes": ["a", "b"], "input_shape": [1, 8, 8]},
        "validation": 0.25,
        "validation_from": "client",
    },
}


def update(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """What a site sends after local training, as the server reads it."""
    rng = np.random.default_rng(0)
    write_images(folder / "scans", rng.integers(0, 255, (16, 8, 8), np.uint8), ["a", "b"] * 8)
    write_site(folder)
    file = folder / SITE_FILE
    file.write_text(file.read_text().replace('device = "cpu"', f'device = "{device}"'))
    _, (place,) = opened(plan_at_server(SETTINGS), {"ward": folder})
    assert torch.device(place.program.device).type == device
    built = place.built
    state = built.algorithm.init(built.model, built.federation)
    ask = next(built.algorithm.round(state, RoundContext(1, 1, built.federation, Rng((0,)))))
    item = Item(Id(1, 0, 0), 0, ask.requests[0].payload, {})
    with place.computing():
        answer = Executor(place.program).answer(ask.op, ask.shared, item, ask.expect)
    assert isinstance(answer, Reply), answer
    sent = read_payload(answer_body(answer.payload, answer.letters), Caps(2**24))
    found: dict[str, torch.Tensor] = sent["payload"]["update"]
    return found


def test_a_site_sends_what_it_would_send_from_the_processor(tmp_path: Path) -> None:
    here, there = update(tmp_path / "cpu", "cpu"), update(tmp_path / "gpu", GPU)
    assert any(value.abs().max() > 0 for value in here.values())
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
