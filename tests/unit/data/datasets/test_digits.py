import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.dataset import channel_moments
from fedlens.data.datasets.digits import digits


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    data = digits(Path(), False, 0)
    images, labels = load_digits(return_X_y=True)
    assert (len(data.train), len(data.test), data.input_shape) == (1437, 360, (1, 8, 8))
    both = np.concatenate([data.train.inputs, data.test.inputs]).reshape(-1, 64)
    ours = sorted(zip(both.tolist(), [*data.train.targets, *data.test.targets], strict=True))
    theirs = sorted(zip(np.floor(images * 255 / 16 + 0.5).astype(int).tolist(), labels, strict=True))
    assert ours == theirs


def test_the_split_is_stratified_and_fixed() -> None:
    one, other = digits(Path(), False, 0), digits(Path("elsewhere"), True, 7)
    counts = np.bincount(one.train.targets) / (np.bincount(one.train.targets) + np.bincount(one.test.targets))
    assert np.abs(counts - 0.8).max() < 0.01
    assert one.train.targets[:5].tolist() == [1, 3, 5, 6, 7]
    np.testing.assert_array_equal(one.test.inputs, other.test.inputs)


def test_the_stated_moments_are_those_of_the_training_images() -> None:
    data = digits(Path(), False, 0)
    measured = channel_moments(data.train.inputs)
    np.testing.assert_allclose([data.mean, data.std], measured, atol=1e-7)


def test_reading_digits_does_not_import_scikit_learn() -> None:
    code = (
        "import sys; from pathlib import Path; from fedlens.data.datasets.digits import digits;"
        "digits(Path(), False, 0); raise SystemExit('sklearn' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_its_file_scikit_learn_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = digits(Path(), False, 0)
    import sklearn.datasets  # noqa: F401  (before the look-up is replaced)

    _pretend(monkeypatch, tmp_path)
    np.testing.assert_array_equal(digits(Path(), False, 0).test.inputs, expected.test.inputs)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"not gzip", "cannot be read"),
        (gzip.compress(b"1,2,3\n", mtime=0), "3 numbers instead of 116805"),
        (gzip.compress(b"1,a,3\n", mtime=0), "cannot be read"),
        (gzip.compress(b"1,2,3\n", mtime=0)[:-9], "cannot be read"),
        (gzip.compress(b"17\n" * 116805, mtime=0), r"ink outside 0 .. 16"),
    ],
)
def test_a_damaged_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, what: str
) -> None:
    path = tmp_path / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    _pretend(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=what) as caught:
        digits(Path(), False, 0)
    assert caught.value.where == str(path)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits(Path(), False, 0)


def _pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """scikit-learn is in `folder`, as far as the reader can see."""
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr("fedlens.data.datasets.digits.importlib.util.find_spec", lambda name: spec)
