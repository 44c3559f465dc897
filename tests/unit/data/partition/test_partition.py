import contextlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.partition.partition import Partition

LABELS = np.array([0, 0, 1, 1, 2, 2])


def small() -> Partition:
    """'a' has examples 0 and 2, 'b' has 1, 3, 4; nobody has 5."""
    return Partition.of_owners(
        [0, 1, 0, 1, 1, -1], ["a", "b"], spec={"name": "by hand", "seed": 3}, dataset="toy"
    )


def test_rows_sizes_and_owners() -> None:
    p = small()
    assert (len(p), p[0].tolist(), p[1].tolist(), p[-1].tolist()) == (2, [0, 2], [1, 3, 4], [1, 3, 4])
    assert [row.tolist() for row in p] == [[0, 2], [1, 3, 4]]
    assert p.sizes().tolist() == [2, 3]
    assert p.owners().tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(IndexError):
        p[2]


def test_a_row_is_a_view_and_nothing_can_be_changed() -> None:
    p = small()
    assert np.shares_memory(p[1], p.indices)
    with pytest.raises(ValueError, match="read-only"):
        p.indices[0] = 5


def test_class_counts_are_those_counted_by_hand() -> None:
    assert small().class_counts(LABELS).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert small().class_counts(LABELS, classes=4).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    with pytest.raises(DataError, match=r"not all in 0 .. 1"):
        small().class_counts(LABELS, classes=2)
    with pytest.raises(DataError, match="points to example 4 of 4"):
        small().class_counts(LABELS[:4])


def test_emd_is_that_of_hsu2020_by_hand() -> None:
    # p = (2, 2, 1) / 5; q_a = (1, 1, 0) / 2, q_b = (1, 1, 1) / 3.
    distances = [0.1 + 0.1 + 0.2, 2 * abs(1 / 3 - 0.4) + abs(1 / 3 - 0.2)]
    np.testing.assert_allclose(small().client_emds(LABELS), distances)
    assert small().emd(LABELS) == pytest.approx((2 * distances[0] + 3 * distances[1]) / 5)


def test_a_client_without_examples_has_no_distance_and_does_not_count() -> None:
    p = Partition.of_owners([0, 0, 2, 2], 3)
    labels = np.array([0, 0, 1, 1])
    assert np.isnan(p.client_emds(labels)).tolist() == [False, True, False]
    assert p.emd(labels) == 1.0
    assert np.isnan(Partition.of_owners([-1, -1], 1).emd(labels))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    spec = {"name": "dirichlet", "alpha": float("inf"), "prior": [0.5, 0.5], "seed": 2**62}
    p = replace(small(), spec=spec, ids=("Zürich", "b,\0c"))
    p.save(tmp_path / "new" / "partition.npz")
    q = Partition.load(tmp_path / "new" / "partition.npz")
    assert (q.ids, q.spec, q.dataset, q.digest) == (p.ids, spec, "toy", p.digest)
    np.testing.assert_array_equal(q.indices, p.indices)
    np.testing.assert_array_equal(q.offsets, p.offsets)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["partition.npz"]


def test_an_empty_partition_can_be_saved(tmp_path: Path) -> None:
    Partition.of_owners([], 0).save(tmp_path / "p.npz")
    assert len(Partition.load(tmp_path / "p.npz")) == 0


def test_the_file_holds_no_pickle(tmp_path: Path) -> None:
    small().save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as file:
        assert all(array.dtype.kind in "iu" for array in file.values())


def test_saving_where_it_is_impossible_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "taken" / "p.npz")


def test_the_digest_is_pinned_and_depends_on_who_has_what_alone() -> None:
    p = small()
    assert p.digest == "6b55a075d87fa1d68b3a9fc83fe92b2f4e55e12ea86dfe93aa02a1be093bded4"
    assert replace(p, spec={"seed": 9}).digest == p.digest
    for other in (
        replace(p, dataset="other"),
        replace(p, ids=("a", "c")),
        replace(p, indices=p.indices[::-1]),
        replace(p, offsets=np.array([0, 3, 5])),
    ):
        assert other.digest != p.digest
    assert replace(p, indices=p.indices.astype(np.int32).astype(">i8")).digest == p.digest


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"offsets": np.array([0, 5])}, "2 clients need 3 offsets, not 2"),
        ({"offsets": np.array([0, 4, 3])}, "offsets do not go up from 0 to 5"),
        ({"offsets": np.array([1, 2, 5])}, "offsets do not go up"),
        ({"offsets": np.array([0, 6, 5])}, "offsets do not go up"),
        ({"ids": ("a", "a")}, "ids"),
        ({"ids": ("a", 1)}, "ids"),
        ({"indices": np.array([0, 2, 1, 3, 2])}, "example 2 is assigned twice"),
        ({"indices": np.array([0, 2, 1, 3, -1])}, "index -1 is negative"),
        ({"indices": np.array([0.0, 2, 1, 3, 4])}, "indices are float64"),
        ({"offsets": np.zeros((1, 3), int)}, "offsets are int64"),
    ],
)
def test_what_is_no_partition_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(DataError, match=what):
        replace(small(), **change)


@pytest.mark.parametrize("owners", [[0.5], [[0]], [0, 3]])
def test_owners_that_do_not_fit_are_refused(owners: list[object]) -> None:
    with pytest.raises(DataError):
        Partition.of_owners(owners, 2)


def _rewrite(path: Path, **entries: object) -> None:
    with np.load(path) as file:
        held = dict(file)
    np.savez(path, **{**held, **entries})


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _text(value: object) -> np.ndarray:
    return np.frombuffer((value if isinstance(value, str) else json.dumps(value)).encode(), np.uint8)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda p: p.unlink(), "the partition file does not exist"),
        (lambda p: p.write_bytes(b""), "not a readable partition file"),
        (lambda p: p.write_bytes(b"anything"), "not a readable partition file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-30]), "not a readable partition file"),
        (lambda p: p.write_bytes(_npy(np.zeros(3))), "not a readable partition file"),
        (lambda p: np.savez(p, x=np.zeros(3)), "not a readable partition file"),
        (lambda p: np.savez(p, format=np.array([{}], object)), "not a readable partition file"),
        (lambda p: _rewrite(p, format=_text("fedlens partition 9")), "format is 'fedlens partition 9'"),
        (lambda p: _rewrite(p, indices=np.array([0, 2, 1, 3, 5])), "digest"),
        (lambda p: _rewrite(p, indices=np.array([0, 2, 1, 3, 3])), "assigned twice"),
        (lambda p: _rewrite(p, ids=_text("{")), "not a readable partition file"),
        (lambda p: _rewrite(p, ids=_text(3)), "not a readable partition file"),
        (lambda p: _rewrite(p, spec=_text([1])), "not a readable partition file"),
        (lambda p: _rewrite(p, dataset=np.array([255], np.uint8)), "not a readable partition file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage, what: str) -> None:
    path = tmp_path / "p.npz"
    small().save(path)
    damage(path)
    with pytest.raises(DataError, match=what) as caught:
        Partition.load(path)
    assert caught.value.where == str(path)


def test_a_flipped_bit_anywhere_in_the_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    small().save(path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("indices.npy")
    for at in range(info.header_offset, info.header_offset + 150, 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with contextlib.suppress(DataError):  # otherwise it is a byte that means nothing
            assert Partition.load(path).digest == small().digest
