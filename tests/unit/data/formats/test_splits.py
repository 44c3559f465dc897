import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.splits import check_splits, draw_test, split_named


def test_the_usual_names_of_splits() -> None:
    assert [split_named(name) for name in (" Train", "TESTING", "val", "valid", "Validation", "dev", "")] == [
        "train",
        "test",
        *["validation"] * 3,
        None,
        None,
    ]


def test_every_class_and_every_client_gives_its_share() -> None:
    labels = np.repeat([0, 1, 2], [100, 60, 40])
    clients = np.tile(["a", "b"], 100)
    taken = draw_test(labels, clients, 200, 0.2, seed=3)
    assert np.bincount(labels[taken]).tolist() == [20, 12, 8]
    for label in range(3):
        for client in "ab":
            cell = (labels == label) & (clients == client)
            assert taken[cell].sum() == cell.sum() // 5


def test_the_draw_depends_on_the_seed_alone() -> None:
    first = draw_test([0] * 50, None, 50, 0.3, seed=1)
    assert first.sum() == 15
    np.testing.assert_array_equal(first, draw_test([0] * 50, None, 50, 0.3, seed=1))
    assert (first != draw_test([0] * 50, None, 50, 0.3, seed=2)).any()
    # As it is on every machine: the streams are frozen.
    assert np.flatnonzero(draw_test(None, None, 12, 0.25, seed=0)).tolist() == [4, 7, 11]


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_each_class_keeps_one_to_train_on_and_gives_its_share_to_within_one(
    labels: list[int], share: float, seed: int
) -> None:
    taken = draw_test(labels, None, len(labels), share, seed)
    array = np.array(labels)
    for label in set(labels):
        count, out = (array == label).sum(), taken[array == label].sum()
        assert out < count
        assert abs(out - share * count) <= 1 or out in (0, count - 1)
    assert taken.any() or len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("splits", "what"),
    [
        (["train", "test"], None),
        (["train", "validation"], None),
        (["test", "validation"], "no example is in the split 'train'"),
        (["train", "train"], "every example is in the split 'train', and none in 'test'"),
    ],
)
def test_splits_without_examples_are_found(splits: list[str], what: str | None) -> None:
    findings = Findings()
    check_splits(splits, "here", findings)
    assert [finding.what for finding in findings] == ([what] if what else [])
    assert not any(finding.example for finding in findings)
