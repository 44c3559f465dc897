"""The Semantic Boundaries Dataset: class masks of 11,355 images of Pascal VOC, in MATLAB files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.data.datasets.dataset_files import damaged
from fedlens.data.datasets.voc_files import read_ids

INNER = "benchmark_RELEASE/dataset"
# The images of SBD's two splits: 8,498 for training, 2,857 for validation.
LISTS = (f"{INNER}/train.txt", f"{INNER}/val.txt")
OPENER = "fedlens.data.datasets.sbd:open_mask"
_UNPACK = "unpack the archive of SBD again"


def split_ids(root: Path, split: str) -> list[str]:
    """The images of SBD's `train` or `val` split."""
    return read_ids(root / INNER / f"{split}.txt")


def image_of(name: str) -> str:
    """The file of an image, below the data folder."""
    return f"{INNER}/img/{name}.jpg"


def mask_of(name: str) -> str:
    """The file of its mask, below the data folder."""
    return f"{INNER}/cls/{name}.mat"


def open_mask(path: Path) -> Image.Image:
    """A mask as a picture of class ids, from a MATLAB file of SBD or from an image file.

    A file of SBD holds the struct GTcls; its field Segmentation is uint8 [H, W], 0 for background and 1 to 20 for
    the classes in the order of VOC. It has no void. Raises `DataError` if the file holds anything else.
    """
    return Image.fromarray(read_mat(path)) if path.suffix == ".mat" else Image.open(path)


def read_mat(path: Path) -> NDArray[np.uint8]:
    """uint8 [H, W]: GTcls.Segmentation of a MATLAB file. Raises `DataError`."""
    from scipy.io import loadmat

    try:
        found: Any = loadmat(path, variable_names=["GTcls"])["GTcls"][0, 0]["Segmentation"]
    except Exception as error:  # a damaged file can raise any exception
        reason = str(error) or type(error).__name__
        raise damaged(f"the mask GTcls.Segmentation cannot be read: {reason}", path, hint=_UNPACK) from error
    if found.dtype != np.uint8 or found.ndim != 2:
        what = f"GTcls.Segmentation was expected to be uint8 [H, W], found {found.dtype} {list(found.shape)}"
        raise damaged(what, path, hint=_UNPACK)
    mask: NDArray[np.uint8] = found
    return mask
