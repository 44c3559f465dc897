"""The settings of published benchmarks are those that their sources name."""

from __future__ import annotations

import pytest

from benchmarks.published import overrides_of
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source, override
from fedlens.settings.plan import plan


@pytest.mark.parametrize(
    ("setting", "population", "rounds", "clients", "lr", "every"),
    [("flute", 1000, 100, 10, 0.03, 20), ("pfl", 1000, 150, 50, 0.1, 10)],
)
def test_a_setting_is_valid_and_has_the_published_numbers(
    setting: str, population: int, rounds: int, clients: int, lr: float, every: int
) -> None:
    source = override(Source({}), overrides_of(setting, "mnist"))
    config = plan(read_config(source.values, source.locate), source).config
    assert (config.data.partition["clients"], config.select["clients_per_round"]) == (population, clients)
    assert (config.local.lr, config.local.batch_size, config.local.epochs) == (lr, 10, 1)
    assert (config.rounds, config.evaluation.every) == (rounds, every)
