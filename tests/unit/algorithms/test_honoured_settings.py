"""Tables and `[local]` settings that an algorithm does not use are refused by name, as its registry entry says."""

from __future__ import annotations

from typing import Any

import pytest

from fedlens.algorithms import registry
from fedlens.algorithms.registry import ALGORITHMS, LOCAL, SLOTS, AlgorithmEntry, refuse_unused, unused_slots
from fedlens.base.errors import ConfigError
from fedlens.local.settings import LocalSettings
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan

BASE = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 5}},
}
SLOT_TABLES: dict[str, Any] = {
    "select": {"name": "uniform"},
    "client": {"name": "plain"},
    "aggregate": {"name": "mean"},
    "server": {"name": "plain"},
}


def planned(values: dict[str, Any], **source: Any) -> Any:
    return plan(read_config(values), Source(values, **source))


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("slot", SLOTS)
def test_each_table_is_used_or_refused_as_declared(algorithm: str, slot: str) -> None:
    needed = {"cut": "1"} if algorithm in ("splitfed", "split-relay") else {}
    values = {**BASE, "algorithm": {"name": algorithm, **needed}, slot: SLOT_TABLES[slot]}
    if slot not in unused_slots(algorithm):
        assert planned(values).config.slots.get(slot, True) is not None
        return
    with pytest.raises(ConfigError, match=rf"'{algorithm}' does not use the table \[{slot}\]") as caught:
        planned(values)
    assert caught.value.where == slot


def test_all_declared_names_exist() -> None:
    for entry in registry._ALGORITHMS.values():
        assert set(entry.slots) <= set(SLOTS)
        assert entry.local <= LOCAL


def test_a_local_setting_that_is_not_declared_is_refused_with_the_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = AlgorithmEntry("fedlens.algorithms.fedavg:fedavg", "", (), frozenset({"momentum", "batch_size"}))
    monkeypatch.setitem(registry._ALGORITHMS, "fedavg", narrow)
    planned({**BASE, "algorithm": "fedavg", "local": {"lr": 0.1, "momentum": 0.9, "epochs": None}})
    with pytest.raises(ConfigError, match=r"'fedavg' does not use local.epochs") as caught:
        planned({**BASE, "algorithm": "fedavg", "local": {"lr": 0.1, "epochs": 2}})
    assert (caught.value.where, caught.value.hint) == (
        "local.epochs",
        "remove it; of [local] it uses batch_size, momentum",
    )
    with pytest.raises(ConfigError, match=r"does not use the table \[server\]") as caught:
        refuse_unused("fedavg", {"select": None, "server": {}}, LocalSettings(lr=0.1))
    assert caught.value.hint == "remove it; of the components it uses none"


def test_tables_of_a_recipe_that_a_new_algorithm_does_not_use_are_left_out_with_a_note() -> None:
    values = {**BASE, "algorithm": "centralized", **SLOT_TABLES}
    renamed = {"renamed": frozenset({"algorithm"}), "overridden": frozenset({"algorithm.name"})}
    made = planned(values, **renamed)
    assert made.config.slots == {"select": None, "aggregate": None, "server": None}
    assert made.config.client is None
    assert len(made.notes) == 4
    assert "'centralized' does not use the recipe's table [server]: it is left out" in made.notes
    renamed["overridden"] |= {"server.lr"}
    with pytest.raises(ConfigError, match=r"does not use the table \[server\]"):
        planned(values, **renamed)
    assert planned({**values, "algorithm": "fedavg"}, **renamed).notes == ()


def test_the_algorithm_of_a_users_own_answers_for_itself() -> None:
    refuse_unused("own.py:mine", {"server": {}}, LocalSettings(lr=0.1, stragglers=0.5, epochs=3))
    refuse_unused(object(), {"server": {}}, LocalSettings(lr=0.1))
