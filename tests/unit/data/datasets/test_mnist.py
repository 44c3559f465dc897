import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import mnist
from fedlens.data.datasets.registry import DATASETS
from tests.unit.data.layouts import idx_bytes, write_mnist

SMALL = {name: replace(CATALOGUE[name], train=30, test=20) for name in ("mnist", "fashion-mnist")}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, facts in SMALL.items():
        monkeypatch.setitem(CATALOGUE, name, facts)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_a_reader_gives_what_was_written(tmp_path: Path, suffix: str, name: str) -> None:
    written = write_mnist(tmp_path, SMALL[name], suffix)
    data = DATASETS.find(name)(tmp_path, False, 0)
    assert (data.name, data.input_shape, len(data.classes)) == (name, (1, 28, 28), 10)
    for split, prefix in ((data.train, "train"), (data.test, "t10k")):
        np.testing.assert_array_equal(split.inputs[:, 0], written[f"{prefix}-images-idx3-ubyte"])
        np.testing.assert_array_equal(split.targets, written[f"{prefix}-labels-idx1-ubyte"])
        assert split.inputs.flags.writeable  # PyTorch takes only such arrays without a copy


def test_plain_and_gzipped_files_may_be_mixed(tmp_path: Path) -> None:
    write_mnist(tmp_path, SMALL["mnist"])
    path = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert len(mnist.mnist(tmp_path, False, 0).test) == 20


def test_missing_files_are_named_with_the_two_ways_to_get_them(tmp_path: Path) -> None:
    write_mnist(tmp_path, SMALL["fashion-mnist"])
    folder = tmp_path / "FashionMNIST" / "raw"
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        mnist.fashion_mnist(tmp_path, False, 0)
    text = str(caught.value)
    assert "train-labels-idx1-ubyte" in text
    assert "train-images" not in text
    assert text.startswith(f"Fashion-MNIST is incomplete in {tmp_path}: missing ")
    assert "--download" in text
    assert "FEDLENS_DATA" in text


def _cut(content: bytes) -> bytes:
    return content[:-1]


def _longer(content: bytes) -> bytes:
    return content + b"\0"


@pytest.mark.parametrize(
    ("file", "change", "what"),
    [
        ("train-images-idx3-ubyte", _cut, "23520 bytes of data were expected, found 23519"),
        ("train-images-idx3-ubyte", _longer, "23520 bytes of data were expected, found more"),
        ("train-images-idx3-ubyte", lambda _: b"", "ends in its header, after 0 bytes"),
        ("train-labels-idx1-ubyte", lambda content: content[:5], "ends in its header, after 5 bytes"),
        (
            "t10k-labels-idx1-ubyte",
            lambda c: b"\0\0\x08\x03" + c[4:],
            "magic number 2049 was expected, found 2051",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda c: b"<!DOCTYPE html>" * 99,
            "magic number 2051 was expected, found",
        ),
        (
            "t10k-labels-idx1-ubyte",
            lambda _: idx_bytes(np.zeros(19), 2049),
            "header says 19, and 20 was expected",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda _: idx_bytes(np.zeros((20, 27, 28)), 2051),
            "header says 20 x 27 x 28, and 20 x 28 x 28 was expected",
        ),
        ("t10k-labels-idx1-ubyte", lambda c: c[:-1] + b"\x0a", "label 10 of record 19 is not in 0 .. 9"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_damaged_file_is_named_with_what_was_expected_and_found(
    tmp_path: Path, suffix: str, file: str, change: Callable[[bytes], bytes], what: str
) -> None:
    write_mnist(tmp_path, SMALL["mnist"], suffix)
    path = tmp_path / "MNIST" / "raw" / (file + suffix)
    content = path.read_bytes()
    path.write_bytes(gzip.compress(change(gzip.decompress(content))) if suffix else change(content))
    with pytest.raises(DataError) as caught:
        mnist.mnist(tmp_path, False, 0)
    assert what in str(caught.value)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "change",
    [_cut, lambda c: c[: len(c) // 2], lambda c: b"plain" + c, lambda c: c[:200] + b"\xff\0" + c[202:]],
)
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path, SMALL["mnist"], ".gz")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        mnist.mnist(tmp_path, False, 0)
    assert caught.value.where == str(path)


def test_a_damaged_gzip_stream_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    write_mnist(tmp_path, SMALL["mnist"], ".gz")
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    content = path.read_bytes()
    expected = mnist.mnist(tmp_path, False, 0).train.targets
    refused: list[str | None] = []
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            np.testing.assert_array_equal(mnist.mnist(tmp_path, False, 0).train.targets, expected)
        except DataError as error:
            refused.append(error.where)
    assert len(refused) > len(content) // 2
    assert set(refused) == {str(path)}
