"""The optical digits that come with scikit-learn: the dataset that needs no download."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples

COUNT, SIDE, INK = 1797, 8, 16
# Of the 1,437 training images as they are split and scaled here.
MEAN, STD = 0.30580244, 0.37605349


def digits(root: Path, download: bool, seed: int) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, the same 1,437 to train and 360 to test every time.

    Ink counts 0 to 16 become bytes 0 to 255. The test split is every fifth image of all images sorted by
    class, so each class gives a fifth of its own, and neither `root` nor `seed` plays a part.

    Source: E. Alpaydin, C. Kaynak 1998, UCI Machine Learning Repository, test part; the copy in scikit-learn.

    Raises `DataError` where scikit-learn is not installed or its file is damaged.

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
    return Dataset(
        name="digits",
        train=Examples(images[~in_test], labels[~in_test]),
        test=Examples(images[in_test], labels[in_test]),
        classes=tuple(str(digit) for digit in range(10)),
        mean=(MEAN,),
        std=(STD,),
        licence="CC BY 4.0 (UCI Machine Learning Repository)",
        source="Optical Recognition of Handwritten Digits, Alpaydin and Kaynak 1998, as in scikit-learn",
    )


def _read_table() -> NDArray[np.uint8]:
    """uint8 [1797, 65]: 64 ink counts and the digit."""
    # Looking the package up does not import it, and importing scikit-learn takes longer than the rest of a
    # start.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed", hint="pip install scikit-learn"
        )
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        return _ask_sklearn()
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        table = np.array(text.replace("\n", ",").rstrip(",").split(","), dtype=np.float32)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"the digits cannot be read: {error}", where=str(path), hint=_REINSTALL) from error
    return _checked(table, str(path))


def _ask_sklearn() -> NDArray[np.uint8]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _checked(np.concatenate([images, labels[:, None]], axis=1).ravel(), "sklearn.datasets.load_digits")


def _checked(table: NDArray[np.floating], where: str) -> NDArray[np.uint8]:
    expected = COUNT * (SIDE * SIDE + 1)
    if table.size != expected:
        raise DataError(
            f"the digits are {table.size} numbers instead of {expected}", where=where, hint=_REINSTALL
        )
    if not (table.min() >= 0 and table.max() <= INK):
        raise DataError(f"the digits have ink outside 0 .. {INK}", where=where, hint=_REINSTALL)
    return table.reshape(COUNT, -1).astype(np.uint8)


_REINSTALL = "install scikit-learn again"
