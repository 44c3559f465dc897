"""What SplitFed refuses, sends and discloses; FedGKT refuses some of it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings

SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "model": "mlp",
    "algorithm": {"name": "splitfed", "cut": "1"},
    "select": {"name": "fixed", "clients": [0, 1, 2]},
    "local": {"lr": 0.1, "batch_size": 20},
    "data": {
        "dataset": {"name": "synthetic", "shape": [1, 8, 8], "train": 300, "test": 60},
        "partition": {"name": "iid", "clients": 6},
    },
}


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({"algorithm": {"name": "splitfed", "cut": "11"}}, "algorithm.cut", "no layer '11' to cut after"),
        ({"algorithm": {"name": "splitfed", "cut": "5"}}, "algorithm.cut", "without a weight to train"),
        ({"select": {"name": "by-size", "method": "replacement"}}, "select.name", "once a round"),
        (
            {"task": {"name": "classification", "class_weights": "balanced"}},
            "task.class_weights",
            "class weights",
        ),
        (
            {"model": {"name": "mlp", "freeze": "all-but-last:2", "cache_features": True}},
            "model.cache_features",
            "gives it features",
        ),
        ({"local": {"lr": 0.1, "clip_norm": 1.0}}, "local.clip_norm", "does not use local.clip_norm"),
        ({"local": {"lr": 0.1, "lr_scale": {"1": 0.5}}}, "local.lr_scale", "does not use local.lr_scale"),
        ({"aggregate": {"name": "mean"}}, "aggregate", "does not use the table"),
        ({"engine": "vectorized"}, "engine.name", "one client after the other"),
        (
            {"engine": {"name": "processes", "workers": 1, "group": 2}},
            "engine.group",
            "one client after the other",
        ),
        (
            {
                "algorithm": {"name": "fedgkt", "client": "mlp", "cut": "1"},
                "model": {"name": "mlp", "freeze": "all-but-last:2", "cache_features": True},
            },
            "model.cache_features",
            "gives it features",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_its_place(
    changes: dict[str, Any], where: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Experiment(**SETTINGS | changes).run(tmp_path / "run")
    assert caught.value.where == where


@pytest.mark.parametrize(("setting", "value"), [("variant", "v3"), ("server_rate", 0.0), ("cut", None)])
def test_a_wrong_setting_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError):
        read_settings(ALGORITHMS.find("splitfed"), {"cut": "1", setting: value}, "algorithm")


def test_a_round_sends_activations_labels_gradients_and_halves_and_says_so(tmp_path: Path) -> None:
    algorithm = {"name": "splitfed", "cut": 1}  # a number, as --set algorithm.cut=1 gives it
    result = Experiment(**SETTINGS | {"algorithm": algorithm}).run(tmp_path / "run")
    line, lower = result.metrics[1], 4 * (64 * 200 + 200)
    assert line["clients"] == 3
    assert "bytes_peer" not in line
    # 50 examples a client, with 200 activations and a label each; a message has a few bytes more.
    assert 0 <= line["bytes_up"] - 3 * (50 * (4 * 200 + 8) + lower) < 3000
    assert 0 <= line["bytes_down"] - 3 * (50 * 4 * 200 + lower) < 3000
    sentence, measured = result.summary["disclosures"]
    assert "distance correlation of both" in measured
    assert all(0 < row["distance_correlation"] <= 1 for row in result.metrics)
    assert "the labels of its batch and what the layers up to '1' compute" in sentence


@pytest.mark.parametrize(("activations", "size"), [("float32", 4), ("float16", 2)])
def test_with_two_cuts_labels_stay_and_with_float16_activations_take_half_the_bytes(
    activations: str, size: int, tmp_path: Path
) -> None:
    algorithm = {"name": "splitfed", "cut": [1, "3"], "activations": activations}
    result = Experiment(**SETTINGS | {"algorithm": algorithm}).run(tmp_path / "run")
    line, own = result.metrics[1], 4 * (64 * 200 + 200 + 200 * 10 + 10)
    # 200 activations and 200 gradients an example, either way.
    for way in ("bytes_up", "bytes_down"):
        assert 0 <= line[way] - 3 * (50 * 200 * (size + 4) + own) < 6000
    assert line["examples"] == 150
    sentence, _ = result.summary["disclosures"]
    assert "from which labels can be guessed" in sentence
    assert "the labels of its batch" not in sentence


@pytest.mark.parametrize("cut", [["3", "1"], ["1"], ["1", "3", "5"]])
def test_other_cuts_than_one_or_two_in_order_are_refused(cut: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Experiment(**SETTINGS | {"algorithm": {"name": "splitfed", "cut": cut}}).run(tmp_path / "run")
