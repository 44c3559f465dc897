"""Settings by dotted key: every key of the table exists, and what it leaves out."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fedlens.run.changes import ENGINE
from fedlens.settings.config import Config, plain, read_config
from fedlens.settings.keys import CHANGES, changes, changing, diff, flat

SETTINGS = {
    "rounds": 3, "model": "linear", "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(CHANGES))
def test_every_key_is_a_setting_and_every_column_is_known(key: str) -> None:
    assert set(CHANGES[key].split()) <= {"bits", "experiment", "readers"}
    model: Any = Config
    for part in [] if key.startswith("engine.") else key.split("."):  # the table of an engine is its own
        kinds = (type := model.model_fields[part].annotation, *get_args(type))
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def test_the_settings_of_an_engine_that_change_bits_have_defaults() -> None:
    engine = {key.removeprefix("engine.") for key in CHANGES if key.startswith("engine.")}
    assert engine == {"name", *ENGINE}


def test_what_changes_no_bit_changes_no_experiment() -> None:
    assert not [key for key, columns in CHANGES.items() if "experiment" in columns and "bits" not in columns]


def test_the_engine_changes_bits_and_is_not_shown_to_readers() -> None:
    config = plain(read_config({**SETTINGS, "engine": {"name": "processes", "workers": 2}, "seed": 7}))
    assert "engine.workers" not in changing(config, "bits")
    assert "engine.name" in changing(config, "bits")
    assert not [key for key in changing(config, "experiment") if key.startswith("engine.")]
    assert changing(config, "experiment")["seed"] == 7
    assert not [
        key for key in changing(config, "readers") if key.startswith(("engine.", "seed", "evaluation."))
    ]
    assert changing(config, "readers")["data.partition.clients"] == 4


def test_an_unnamed_key_changes_everything() -> None:
    assert changes("local.lr", "bits")
    assert changes("local.lr", "experiment")
    assert changes("local.lr", "readers")
    assert changes("names", "bits")
    assert not changes("name", "bits")


def test_a_difference_keeps_the_order_and_tells_true_from_one() -> None:
    assert diff({"b": 1, "a": {"x": 1}}, {"a": {"x": True, "y": 2}}) == [
        ("b", 1, None), ("a.x", 1, True), ("a.y", None, 2)
    ]  # fmt: skip


def test_tables_of_a_list_are_numbered_only_if_asked() -> None:
    table = {"client": [{"name": "a"}, {"name": "b"}], "observe": {}}
    assert flat(table) == {"client": [{"name": "a"}, {"name": "b"}]}
    whole = flat(table, whole=lambda inner: not inner, numbered=True)
    assert whole == {"client.0.name": "a", "client.1.name": "b", "observe": {}}
