"""The line of every key of a TOML text."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fedlens.settings.config_source import recipes
from fedlens.settings.toml_lines import Path, toml_lines

TEXT = '''\
title = """two [lines]
"name" = 3"""   # not a key
seeds = [0, 1, # a comment, with = and [
  2]
point = { "local.lr" = 0.1, sub.key = 'a # b' }
[grid]
"data.partition.alpha" = [0.1, 1.0]
 'local.lr' = [
  0.01,
  0.03,
]
[cases."two classes".set]
"data.partition.name" = "shards" # [methods]
[[figures]]
kind = "setting"
[[figures]]
kind = "heat"
sizes = [[1, 2],
 [3, 4]]
[ methods . fedavg ]
points = [ { "local.lr" = 0.1 },
  { "local.lr" = 0.2 } ]
'''


def paths(values: Any, path: Path = ()) -> set[Path]:
    """The path of every table, key and list entry."""
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    below = {found for key, value in items for found in paths(value, (*path, key))}
    return below | ({path} if path else set())


def test_each_key_has_its_line() -> None:
    lines = toml_lines(TEXT)
    assert lines["title",] == 1
    assert lines["seeds",] == 3
    assert lines["seeds", 2] == 4
    assert lines["point", "sub", "key"] == 5
    assert lines["grid", "data.partition.alpha"] == 7
    assert lines["grid", "local.lr", 1] == 10
    assert lines["cases", "two classes", "set", "data.partition.name"] == 13
    assert lines["figures", 1, "kind"] == 17
    assert lines["figures", 1, "sizes", 1, 0] == 19
    assert lines["methods", "fedavg", "points", 1, "local.lr"] == 22


def test_the_keys_are_those_of_the_parsed_text() -> None:
    assert set(toml_lines(TEXT)) == paths(tomllib.loads(TEXT))


@pytest.mark.parametrize("name", ["cifar10/fedavg-dirichlet", "fedcv/table6", "digits"])
def test_the_keys_of_a_recipe_are_those_of_the_parsed_text(name: str) -> None:
    text = recipes()[name].read_text()
    assert set(toml_lines(text)) == paths(tomllib.loads(text))
