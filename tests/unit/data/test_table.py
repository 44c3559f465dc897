"""What a partitioner is told: by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.boxes import Boxes
from fedlens.data.table import Table


def several() -> Table:
    return Table.of_sets(
        [[0, 2], [], [1], [2]],
        classes=4,
        columns={"city": np.array(["b", "a", "a", "b"])},
        dataset="streets",
    )


def test_labels_make_a_table_and_a_table_stays_what_it_is() -> None:
    table = Table.of(np.array([1, 0, 3], np.uint8), columns={"user": ["x", "y", "x"]})
    assert (len(table), table.labels.tolist(), table.labels.dtype) == (3, [1, 0, 3], np.int64)
    assert table.classes == ("0", "1", "2", "3")
    assert table.column("user").tolist() == ["x", "y", "x"]
    assert Table.of(table) is table
    assert np.asarray(table).tolist() == [1, 0, 3]
    assert len(Table.of([])) == 0


@pytest.mark.parametrize("labels", [[[0, 1]], [0.5], [-1, 0], ["a"]])
def test_what_is_no_label_is_refused(labels: list[object]) -> None:
    with pytest.raises(DataError, match="must be integers"):
        Table.of(labels)  # type: ignore[arg-type]


def test_an_example_with_several_classes_has_no_label() -> None:
    table = several()
    assert table.marks.tolist() == [0, 2, 1, 2]
    assert table.rows.tolist() == [0, 0, 2, 3]
    with pytest.raises(ConfigError, match="the examples of 'streets' have several classes each"):
        _ = table.labels


def test_taking_rows_takes_everything_of_them() -> None:
    taken = several().take(np.array([3, 0, 1]))
    assert taken.marks.tolist() == [2, 0, 2]
    assert taken.offsets.tolist() == [0, 1, 3, 3]
    assert taken.column("city").tolist() == ["b", "b", "a"]
    assert taken.where().tolist() == [3, 0, 1]
    assert taken.total == 4
    again = taken.take(np.array([1]))
    assert (again.where().tolist(), again.total, again.marks.tolist()) == ([0], 4, [0, 2])


def test_a_column_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"streets has no column 'citty' \(column\); did you mean 'city'"):
        several().column("citty")
    with pytest.raises(ConfigError, match="take a partition by labels"):
        Table.of([0]).column("city")


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="the column 'city' has 1 values for 2 examples"):
        Table.of([0, 1], columns={"city": ["a"]})
    with pytest.raises(DataError, match="2 examples have 3 labels"):
        Table(np.array([0, 1, 1]), np.array([0, 1, 3]), ("a", "b"))


def boxes() -> Boxes:
    corners = np.array([[0, 0, 2, 2], [1, 1, 3, 4], [0, 0, 9, 9]], np.float32)
    return Boxes(corners, np.array([1, 1, 0]), np.array([0, 2, 2, 3]))


def test_boxes_of_an_image_and_of_some_images() -> None:
    assert boxes().boxes_of(0).tolist() == [[0, 0, 2, 2], [1, 1, 3, 4]]
    assert boxes().labels_of(1).tolist() == []
    taken = boxes().take(np.array([2, 0]))
    assert taken.labels.tolist() == [0, 1, 1]
    assert taken.boxes_of(0).tolist() == [[0, 0, 9, 9]]
    assert len(boxes().take(np.array([], int))) == 0


@pytest.mark.parametrize(
    ("corners", "labels", "offsets"),
    [
        (np.zeros((1, 4)), [0], [0, 1]),
        (np.zeros((2, 4), np.float32), [0], [0, 1]),
        (np.zeros((1, 4), np.float32), [0], [0, 2]),
        (np.zeros((2, 4), np.float32), [0, 0], [0, 2, 1, 2]),
    ],
)
def test_boxes_that_contradict_each_other_are_refused(
    corners: np.ndarray, labels: list[int], offsets: list[int]
) -> None:
    with pytest.raises(DataError):
        Boxes(corners, np.array(labels), np.array(offsets))


def test_the_identity_is_that_of_the_whole_split_and_of_all_that_tells_its_examples() -> None:
    table = several()
    assert table.take(np.array([1, 0])).identity == table.identity == several().identity
    assert table.take(np.array([1, 0])).take(np.array([0])).identity == table.identity
    own = replace(table, columns={"client": np.array(["b", "a", "a", "b"])})
    others = [
        replace(table, marks=np.array([0, 2, 2, 1])),
        replace(table, offsets=np.array([0, 1, 2, 3, 4])),
        replace(table, origin="other files"),
        own,
        replace(table, columns={"client": np.array(["a", "b", "a", "b"])}),
        replace(table, columns={"image_id": np.array(["a", "b", "a", "b"])}),
        replace(table, columns={"image_id": np.array([0, 1, 2, 3])}),
    ]
    assert len({table.identity, *(other.identity for other in others)}) == 8
    wide = replace(own, columns={"client": own.column("client").astype("U40"), "lat": np.zeros(4)})
    assert wide.identity == own.identity  # what only describes makes no other data
