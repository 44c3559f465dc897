"""Published lists and the partitions that they are; the real CIFAR-10 lists are in tests/real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.datasets.federated_csv import (
    BLOCKS,
    check_apart,
    federated_csv,
    in_order,
    read_list,
    read_rows,
)
from fedlens.data.table import Table


@pytest.fixture
def write(tmp_path: Path):
    def put(text: str, name: str = "list.csv", encoding: str = "utf-8") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return put


def test_a_list_is_read_in_its_order_whatever_the_order_of_its_columns(write) -> None:
    found = read_list(write('class,image_id,user_id,label\n3,b,"Doe, J.",Ursus\n0,a,7,Felis\n'))
    assert found.images.tolist() == ["b", "a"]
    assert found.classes.tolist() == [3, 0]
    assert found.classes.dtype == np.int64
    assert found.users is not None
    assert found.users.tolist() == ["Doe, J.", "7"]
    assert found.labels is not None
    assert found.labels.tolist() == ["Ursus", "Felis"]
    assert found.lines.tolist() == [2, 3]


def test_a_test_list_has_no_users(write) -> None:
    found = read_list(write("image_id,class\na,1\n"), None)
    assert (found.users, found.labels, len(found)) == (None, None, 1)


def test_a_byte_order_mark_windows_lines_and_blank_lines_are_no_matter(write) -> None:
    found = read_list(write("\ufeffuser_id,image_id,class\r\n1,a,0\r\n\r\n2,b,1\r\n"))
    assert found.images.tolist() == ["a", "b"]
    assert found.lines.tolist() == [2, 4]


def test_rows_that_a_split_leaves_out_are_left_out(write) -> None:
    path = write("image_id,user_120k,geo_1k,class\na,5,NA,0\nb,6,89c,1\nc,5,NA,1\n")
    assert read_list(path, "user_120k").images.tolist() == ["a", "b", "c"]
    geo = read_list(path, "geo_1k")
    assert (geo.images.tolist(), geo.classes.tolist(), geo.lines.tolist()) == (["b"], [1], [3])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("user_id,image_id,class\n", "no rows"),
        ("user,image_id,class\n1,a,0\n", r"no column 'user_id'.*line 1\); did you mean 'user'"),
        ("user_id,image_id,class\n1,a\n", r"2 cells, and the header 3 .*line 2"),
        ("user_id,image_id,class\n1,a,0\n1,b,0,9\n", r"4 cells, and the header 3 .*line 3"),
        ("user_id,image_id,class\n1,a,0\n,b,0\n", r"'user_id' is empty .*line 3"),
        ("user_id,image_id,class\n1,a,0\n1,,0\n", r"'image_id' is empty .*line 3"),
        ("user_id,image_id,class\n1,a,0\n1,b,-1\n", r"'class' is '-1', but must be a whole number.*line 3"),
        ("user_id,image_id,class\n1,a,1.5\n", r"'class' is '1\.5'.*line 2"),
        ("user_id,image_id,class\n1,a,99999999999999999999\n", r"'class' is '9+'"),
        ("user_id,image_id,class\n1,a,0\n2,b,0\n3,a,0\n", "'a' is listed in lines 2 and 4"),
        ("user_id,image_id,class\nNA,a,0\n", "every row has the user 'NA'"),
        ('user_id,image_id,class\n"1,a,0\n', "not valid CSV"),
        ("user_id;image_id;class\n1;a;0\n", "no column 'image_id'"),
    ],
)
def test_a_fault_is_told_with_its_line(write, text: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as raised:
        read_list(write(text))
    assert "list.csv" in str(raised.value)


def test_another_encoding_and_a_missing_file_are_told(write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not in UTF-8"):
        read_list(write("user_id,image_id,class\nMüller,a,0\n", encoding="latin-1"))
    with pytest.raises(DataError, match="cannot be read"):
        read_list(tmp_path / "none.csv")


def test_only_the_columns_that_are_asked_for_come_in_that_order(write) -> None:
    assert list(read_rows(write("a,b,c\n1,2,3\n"), ["c", "a"])) == [(2, ("3", "1"))]
    assert list(read_rows(write("a,b,c\n1,2,3\n"), ["b"])) == [(2, ("2",))]


def test_lists_that_share_images_are_a_leak(write) -> None:
    train = read_list(write("user_id,image_id,class\n1,a,0\n1,b,0\n1,c,0\n", "train.csv"))
    check_apart(train, read_list(write("image_id,class\nd,0\n", "test.csv"), None))
    with pytest.raises(DataError, match="2 images are in both lists, 'b' is the first"):
        check_apart(train, read_list(write("image_id,class\nc,0\nd,0\nb,0\n", "test.csv"), None))


def test_clients_come_by_number_where_all_are_numbers_and_else_by_text() -> None:
    ids, which = in_order(np.array(["10", "9", "100", "9"]))
    assert (ids, which.tolist()) == (("9", "10", "100"), [1, 0, 2, 0])
    ids, which = in_order(np.array(["b", "10", "9"]))
    assert (ids, which.tolist()) == (("10", "9", "b"), [2, 0, 1])


def test_a_list_is_a_partition_by_position(write) -> None:
    path = write("user_id,image_id,class\n10,3,1\n9,0,0\n10,1,1\n")
    found = federated_csv([0, 1, 0, 1, 0], 7, path=str(path))
    assert found.ids == ("9", "10")
    assert [row.tolist() for row in found] == [[0], [1, 3]]
    assert found.spec == {"name": "federated-csv", "path": str(path), "id_order": "as-is", "seed": 7}
    assert federated_csv([0, 1, 0, 1, 0], 8, path=str(path)).digest == found.digest


def test_a_list_is_a_partition_by_the_ids_of_the_images(write) -> None:
    path = write("user_id,image_id,class\nu,c,1\nv,a,0\nu,z,2\n")
    table = Table.of([0, 2, 1, 0], {"image_id": ["a", "z", "c", "m"]})
    found = federated_csv(table, 0, path=str(path))
    assert found.ids == ("u", "v")
    assert [row.tolist() for row in found] == [[1, 2], [0]]


@pytest.mark.parametrize("column", [True, False])
def test_images_that_are_held_out_go_and_a_client_without_any_goes_too(write, column: bool) -> None:
    path = write("user_id,image_id,class\nu,0,0\nv,1,1\nw,2,0\nu,3,1\n")
    columns = {"image_id": ["0", "1", "2", "3"]} if column else {}
    table = Table.of([0, 1, 0, 1], columns).take(np.array([3, 2]))  # rows 0 and 1 are 3 and 2
    found = federated_csv(table, 0, path=str(path))
    assert found.ids == ("u", "w")
    assert [row.tolist() for row in found] == [[0], [1]]
    with pytest.raises(DataError, match="none of the images"):
        federated_csv(table, 0, path=str(write("user_id,image_id,class\nu,0,0\n", "other.csv")))


@pytest.mark.parametrize(
    ("rows", "columns", "told"),
    [
        ("u,5,0\nu,0,0\n", {}, "no image '5', nor 0 others.*line 2"),
        ("u,x,0\n", {}, "'image_id' is 'x'"),
        ("u,b,0\nu,y,0\nu,q,0\n", {"image_id": ["a", "b", "c"]}, "no image 'y', nor 1 others.*line 3"),
        (
            "u,0,0\nu,1,0\nu,2,2\n",
            {},
            "1 of 3 images have another class.*'1' is 0 in the list.*dataset 1",
        ),
    ],
)
def test_a_list_of_another_dataset_is_refused(write, rows: str, columns, told: str) -> None:
    path = write(f"user_id,image_id,class\n{rows}")
    with pytest.raises(DataError, match=told):
        federated_csv(Table.of([0, 1, 2], columns), 0, path=str(path))


def test_images_that_the_dataset_lacks_are_told_apart_from_those_held_out_by_their_number(write) -> None:
    whole = Table.of([0, 1, 0, 1], {"image_id": ["a", "b", "c", "d"]})
    rest = whole.take(np.array([0, 1, 2]))  # d is held out
    path = write("user_id,image_id,class\nu,a,0\nu,x,0\nv,y,0\n", "two.csv")
    with pytest.raises(DataError, match=r"no image 'x', nor 1 others of the list \(.*line 3"):
        federated_csv(whole, 0, path=str(path))
    with pytest.raises(
        DataError, match=r"lacks at least 1 images of the list: 2 are not found, 'x' .*line 3"
    ):
        federated_csv(rest, 0, path=str(path))
    with pytest.raises(DataError, match=r"at least 2 images of the list: 3 are not found.* 1 are held out"):
        federated_csv(rest, 0, path=str(write("user_id,image_id,class\nu,a,0\nu,x,0\nv,d,1\nv,y,0\n")))
    # As many as are held out: nobody can say.
    one = write("user_id,image_id,class\nu,a,0\nv,b,1\nv,x,0\n")
    assert federated_csv(rest, 0, path=str(one)).sizes().tolist() == [1, 1]
    with pytest.raises(DataError, match="no image 'x', nor 0 others"):
        federated_csv(whole, 0, path=str(one))


def test_a_position_that_the_dataset_lacks_is_told_whatever_is_held_out(write) -> None:
    path = write("user_id,image_id,class\nu,0,0\nv,4,0\n")
    for rows in ([0, 1, 2, 3], [0, 1], [0]):
        with pytest.raises(DataError, match=r"no image '4', nor 0 others.*line 3"):
            federated_csv(Table.of([0, 1, 0, 1]).take(np.array(rows)), 0, path=str(path))


def test_classes_are_not_compared_where_an_example_has_several(write) -> None:
    path = write("user_id,image_id,class\nu,0,9\nv,1,9\n")
    found = federated_csv(Table.of_sets([[0, 1], [2]]), 0, path=str(path))
    assert found.ids == ("u", "v")


def cifar_list(order: np.ndarray, labels: np.ndarray) -> str:
    """A list of 100 users as it was published: image k of the list is example order[k]."""
    rows = [f"{k % 100},{k},{labels[example]}" for k, example in enumerate(order)]
    return "\n".join(["user_id,image_id,class", *rows]) + "\n"


def test_the_blocks_of_cifar10_are_put_in_order(write) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 50_000)
    # By hand: images 0 to 9,999 of the list are data_batch 2, the next data_batch 4, then 3, 1 and 5.
    batch = np.concatenate([np.arange(10_000) + 10_000 * (number - 1) for number in (2, 4, 3, 1, 5)])
    assert BLOCKS == (1, 3, 2, 0, 4)
    path = write(cifar_list(batch, labels))
    found = federated_csv(labels, 0, path=str(path), id_order="cifar10-blocks")
    assert (len(found), set(found.sizes().tolist())) == (100, {500})
    owner = np.empty(50_000, np.int64)
    owner[found.indices] = found.owners()
    assert owner[batch].tolist() == [k % 100 for k in range(50_000)]
    with pytest.raises(DataError, match="use the other id_order"):
        federated_csv(labels, 0, path=str(path))
    with pytest.raises(DataError, match="has 3 images, and CIFAR-10's 50000"):
        federated_csv(np.array([0, 1, 2]), 0, path=str(path), id_order="cifar10-blocks")


def test_the_settings_are_those_of_a_partition() -> None:
    settings = read_settings(federated_csv, {"path": "/lists/a.csv"}, "data.partition")
    assert settings == {"path": "/lists/a.csv", "id_order": "as-is"}
    with pytest.raises(ConfigError, match=r"data\.partition\.path"):
        read_settings(federated_csv, {"path": ""}, "data.partition")


def test_a_run_in_another_folder_finds_the_list(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are what a run writes into its config.toml."""
    path = write("user_id,image_id,class\nu,0,0\nv,1,1\n")
    monkeypatch.chdir(tmp_path)
    settings = read_settings(federated_csv, {"path": path.name}, "data.partition")
    assert settings["path"] == str(path.resolve())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert federated_csv([0, 1], 0, **settings).ids == ("u", "v")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=40), st.randoms())
def test_every_image_of_a_list_has_the_client_it_is_listed_for(tmp_path_factory, rows, random) -> None:
    """Any list, in any order: disjoint, complete, and each image with its own user."""
    listed = list(enumerate(rows))
    random.shuffle(listed)
    path = tmp_path_factory.getbasetemp() / "drawn.csv"
    lines = [f"{user},{image},{kind}" for image, (user, kind) in listed]
    path.write_text("\n".join(["user_id,image_id,class", *lines]))
    found = federated_csv([kind for _, kind in rows], 0, path=str(path))
    owner = dict(zip(found.indices.tolist(), (found.ids[k] for k in found.owners()), strict=True))
    assert owner == {image: str(user) for image, (user, _) in enumerate(rows)}
    assert (found.sizes() > 0).all()
