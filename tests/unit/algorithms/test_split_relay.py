"""What split learning in turn sends and discloses, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from tests.unit.algorithms.test_splitfed import SETTINGS


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (
            {"select": {"name": "by-size", "method": "replacement"}},
            "select.name",
            "'split-relay' trains a client",
        ),
        (
            {"local": {"lr": 0.1, "clip_norm": 1.0}},
            "local.clip_norm",
            "'split-relay' does not use local.clip_norm",
        ),
        ({"server": {"name": "plain"}}, "server", "does not use the table"),
    ],
)
def test_what_it_cannot_do_is_refused_with_its_place(
    changes: dict[str, Any], where: str, said: str, tmp_path: Path
) -> None:
    settings = SETTINGS | {"algorithm": {"name": "split-relay", "cut": "1"}} | changes
    with pytest.raises(ConfigError, match=said) as caught:
        Experiment(**settings).run(tmp_path / "run")
    assert caught.value.where == where


@pytest.mark.parametrize(("carry", "times"), [(True, 2), (False, 1)])
def test_a_turn_sends_the_first_layers_to_the_next_client_and_says_so(
    carry: bool, times: int, tmp_path: Path
) -> None:
    algorithm = {"name": "split-relay", "cut": "1", "carry_optimizer": carry}
    local = {"lr": 0.1, "batch_size": 20, "momentum": 0.9}
    result = Experiment(**SETTINGS | {"algorithm": algorithm, "local": local}).run(tmp_path / "run")
    line, lower = result.metrics[1], 4 * (64 * 200 + 200)
    assert line["clients"] == 3
    assert 0 <= line["bytes_peer"] - 2 * times * lower < 1000
    # 50 examples a client, with 200 activations and a label each; a message has a few bytes more.
    assert 0 <= line["bytes_up"] - 3 * 50 * (4 * 200 + 8) - times * lower < 3000
    assert (
        0 <= line["bytes_down"] - 3 * 50 * 4 * 200 - lower < 3000
    )  # in the first round without an optimizer
    *_, sentence = result.summary["disclosures"]
    handed = "layers and their optimizer" if carry else "layers"
    assert f"hands its {handed} to the next client" in sentence
