"""Runs on a GPU give the results of the processor."""

from __future__ import annotations

from pathlib import Path

from tests.contract.contract_kit import experiment, outcome


def test_a_run_has_the_bits_of_the_processor(tmp_path: Path) -> None:
    outcomes = [
        outcome(
            experiment(rounds=1, engine={"name": "inline", "device": device, "channels_last": False}).run(
                tmp_path / device
            )
        )
        for device in ("cpu", "cuda")
    ]
    assert outcomes[0] == outcomes[1]
