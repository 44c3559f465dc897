"""The optical digits that come with scikit-learn: the dataset that needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, published, reading

COUNT, SIDE, INK = 1797, 8, 16
_REINSTALL = "install scikit-learn again"


def digits(root: Path, download: bool, seed: int) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, the same 1,437 to train and 360 to test every time.

    Ink counts 0 to 16 become bytes 0 to 255. The test split is every fifth image of all images sorted by
    class, so it has a fifth of each class. `root` and `seed` are not used.

    Source: E. Alpaydin, C. Kaynak 1998, UCI Machine Learning Repository, test part; the copy in scikit-learn.

    Raises `DataError` if scikit-learn is not installed or its file is damaged.

    >>> data = digits(Path(), False, 0)
    >>> data.train.inputs.shape, len(data.test)
    ((1437, 1, 8, 8), 360)
    """
    table = _read_table()
    labels = table[:, -1].astype(np.int64)
    images = ((table[:, :-1].astype(np.int64) * 255 + INK // 2) // INK).astype(np.uint8)
    images = images.reshape(-1, 1, SIDE, SIDE)
    in_test = np.zeros(len(labels), bool)
    in_test[np.argsort(labels, kind="stable")[::5]] = True
    return published("digits", [Examples(images[rows], labels[rows]) for rows in (~in_test, in_test)])


def _read_table() -> NDArray[np.uint8]:
    """uint8 [1797, 65]: 64 ink counts and the digit."""
    # Finding the package does not import it: importing scikit-learn takes longer than the rest of a start.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "the dataset 'digits' needs scikit-learn, which is not installed", hint="pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        return _checked(_ask_sklearn(), Path("sklearn.datasets.load_digits"))
    with reading(path, _REINSTALL):
        return _checked(np.loadtxt(path, np.float32, delimiter=","), path)


def _ask_sklearn() -> NDArray[np.floating]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.concatenate([images, labels[:, None]], axis=1)


def _checked(table: NDArray[np.floating], path: Path) -> NDArray[np.uint8]:
    expected = COUNT * (SIDE * SIDE + 1)
    if table.size != expected:
        raise damaged(f"the digits are {table.size} numbers instead of {expected}", path, hint=_REINSTALL)
    if not (table.min() >= 0 and table.max() <= INK):
        raise damaged(f"the digits have ink outside 0 .. {INK}", path, hint=_REINSTALL)
    return table.reshape(COUNT, -1).astype(np.uint8)
