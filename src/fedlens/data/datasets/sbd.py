"""The Semantic Boundaries Dataset: class masks of 11,355 images of Pascal VOC, in MATLAB files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.core.errors import DataError
from fedlens.data.datasets.voc_files import read_ids
from fedlens.data.download import Resource

INNER = "benchmark_RELEASE/dataset"
ARCHIVE = Resource(
    "benchmark.tgz",
    ("https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz",),
    "82b4d87ceb2ed10f6038a1cba92111cb",
)
OPENER = "fedlens.data.datasets.sbd:open_mask"


def lists(root: Path) -> list[Path]:
    """The files that name the images of SBD's two splits: 8,498 for training, 2,857 for validation."""
    return [root / INNER / "train.txt", root / INNER / "val.txt"]


def split_ids(root: Path, split: str) -> list[str]:
    """The images of SBD's own `train` or `val`."""
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
    the classes in the order of VOC. It has no void. Raises `DataError` where the file holds anything else.
    """
    return Image.fromarray(read_mat(path)) if path.suffix == ".mat" else Image.open(path)


def read_mat(path: Path) -> NDArray[np.uint8]:
    """uint8 [H, W]: GTcls.Segmentation of a MATLAB file. Raises `DataError`."""
    from scipy.io import loadmat

    try:
        found: Any = loadmat(path, variable_names=["GTcls"])["GTcls"][0, 0]["Segmentation"]
    except Exception as error:  # a damaged file fails in every way there is
        reason = str(error) or type(error).__name__
        raise DataError(
            f"the mask GTcls.Segmentation cannot be read: {reason}",
            where=str(path),
            hint="unpack the archive of SBD again",
        ) from error
    if found.dtype != np.uint8 or found.ndim != 2:
        raise DataError(
            f"GTcls.Segmentation was expected to be uint8 [H, W], found {found.dtype} {list(found.shape)}",
            where=str(path),
            hint="unpack the archive of SBD again",
        )
    mask: NDArray[np.uint8] = found
    return mask
