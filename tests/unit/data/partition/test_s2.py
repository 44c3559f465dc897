"""`s2` against a recursion over one cell after another, with s2cell's own parents."""

import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.partition.s2 import cell_borders, leaf_cells, s2, split, token
from fedlens.data.table import Table

s2cell = pytest.importorskip("s2cell")
CENTRES = [(0, 0), (0, 90), (90, 0), (0, 180), (0, -90), (-90, 0)]  # of the faces 0 to 5


def table(places: Any, **more: Any) -> Table:
    lat, lon = (np.array(values) for values in zip(*places, strict=True))
    return Table.of(np.zeros(len(lat), int), {"lat": lat, "lon": lon}, **more)


def clustered(n: int, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    centres = np.stack([rng.uniform(-70, 80, 12), rng.uniform(-180, 180, 12)], axis=1)
    places = centres[rng.geometric(0.25, n) % 12] + rng.normal(0, rng.choice([0.001, 0.3, 4], (n, 1)), (n, 2))
    places[rng.random(n) < 0.1] = [48.137, 11.575]  # the same place again and again
    return table(np.stack([places[:, 0].clip(-90, 90), (places[:, 1] + 180) % 360 - 180], axis=1))


def recursive(leaves: list[int], n_max: int) -> list[int]:
    """The cell of each leaf: a cell with too many hands its leaves to the children that s2cell says they have."""
    found = {}

    def visit(cell: int, level: int, members: list[int]) -> None:
        if len(members) <= n_max or level == 30:
            found.update(dict.fromkeys(members, cell))
            return
        children: dict[int, list[int]] = {}
        for i in members:
            child = s2cell.cell_id_to_parent_cell_id(leaves[i], level + 1)
            assert s2cell.cell_id_to_parent_cell_id(child, level) == cell
            children.setdefault(child, []).append(i)
        for child, inside in children.items():
            visit(child, level + 1, inside)

    faces: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        faces.setdefault(s2cell.cell_id_to_parent_cell_id(leaf, 0), []).append(i)
    for face, members in faces.items():
        visit(face, 0, members)
    return [found[i] for i in range(len(leaves))]


@pytest.mark.parametrize("n_max", [1, 3, 20, 150, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_cells_are_those_of_a_recursion(n_max: int, seed: int) -> None:
    places = clustered(700, seed)
    leaves = [
        s2cell.lat_lon_to_cell_id(*place)
        for place in zip(places.column("lat").tolist(), places.column("lon").tolist(), strict=True)
    ]
    expected = recursive(leaves, n_max)
    assert split(np.array(leaves, np.uint64), n_max).tolist() == expected
    p = s2(places, 0, n_max=n_max, n_min=2 if n_max > 1 else 1)
    held = {name: row.tolist() for name, row in zip(p.ids, p, strict=True)}
    kept = {c: k for c, k in sorted(Counter(expected).items()) if k >= p.spec["n_min"]}
    assert list(held) == [s2cell.cell_id_to_token(cell) for cell in kept]
    for cell, row in zip(kept, held.values(), strict=True):
        assert row == [i for i, own in enumerate(expected) if own == cell]


def test_the_six_faces_are_where_it_starts() -> None:
    p = s2(table(CENTRES * 3), 0, n_max=3)
    assert p.ids == ("1", "3", "5", "7", "9", "b")
    assert [row.tolist() for row in p] == [[i, i + 6, i + 12] for i in range(6)]


@pytest.mark.parametrize("name", ["b", "0c", "479", "89c25", "1b1c4", "54ab", "7ffc4"])
def test_borders_part_the_places_of_a_cell_from_those_of_its_neighbours(name: str) -> None:
    x, y = cell_borders([name])
    assert y[-1] is None
    level, middle = s2cell.token_to_level(name), on_sphere(*s2cell.token_to_lat_lon(name))
    for share, inside in ((0.99, True), (1.01, False)):
        for lon, lat in zip(x[:-1:5], y[:-1:5], strict=True):
            east, north, up = (1 - share) * middle + share * on_sphere(lat, lon)
            place = (
                math.degrees(math.atan2(up, math.hypot(east, north))),
                math.degrees(math.atan2(north, east)),
            )
            cell = s2cell.cell_id_to_parent_cell_id(s2cell.lat_lon_to_cell_id(*place), level)
            assert (s2cell.cell_id_to_token(cell) == name) == inside


def on_sphere(lat: float, lon: float) -> np.ndarray:
    lat, lon = math.radians(lat), math.radians(lon)
    return np.array([math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat)])


def test_borders_have_a_gap_at_the_date_line() -> None:
    x, y = cell_borders(["7"])  # the face around longitude 180
    drawn = [abs(x[k + 1] - x[k]) for k in range(len(x) - 1) if y[k] is not None and y[k + 1] is not None]
    assert max(drawn) < 180 < max(x) - min(x)


def test_a_split_worked_out_by_hand() -> None:
    """Face 0 is -45 .. 45 degrees; its four children meet at (0, 0), and go round along the Hilbert curve."""
    quarters = [(-10, -10), (10, -10), (10, 10), (-10, 10)]
    one = s2(table([*quarters, (0.0, 100.0)]), 0, n_max=4)
    assert (one.ids, [row.tolist() for row in one]) == (("1", "3"), [[0, 1, 2, 3], [4]])
    four = s2(table([*quarters, (0.0, 100.0)]), 0, n_max=3)
    # South-west, north-west, north-east, south-east. Two bits for the child, and a 1 behind them: 000 00 1, 000 01 1.
    assert four.ids == ("04", "0c", "14", "1c", "3")
    assert [row.tolist() for row in four] == [[0], [1], [2], [3], [4]]


def test_ids_known_from_elsewhere() -> None:
    """The example of s2cell's own page; and (0, 0), where i = j = 2^29: child 2 of face 0, then always child 0."""
    known = [(-10.490091, 105.641318, "2ef59bd352b93ac3"), (0.0, 0.0, "1000000000000001")]
    for lat, lon, name in known:
        (leaf,) = leaf_cells(np.array([lat]), np.array([lon])).tolist()
        assert token(leaf) == name


def test_leaves_are_those_of_the_library_at_poles_date_line_and_edges() -> None:
    lat = np.array([90, -90, 0, 0, 45, -45, 35.264389682754654, 0, 0, 12.5, 12.5, 90, 0.0, -0.0])
    lon = np.array([0, 0, 180, -180, 45, -135, 45, 45, -45, 179.9999999, -179.9999999, 120, -0.0, 0.0])
    rng = np.random.default_rng(0)
    lat = np.concatenate([lat, rng.uniform(-90, 90, 500), lat])
    lon = np.concatenate([lon, rng.uniform(-180, 180, 500), lon])
    expected = [s2cell.lat_lon_to_cell_id(*place) for place in zip(lat.tolist(), lon.tolist(), strict=True)]
    assert leaf_cells(lat, lon).tolist() == expected


def test_the_same_coordinate_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    real = s2cell.lat_lon_to_cell_id
    monkeypatch.setattr(s2cell, "lat_lon_to_cell_id", lambda *place: asked.append(place) or real(*place))
    leaf_cells(np.array([1.0, 2.0, 1.0, 1.0, 2.0]), np.array([5.0, 5.0, 6.0, 5.0, 5.0]))
    assert sorted(asked) == [(1.0, 5.0), (1.0, 6.0), (2.0, 5.0)]


def test_a_place_with_more_than_n_max_examples_ends_at_the_leaf() -> None:
    p = s2(table([(48.137, 11.575)] * 9 + [(48.137, 11.576)]), 0, n_max=4)
    assert p.sizes().tolist() == [9, 1]
    assert s2cell.token_to_cell_id(p.ids[0]) == s2cell.lat_lon_to_cell_id(48.137, 11.575)


def test_small_cells_are_dropped_and_counted() -> None:
    places = [(0, 0)] * 7 + [(0, 90)] * 2 + [(90, 0)] + [(0, -90)] * 3 + [(0, 180)]
    p = s2(table(places), 0, n_max=300)
    assert p.spec["n_min"] == 3
    assert p.ids == ("1", "9")
    assert p.spec["dropped"] == {"cells": 3, "examples": 4}
    assert [row.tolist() for row in p] == [list(range(7)), [10, 11, 12]]
    assert [s2(table(places), 0, n_max=n).spec["n_min"] for n in (1, 100, 101, 700)] == [1, 1, 2, 7]


def test_columns_can_have_other_names_and_be_text() -> None:
    columns = {"breite": np.array(["0", " 0.0", "90"]), "länge": np.array([0, 90, 0])}
    p = s2(Table.of([0, 0, 0], columns), 0, n_max=1, lat="breite", lon="länge")
    assert p.ids == ("1", "3", "5")
    with pytest.raises(ConfigError, match="no column 'lat'") as raised:
        s2(Table.of([0, 0, 0], columns), 0, n_max=1)
    assert raised.value.where == "lat"
    with pytest.raises(ConfigError, match=r"no column 'laenge'.*'länge'") as raised:
        s2(Table.of([0, 0, 0], columns), 0, n_max=1, lat="breite", lon="laenge")
    assert raised.value.where == "lon"


BAD = [
    ([0.0, 90.1, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], "1 outside the sphere", 1, "90.1, 0.0"),
    ([0.0, 0.0, 0.0, -91.0], [0.0, 0.0, -180.5, 7.0], "2 outside the sphere", 2, "0.0, -180.5"),
    ([math.nan, 0.0, 0.0, 0.0], [0.0, math.nan, 0.0, 0.0], "2 missing", 0, "nan, 0.0"),
    ([0.0, 0.0, math.inf, 0.0], [0.0, 0.0, 0.0, 0.0], "1 outside the sphere", 2, "inf, 0.0"),
    (
        ["1", "", "north", "99"],
        [0, 0, 0, 0],
        "1 missing and 1 not numbers and 1 outside the sphere",
        1,
        ", 0",
    ),
    (np.array([1, 2, None, 3], object), [0, 0, 0, 0], "1 missing", 2, "None, 0"),
]


@pytest.mark.parametrize(("lat", "lon", "what", "first", "pair"), BAD)
def test_coordinates_that_are_none_are_counted_and_the_first_named(
    lat: Any, lon: Any, what: str, first: int, pair: str
) -> None:
    columns = {"lat": np.array(lat), "lon": np.array(lon)}
    whole = Table.of(np.zeros(4, int), columns, dataset="mine")
    with pytest.raises(DataError) as error:
        s2(whole, 0, n_max=2)
    assert f"({what})" in str(error.value)
    assert f"the first is example {first} with 'lat', 'lon' = {pair} (mine)" in str(error.value)
    assert "missing = 'skip'" in str(error.value)
    bad = sum(int(word) for word in what.split() if word.isdigit())
    p = s2(whole, 0, n_max=4, missing="skip")
    assert p.spec["skipped"] == bad
    assert p.sizes().sum() == 4 - bad
    assert first not in p.indices


def test_an_example_is_named_by_its_place_in_the_training_split() -> None:
    part = table([(0.0, 0.0), (1.0, 1.0), (95.0, 2.0), (3.0, 3.0)]).take(np.array([3, 2]))
    with pytest.raises(DataError, match=r"the first is example 2 with 'lat', 'lon' = 95\.0, 2\.0"):
        s2(part, 0, n_max=5)


def test_where_no_place_is_left_skipping_is_no_way_out() -> None:
    for missing in ("stop", "skip"):
        with pytest.raises(DataError) as error:
            s2(table([(math.nan, 0.0)] * 2), 0, n_max=2, missing=missing)
        assert "2 of 2 examples" in str(error.value)
        assert "skip" not in str(error.value)
    with pytest.raises(DataError, match="there are no examples"):
        s2(table([(0.0, 0.0)]).take(np.array([], int)), 0, n_max=1)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"n_max": 5, "n_min": 6}, "n_min is 6, but cells have at most n_max = 5"),
        ({"n_max": 0}, "'n_max' is 0"),
        ({"n_max": 5, "n_min": 0}, "'n_min' is 0"),
        ({"n_max": 5, "missing": "drop"}, "'missing' is 'drop', but must be 'stop' or 'skip'"),
        ({"n_max": 50, "n_min": 9}, "none of the 1 cells has 9 examples or more.*n_min of at most 8"),
    ],
)
def test_what_cannot_be_done_is_an_error(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        s2(table([(0.0, 0.0)] * 8), 0, **settings)


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s2cell", None)
    with pytest.raises(ConfigError, match=r"needs the library s2cell.*pip install 'fedlens\[geo\]'"):
        s2(table([(0.0, 0.0)]), 0, n_max=1)


def test_the_recipe_is_in_the_spec_and_the_partition_pinned() -> None:
    rng = np.random.default_rng(0)
    p = s2(table(np.round(rng.uniform([-80, -180], [80, 180], (500, 2)), 3)), 3, n_max=40, n_min=5)
    expected = {
        "name": "s2",
        "n_max": 40,
        "n_min": 5,
        "lat": "lat",
        "lon": "lon",
        "missing": "stop",
        "seed": 3,
    }
    assert {name: p.spec[name] for name in expected} == expected
    assert (p.spec["skipped"], p.spec["dropped"]["examples"]) == (0, 500 - len(p.indices))
    assert p.digest[:16] == "2a137da93129a3ce"


def test_settings_are_checked_by_name() -> None:
    assert read_settings(s2, {"n_max": 3000}, "p")["n_min"] is None
    for wrong in ({"n_max": 0}, {"n_min": 0}, {"missing": "drop"}, {"lat": 3}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(s2, {"n_max": 10, **wrong}, "data.partition")
