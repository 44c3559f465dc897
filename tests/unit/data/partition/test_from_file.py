from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import FederationInfo
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.digits import digits
from fedlens.data.federated import federate
from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.feature import feature
from fedlens.data.partition.from_file import from_file
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table


@pytest.fixture(scope="module")
def whole() -> Dataset:
    return digits(Path(), False, 0)


def in_order(*parts: list[int], **more: object) -> Partition:
    """A partition with these examples, in this order."""
    offsets = np.cumsum([0, *map(len, parts)])
    indices = np.array([i for part in parts for i in part], np.int64)
    return Partition(tuple("abcdef"[: len(parts)]), indices, offsets, **more)  # type: ignore[arg-type]


def saved(partition: Partition, folder: Path) -> str:
    partition.save(folder / "p.npz")
    return str(folder / "p.npz")


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_a_run_with_the_file_has_the_digest_of_the_file(
    whole: Dataset, validation: float, tmp_path: Path
) -> None:
    """Also where the file was made with a share held out: then it is used without holding out again."""
    _, made = federate(whole, lambda table: dirichlet(table, 3, clients=10, alpha=0.3), validation)
    path = saved(made, tmp_path)
    data, used = federate(whole, lambda table: from_file(table, 99, path=path))
    assert used.digest == made.digest
    assert used.spec == {"name": "file", "digest": made.digest, "of": dict(made.spec)}
    assert data.client_indices(4).tolist() == made[4].tolist()
    assert used.census is not None
    assert made.census is not None
    np.testing.assert_array_equal(used.census.dense(), made.census.dense())


def test_features_ids_and_the_order_of_examples_are_kept(tmp_path: Path) -> None:
    p = in_order([4, 0], [], [3, 1, 2], spec={"name": "mine"}, features={"noise": np.array([0.1, 0.2, 0.3])})
    q = from_file(np.arange(5) % 2, 0, path=saved(p, tmp_path))
    assert q.digest == p.digest
    assert q.ids == ("a", "b", "c")
    assert [row.tolist() for row in q] == [[4, 0], [], [3, 1, 2]]
    assert q.features["noise"].tolist() == [0.1, 0.2, 0.3]
    features = feature(np.zeros(30, int), 0, clients=3)
    assert from_file(np.zeros(30, int), 0, path=saved(features, tmp_path)).digest == features.digest


def test_examples_that_are_held_out_are_dropped_and_clients_may_be_left_with_none(tmp_path: Path) -> None:
    path = saved(in_order([6, 1], [3, 5], [7, 2, 0]), tmp_path)
    table = Table.of(np.arange(8)).take(np.array([0, 1, 2, 4, 6, 7]))
    p = from_file(table, 0, path=path)
    assert [table.where()[row].tolist() for row in p] == [[6, 1], [], [7, 2, 0]]
    assert [row.tolist() for row in p] == [[4, 1], [], [5, 2, 0]]
    assert FederationInfo(p.sizes(), 8, (1, 1, 1)).eligible.tolist() == [0, 2]


def test_holding_out_in_a_run_leaves_everybody_what_is_not_held_out(whole: Dataset, tmp_path: Path) -> None:
    _, made = federate(whole, lambda table: dirichlet(table, 3, clients=10, alpha=0.3))
    path = saved(made, tmp_path)
    data, used = federate(whole, lambda table: from_file(table, 0, path=path), 0.25, seed=5)
    assert data.held_out is not None
    out = set(data.held_out.tolist())
    assert [row.tolist() for row in used] == [[i for i in row.tolist() if i not in out] for row in made]
    assert used.digest != made.digest
    assert used.spec["digest"] == made.digest
    # Each client holding out of its own is another matter: then nothing is missing when the file is read.
    data, used = federate(whole, lambda table: from_file(table, 0, path=path), 0.25, seed=5, scope="client")
    assert data.held_out is not None
    assert sorted([*used.indices.tolist(), *data.held_out.tolist()]) == sorted(made.indices.tolist())


def test_a_file_of_other_data_is_an_error(tmp_path: Path) -> None:
    table = Table.of([0, 0, 1, 1], dataset="toys", classes=("cat", "dog"))
    made = replace(in_order([0, 2], [1, 3]), dataset="toys").counted(table)
    path = saved(made, tmp_path)
    assert from_file(table, 0, path=path).digest == made.digest
    with pytest.raises(DataError, match=r"from 'toys', but the dataset is 'digits' \(.*p.npz\)"):
        from_file(replace(table, dataset="digits"), 0, path=path)
    with pytest.raises(DataError, match=r"contains example 3, but the dataset has 3"):
        from_file(Table.of([0, 1, 1], dataset="toys", classes=("cat", "dog")), 0, path=path)
    with pytest.raises(DataError, match=r"'dog' is now 'fox'"):
        from_file(replace(table, classes=("cat", "fox")), 0, path=path)
    with pytest.raises(DataError, match=r"there were 2, and there are 3"):
        from_file(replace(table, classes=("cat", "dog", "fox")), 0, path=path)
    with pytest.raises(DataError, match=r"the training examples differ from those that.*seeds\.data"):
        from_file(replace(table, marks=table.marks[[0, 2, 1, 3]]), 0, path=path)
    # Also where a share was held out, and where only a column tells.
    with pytest.raises(DataError, match="the training examples differ from those"):
        from_file(replace(table, marks=table.marks[[0, 2, 1, 3]]).take(np.array([0, 3])), 0, path=path)
    with pytest.raises(DataError, match="the training examples differ from those"):
        from_file(replace(table, columns={"client": np.array(list("abab"))}), 0, path=path)
    assert from_file(table.take(np.array([0, 3])), 0, path=path).sizes().tolist() == [1, 1]


def test_where_names_are_not_known_they_are_not_compared(tmp_path: Path) -> None:
    table = Table.of([0, 0, 1, 1], dataset="toys", classes=("cat", "dog"))
    path = saved(replace(in_order([0, 2], [1, 3]), dataset="toys").counted(table), tmp_path)
    assert from_file([0, 0, 1, 1], 0, path=path)[1].tolist() == [1, 3]  # type: ignore[arg-type]
    path = saved(in_order([0, 2], [1, 3]), tmp_path)
    assert from_file(table, 0, path=path)[1].tolist() == [1, 3]


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = saved(in_order([6], [3]), tmp_path)
    with pytest.raises(DataError, match="no example of the partition is left"):
        from_file(Table.of(np.zeros(8, int)).take(np.array([0, 1, 2])), 0, path=path)


def test_a_missing_or_damaged_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the partition file does not exist \(.*p.npz\)"):
        from_file(np.zeros(3, int), 0, path=str(tmp_path / "p.npz"))
    (tmp_path / "p.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"not a readable partition file"):
        from_file(np.zeros(3, int), 0, path=str(tmp_path / "p.npz"))


def test_the_path_in_the_settings_is_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = read_settings(from_file, {"path": "parts/p.npz"}, "data.partition")
    assert read == {"path": str(tmp_path.resolve() / "parts" / "p.npz")}


def test_a_json_of_ids_by_client_is_read(tmp_path: Path) -> None:
    file = tmp_path / "flower.json"
    file.write_text('{"b": [4, 0], "a": [3], "empty": []}')
    p = from_file(np.arange(5) % 2, 0, path=str(file))
    assert p.ids == ("b", "a", "empty")
    assert [row.tolist() for row in p] == [[4, 0], [3], []]
    assert p.spec["of"] == {"name": "json"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": [1, 2], "b": [2]}', "the example 2 belongs to client 'a' and to client 'b'"),
        ('{"a": [1, 1]}', "the example 1 belongs to client 'a' and to client 'a'"),
        ('{"a": [5]}', "client 'a' has the example 5, but they are 0 to 4"),
        ('{"a": [-1]}', "client 'a' has the example -1, but they are 0 to 4"),
        ('{"a": [1.0]}', "client 'a' has the example 1.0, but"),
        ('{"a": [true]}', "client 'a' has the example True, but"),
        ('{"a": [1], "a": [2]}', "client 'a' occurs 2 times"),
        ("[[1], [2]]", "it is not an object with a list for each client"),
        ('{"a": 1}', "it is not an object with a list for each client"),
        ("{", "the partition cannot be read"),
        ("{}", "no example of the partition is left"),
    ],
)
def test_a_json_of_another_shape_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "flower.json"
    file.write_text(text)
    with pytest.raises(DataError, match=re.escape(sentence)) as caught:
        from_file(np.arange(5) % 2, 0, path=str(file))
    assert caught.value.where == str(file)
    with pytest.raises(DataError, match="the partition cannot be read"):
        from_file(np.arange(5) % 2, 0, path=str(tmp_path / "none.json"))
