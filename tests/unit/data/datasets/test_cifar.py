import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import cifar
from fedlens.data.datasets.registry import DATASETS
from tests.unit.data.layouts import (
    array_opcodes,
    cifar_batches,
    list_opcodes,
    pickle_of,
    text_opcodes,
    write_cifar_binary,
    write_cifar_python,
)

SMALL = {name: replace(CATALOGUE[name], train=20, test=6) for name in ("cifar10", "cifar100")}
BOTH = pytest.mark.parametrize("name", ["cifar10", "cifar100"])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, facts in SMALL.items():
        monkeypatch.setitem(CATALOGUE, name, facts)


@BOTH
@pytest.mark.parametrize("write", [write_cifar_binary, write_cifar_python])
def test_a_reader_gives_what_was_written(tmp_path: Path, name: str, write) -> None:
    what = SMALL[name]
    write(tmp_path, what)
    data = DATASETS.find(name)(tmp_path, False, 0)
    *train, test = cifar_batches(what)
    assert (data.name, data.input_shape, len(data.classes)) == (name, (3, 32, 32), len(what.labels))
    np.testing.assert_array_equal(
        data.train.inputs.reshape(20, -1), np.concatenate([pixels for pixels, _ in train])
    )
    np.testing.assert_array_equal(data.train.targets, np.concatenate([labels for _, labels in train]))
    np.testing.assert_array_equal(data.test.inputs.reshape(6, -1), test[0])
    np.testing.assert_array_equal(data.test.targets, test[1])


def test_the_binary_form_comes_first_and_a_partial_one_does_not_count(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, SMALL["cifar10"])
    write_cifar_python(tmp_path, SMALL["cifar10"])
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    assert len(cifar.cifar10(tmp_path, False, 0).test) == 6
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="test_batch"):
        cifar.cifar10(tmp_path, False, 0)


@BOTH
def test_missing_data_are_named_in_both_forms(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        DATASETS.find(name)(tmp_path, False, 0)
    for part in (SMALL[name].files[0][0], SMALL[name].files[1][0], str(tmp_path), "--download"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda c: c[:-1],
            "12292 bytes were expected, 4 records of 3073, found 12291 bytes, which is 3 records and 3072",
        ),
        (lambda c: c[:-3073], "found 9219 bytes, which is 3 records"),
        (lambda c: c + c[:3073], "found 15365 bytes, which is 5 records"),
        (lambda c: c[:3073] + b"\x0a" + c[3074:], "label 10 of record 1 is not in 0 .. 9"),
    ],
)
def test_a_damaged_binary_file_is_refused(tmp_path: Path, change, what: str) -> None:
    write_cifar_binary(tmp_path, SMALL["cifar10"])
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        cifar.cifar10(tmp_path, False, 0)
    assert what in str(caught.value)
    assert caught.value.where == str(path)


PIXELS = array_opcodes(np.zeros((4, 3072), np.uint8))
LABELS = list_opcodes([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "cannot be unpickled"),
        (pickle_of({"data": PIXELS, "labels": LABELS})[:-40], "cannot be unpickled"),
        (b"no pickle at all", "cannot be unpickled"),
        (pickle.dumps([1, 2], 2), "the entry 'data' was expected, found list of length 2"),
        (pickle_of({"data": PIXELS}), "the entry 'labels' was expected, found a dictionary of data"),
        (
            pickle_of({"data": array_opcodes(np.zeros((3, 3072), np.uint8)), "labels": LABELS}),
            "'data' was expected to be uint8 [4, 3072], found uint8 [3, 3072]",
        ),
        (pickle_of({"data": LABELS, "labels": LABELS}), "found list of length 4"),
        (
            pickle_of({"data": PIXELS, "labels": list_opcodes([0, 1])}),
            "a list of 4 whole numbers, found list of length 2",
        ),
        (
            pickle_of({"data": PIXELS, "labels": text_opcodes(b"abcd")}),
            "a list of 4 whole numbers, found str of length 4",
        ),
        (
            pickle_of({"data": PIXELS, "labels": list_opcodes([0, 1, -1, 3])}),
            "label -1 of record 2 is not in 0 .. 9",
        ),
    ],
)
def test_a_damaged_pickle_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    write_cifar_python(tmp_path, SMALL["cifar10"])
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        cifar.cifar10(tmp_path, False, 0)
    assert what in str(caught.value)
    assert caught.value.where == str(path)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self.path,))


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    write_cifar_python(tmp_path, SMALL["cifar10"])
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Payload(tmp_path / "harm"), "labels": [0]}, 2))
    with pytest.raises(DataError, match=r"asks for posix.mkdir, and only arrays are allowed|asks for nt"):
        cifar.cifar10(tmp_path, False, 0)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins\neval", "numpy\nload", "numpy\nfromfile", "numpy.core.multiarray\nscalar", "numpy\nrecarray"],
)
def test_no_other_name_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x80\x02c" + name.encode() + b"\n.")
    with pytest.raises(DataError, match="only arrays are allowed"):
        cifar.read_pickle(path)


@pytest.mark.parametrize("array", [np.array([{}]), np.array([1.5]), np.array(["a"])])
def test_only_arrays_of_numbers_are_rebuilt(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps({"data": array, "labels": [0]}, 2))
    with pytest.raises(DataError, match="asks for an array of"):
        cifar.read_pickle(path)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode])
def test_pickles_that_python_3_wrote_are_read_too(tmp_path: Path, protocol: int, key) -> None:
    write_cifar_python(tmp_path, SMALL["cifar10"])
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps({key("data"): pixels, key("labels"): [3, 4, 0, 9]}, protocol))
    train = cifar.cifar10(tmp_path, False, 0).train
    np.testing.assert_array_equal(train.inputs[4:8].reshape(4, 3072), pixels)
    assert train.targets[4:8].tolist() == [3, 4, 0, 9]


def test_the_layout_written_here_is_what_an_ordinary_unpickler_reads() -> None:
    """Guards the helper above, not the reader."""
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = pickle_of({"data": array_opcodes(pixels)})
    found = pickle.loads(content, encoding="latin1")
    assert content[:2] == b"\x80\x02"
    np.testing.assert_array_equal(found["data"], pixels)


@pytest.mark.parametrize("size", [16, 8])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_smaller_images_are_means_of_blocks(tmp_path: Path, name: str, size: int) -> None:
    write_cifar_binary(tmp_path, CATALOGUE[name])
    whole, small = (DATASETS.find(name)(tmp_path, False, 0, size=side) for side in (32, size))
    assert small.input_shape == (3, size, size)
    side = 32 // size
    for row, column in np.ndindex(size, size):
        rows, columns = (slice(side * at, side * (at + 1)) for at in (row, column))
        means = whole.test.inputs[:, :, rows, columns].mean(axis=(2, 3))
        assert (np.abs(small.test.inputs[:, :, row, column] - means) <= 0.5).all()
    np.testing.assert_array_equal(small.train.targets, whole.train.targets)
    np.testing.assert_allclose(small.std, (small.train.inputs / 255).std(axis=(0, 2, 3)))
    assert small.moments_of == len(small.train)
