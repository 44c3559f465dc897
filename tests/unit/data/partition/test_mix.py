"""`mix` against the outer and the inner partition made by themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.random import derive
from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.iid import iid
from fedlens.data.partition.mix import mix
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.shards import shards
from fedlens.data.table import Table

HERE = "fedlens.data.partition"
FEATURE = f"{HERE}.feature:feature"
MIX = f"{HERE}.mix:mix"
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [40, 20, 25, 11, 35]))
CITIES = np.random.default_rng(1).choice(["Bern", "Ulm", "Zug"], 131, p=[0.6, 0.36, 0.04])
TABLE = Table.of(LABELS, {"city": CITIES})
BY_CITY = {"name": f"{__file__}:by_city"}


def by_city(table: Table, seed: int) -> Partition:
    """A user's own partition: no settings, the seed unused."""
    names, owners = np.unique(table.column("city"), return_inverse=True)
    return Partition.of_owners(owners, names.tolist(), spec={"seed": seed})


def by_light(table: Table, seed: int) -> Partition:
    """The same, each city with a brightness of its own."""
    p = by_city(table, seed)
    return replace(p, features={"brightness": 0.5 + np.arange(len(p)) / 10})


def with_warmth(table: Table, seed: int, *, to: str = "Bern") -> Partition:
    """One with a feature that has no neutral number, and only where it likes."""
    p = iid(np.zeros(len(table), int), seed, clients=2)
    return replace(p, features={"warmth": np.ones(2)} if table.column("city")[0] == to else {})


def nothing(table: Table, seed: int) -> Partition:
    return Partition((), np.empty(0, np.int64), np.zeros(1, np.int64))


def a_list(table: Table, seed: int) -> list[int]:
    return [1, 2]


def own(name: str, **settings: object) -> dict[str, Any]:
    return {"name": f"{__file__}:{name}", **settings}


@pytest.mark.parametrize("seed", [0, 12345])
def test_it_is_the_inner_partition_of_each_part_of_the_outer(seed: int) -> None:
    outer = {"name": "shards", "clients": 4, "classes_per_client": 2}
    inner = {"name": "dirichlet", "clients": 3, "alpha": 0.3}
    p = mix(TABLE, seed, outer=outer, inner=inner)
    first = shards(TABLE, seed, clients=4)
    k = 0
    for i in range(4):
        within = dirichlet(LABELS[first[i]], derive(seed, "inner", str(i)), clients=3, alpha=0.3)
        for j in range(3):
            assert p.ids[k] == f"{i}/{j}"
            assert p[k].tolist() == first[i][within[j]].tolist()
            k += 1
    assert len(p) == k


def test_the_partition_is_pinned_and_everything_is_recorded() -> None:
    outer = {"name": "dirichlet", "clients": 3, "alpha": 0.5}
    p = mix(LABELS, 7, outer=outer, inner={"name": "shards", "clients": 2})
    assert p.digest[:16] == "3fc548965c997151"
    assert p.spec == {
        "name": "mix",
        "outer": {**outer, "prior": "uniform", "size": None},
        "inner": {"name": "shards", "clients": 2, "classes_per_client": 2, "scheme": "distinct"},
        "small": "stop",
        "seed": 7,
    }


def test_a_city_more_changes_nothing_in_the_others() -> None:
    inner = {"name": "dirichlet", "clients": 4, "alpha": 0.1}
    p = mix(TABLE, 0, outer=BY_CITY, inner=inner)
    more = np.concatenate([CITIES, ["Aarau"] * 20])
    q = mix(
        Table.of(np.concatenate([LABELS, np.arange(20) % 5]), {"city": more}), 0, outer=BY_CITY, inner=inner
    )
    assert q.ids[:4] == ("Aarau/0", "Aarau/1", "Aarau/2", "Aarau/3")
    assert q.ids[4:] == p.ids
    assert all(q[k + 4].tolist() == p[k].tolist() for k in range(len(p)))


def test_parts_of_the_same_size_are_partitioned_by_seeds_of_their_own() -> None:
    p = mix(np.zeros(80, int), 0, outer={"name": "iid", "clients": 2}, inner={"name": "iid", "clients": 2})
    first = iid(np.zeros(80, int), 0, clients=2)
    places = [np.searchsorted(first[i], p[2 * i]).tolist() for i in range(2)]
    assert places[0] != places[1]


def test_a_name_alone_is_a_table_and_a_mix_may_be_inside_a_mix() -> None:
    two = {"name": "iid", "clients": 2}
    p = mix(TABLE, 0, outer=BY_CITY["name"], inner={"name": MIX, "outer": two, "inner": two}, small="drop")
    assert p.ids == tuple(f"{city}/{i}/{j}" for city in ("Bern", "Ulm", "Zug") for i in "01" for j in "01")
    q = mix(TABLE, 0, outer={"name": MIX, "outer": BY_CITY["name"], "inner": two}, inner=two)
    assert q.ids == p.ids
    assert [len(np.unique(CITIES[row])) for row in q] == [1] * 12
    assert p.spec["inner"]["outer"]["clients"] == 2


def test_label_skew_and_feature_skew_go_together_or_apart() -> None:
    skew = {"name": "dirichlet", "clients": 8, "alpha": 0.1}
    both = mix(LABELS, 0, outer=skew, inner={"name": FEATURE, "clients": 1})
    alone = dirichlet(LABELS, 0, clients=8, alpha=0.1)
    assert [row.tolist() for row in both] == [row.tolist() for row in alone]
    assert all(len(set(values)) == 8 for values in both.features.values())
    assert sorted(both.features) == ["blur", "brightness", "contrast", "noise", "rotation"]
    groups = mix(LABELS, 0, outer={"name": FEATURE, "clients": 3}, inner={"name": "iid", "clients": 2})
    for values in groups.features.values():
        assert values[[0, 2, 4]].tolist() == values[[1, 3, 5]].tolist()
        assert len(set(values)) == 3


def test_features_of_outer_and_inner_are_put_together() -> None:
    none = dict.fromkeys(("brightness", "contrast", "blur", "rotation", "noise"), 0.0)
    light = {"name": FEATURE, "clients": 2, **none, "brightness": 0.5}
    turned = {"name": FEATURE, "clients": 3, **none, "rotation": 20.0}
    p = mix(LABELS, 0, outer=light, inner=turned)
    assert set(p.features) == {"brightness", "rotation"}
    assert len(set(p.features["brightness"])) == 2
    assert len(set(p.features["rotation"])) == 6
    with pytest.raises(ConfigError, match=r"both set the clients' 'brightness'.*inner.*set brightness = 0"):
        mix(LABELS, 0, outer=light, inner=light)


@pytest.mark.parametrize("small", ["stop", "whole", "drop"])
def test_a_part_that_is_too_small(small: str) -> None:
    settings: dict[str, Any] = {
        "outer": BY_CITY,
        "inner": {"name": FEATURE, "clients": 9, "blur": 0.0},
        "small": small,
    }
    if small == "stop":
        with pytest.raises(ConfigError) as found:
            mix(TABLE, 0, **settings)
        assert str(found.value) == (
            "'Zug', with 5 examples, cannot be partitioned: 9 clients are more than the 5 examples (inner.clients); "
            "set clients to at most 5; or small = 'whole' leaves such a client whole, 'drop' leaves "
            "it out."
        )
        return
    p = mix(TABLE, 0, **settings)
    rest = ["Zug"] if small == "whole" else []
    assert p.ids == tuple([f"{city}/{j}" for city in ("Bern", "Ulm") for j in range(9)] + rest)
    if small == "whole":
        assert p[18].tolist() == np.flatnonzero(CITIES == "Zug").tolist()
        assert {name: values[18] for name, values in p.features.items()} == {
            "brightness": 1.0,
            "contrast": 1.0,
            "rotation": 0.0,
            "noise": 0.0,
        }
    else:
        assert len(p.indices) == 126


def test_the_error_counts_the_other_parts_that_are_too_small() -> None:
    with pytest.raises(ConfigError, match=r"'Ulm' \(and 1 others\), with 48 examples"):
        mix(TABLE, 0, outer=BY_CITY, inner={"name": "iid", "clients": 60})


def test_a_whole_part_keeps_its_place_among_the_others() -> None:
    cities = np.where(CITIES == "Zug", "Chur", CITIES)
    table = Table.of(LABELS, {"city": cities})
    p = mix(table, 0, outer=BY_CITY, inner={"name": "iid", "clients": 9}, small="whole")
    assert p.ids[8:11] == ("Bern/8", "Chur", "Ulm/0")
    assert set(cities[p[9]]) == {"Chur"}
    assert set(cities[p[10]]) == {"Ulm"}


def test_a_part_that_is_dropped_takes_its_features_along() -> None:
    cities = np.where(CITIES == "Zug", "Chur", CITIES)
    table = Table.of(LABELS, {"city": cities})
    p = mix(table, 0, outer=own("by_light"), inner={"name": "iid", "clients": 9}, small="drop")
    assert p.features["brightness"].tolist() == [0.5] * 9 + [0.7] * 9


def test_the_record_is_as_json_gives_it_back() -> None:
    lda = {"name": f"{HERE}.lda_multilabel:lda_multilabel", "clients": 2, "alpha": 1.0, "ignore": [1]}
    p = mix(LABELS, 0, outer={"name": "iid", "clients": 2}, inner=lda)
    assert p.spec["inner"]["ignore"] == [1]
    assert json.loads(json.dumps(p.spec)) == p.spec


@pytest.mark.parametrize("small", ["stop", "whole", "drop"])
def test_an_inner_partition_that_takes_no_part_is_an_error_as_it_stands(small: Any) -> None:
    with pytest.raises(ConfigError) as found:
        mix(LABELS, 0, outer={"name": "iid", "clients": 3}, inner={"name": "iid", "clients": 70}, small=small)
    assert str(found.value) == (
        "70 clients are more than the 44 examples (inner.clients); set clients to at most 44."
    )


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            {"inner": {"name": "dirichlt"}},
            r"unknown partition 'dirichlt' \(inner.name\); did you mean 'dirichlet'",
        ),
        ({"outer": "dirichlt"}, r"\(outer.name\)"),
        ({"inner": {"clients": 3}}, r"has no 'name'.*\(inner.name\); write inner ="),
        ({"inner": {"name": 3}}, r"\(inner.name\)"),
        (
            {"inner": {"name": "shards", "shceme": 1}},
            r"'shards' has no setting 'shceme' \(inner.shceme\); did you mean 'scheme'",
        ),
        (
            {"inner": {"name": "iid", "clinets": 1}},
            r"has no setting 'clinets' \(inner.clinets\); did you mean 'clients'",
        ),
        (
            {"inner": "iid"},
            r"'clients' is missing \(inner.clients\); write inner = {name = \"iid\", clients = ",
        ),
        ({"inner": {"name": "dirichlet", "clients": 2, "alpha": -1}}, r"\(inner.alpha\)"),
        (
            {"outer": {"name": "iid", "clients": True}},
            r"'clients' is true, but must be a number \(outer.cl",
        ),
        ({"outer": {"name": "iid", "clients": 132}}, r"132 clients are more than.*\(outer.clients\)"),
        ({"outer": own("nothing")}, r"made no client \(outer.name\)"),
        ({"inner": own("a_list")}, r"returned a list; it must return a Partition \(inner.name\)"),
        ({"inner": own("with_warmth")}, r"some clients have a 'warmth' and others do not.*\(inner\)"),
        ({"inner": {"name": MIX, "outer": "iid", "inner": "iid"}}, r"\(inner.outer.clients\)"),
        ({"small": "keep"}, r"'small' is 'keep'.*\(small\)"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(settings: dict[str, Any], what: str) -> None:
    usual: dict[str, Any] = {"outer": BY_CITY, "inner": {"name": "iid", "clients": 2}}
    with pytest.raises(ConfigError, match=what):
        mix(TABLE, 0, **{**usual, **settings})


def test_two_clients_of_one_name_are_an_error() -> None:
    table = Table.of(np.zeros(41, int), {"city": np.array(["a"] * 40 + ["a/0"])})
    with pytest.raises(ConfigError, match=r"two clients would have the name 'a/0' \(outer\)"):
        mix(table, 0, outer=BY_CITY, inner={"name": "iid", "clients": 2}, small="whole")


def test_the_settings_of_a_run_are_filled_in_and_name_files_from_the_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Path(__file__)
    monkeypatch.chdir(here.parent)
    given = {
        "outer": f"{here.name}:by_city",
        "inner": {"name": f"{HERE}.from_file:from_file", "path": "p.npz"},
    }
    read = read_settings(mix, given, "data.partition")
    assert read == {
        "outer": {"name": f"{here}:by_city"},
        "inner": {"name": f"{HERE}.from_file:from_file", "path": f"{here.parent}/p.npz"},
        "small": "stop",
    }
    read = read_settings(
        mix, {"outer": "shards", "inner": {"name": "shards", "clients": 2}}, "data.partition"
    )
    assert read["outer"] == "shards"  # that it lacks its clients is said later, with the key
    assert read["inner"] == {"name": "shards", "clients": 2, "classes_per_client": 2, "scheme": "distinct"}
    assert "scheme" in tomli_w.dumps(read)


def test_positions_of_a_table_that_lacks_rows_are_those_of_its_rows() -> None:
    """As where examples are held out: a partition counts in the rows of the table that it is given."""
    rows = np.flatnonzero(np.arange(131) % 3)
    outer, inner = {"name": "shards", "clients": 2}, {"name": "iid", "clients": 2}
    p = mix(TABLE.take(rows), 0, outer=outer, inner=inner)
    q = mix(LABELS[rows], 0, outer=outer, inner=inner)
    assert p.indices.tolist() == q.indices.tolist()
    assert p.indices.max() < len(rows)
