"""Pascal VOC 2012: masks or boxes of 20 kinds of objects, optionally with the masks of SBD.

The Semantic Boundaries Dataset has class masks of 11,355 images of Pascal VOC, in MATLAB files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published
from fedlens.data.datasets.folders import check_present
from fedlens.data.datasets.masks import masked
from fedlens.data.datasets.voc_files import VocFolder, detection_splits, no_leak, read_ids
from fedlens.data.formats import common_settings as common
from fedlens.data.images import Fit

INNER = "VOCdevkit/VOC2012"
_SBD = "benchmark_RELEASE/dataset"
# The images of SBD's two splits: 8,498 for training, 2,857 for validation.
_SBD_LISTS = (f"{_SBD}/train.txt", f"{_SBD}/val.txt")
_UNPACK = "unpack the archive of SBD again"


def pascal_voc(
    root: Path,
    download: bool,
    seed: int,
    *,
    task: Annotated[
        Literal["segmentation", "detection"], Field(description="masks of 21 classes, or boxes of 20")
    ] = "segmentation",
    augmented: Annotated[bool, Field(description="segmentation: with the masks of SBD too")] = False,
    test: Annotated[
        Literal["voc", "sbd"],
        Field(description="with `augmented`: tested on VOC's val, or on SBD's own val as in FedCV"),
    ] = "voc",
    difficult: Annotated[
        bool, Field(description="detection: whether objects marked as difficult count as objects")
    ] = False,
    size: common.GivenSize = 512,
    fit: common.Fit = "pad",
) -> Dataset:
    """Pascal VOC 2012 with its published train and val splits; `seed` plays no part.

    VOC's test labels are withheld, so its val split is the test data here. What is read:

    | settings | training | test |
    |---|---|---|
    | segmentation | VOC train, 1,464 | VOC val, 1,449 |
    | `augmented` | VOC train and all of SBD, without VOC val: 10,582 | VOC val, 1,449 |
    | `augmented`, `test="sbd"` | SBD train, 8,498 | SBD val, 2,857 |
    | detection | VOC train, 5,717 | VOC val, 5,823 |

    SBD has 11,355 images, the number that fedcv (5, 7.1.1) states for "augmented PASCAL VOC"; they are SBD's own
    two splits, the third row. That split and VOC's know nothing of each other: of the images that SBD has
    for training many are in VOC's val. They would be a leak, so `augmented` leaves them out and says in
    `Dataset.notes` how many. Where an image has both masks, VOC's is taken, which is finer and has a void border;
    with `test="sbd"` it is SBD's throughout.

    Masks: 21 classes, background first; 255 is void. Boxes: 20 classes; the published corners count from 1 and
    include the last pixel, and come out as edges counted from 0. Objects marked as difficult are left out of
    training and of testing, and counted in the notes, unless `difficult`: VOC's own protocol neither rewards nor
    punishes a detector that finds them, here one that does is punished. Column `image`: the name of the image.
    There is no natural client.

    Reads `root/VOCdevkit/VOC2012` and `root/benchmark_RELEASE/dataset` (img, cls, train.txt, val.txt); fetches
    what is missing of the two (2.0 and 1.4 GB) with `download`. Raises `DataError` if files are missing or
    damaged, `ConfigError` if settings do not go together.

    Source: Everingham et al. 2010, The Pascal Visual Object Classes Challenge; Hariharan et al. 2011, Semantic
    Contours from Inverse Detectors.
    """
    if task == "detection" and augmented:
        hint = 'leave it out, or take task = "segmentation"'
        raise ConfigError("SBD has masks only, no boxes", where="augmented", hint=hint)
    if test == "sbd" and not augmented:
        raise ConfigError("SBD is not read without augmented", where="test", hint="take augmented = true too")
    if difficult and task != "detection":
        hint = 'leave it out, or take task = "detection"'
        raise ConfigError("no mask is marked as difficult", where="difficult", hint=hint)
    lists = f"{INNER}/ImageSets/{'Main' if task == 'detection' else 'Segmentation'}"
    if test == "voc":
        locate("pascal-voc", root, download, [(f"{lists}/train.txt", f"{lists}/val.txt")])
    if augmented:
        locate("pascal-voc", root, download, [_SBD_LISTS])
    to = common.size_of(size)
    classes = CATALOGUE["pascal-voc"].labels
    if task == "detection":
        classes = classes[1:]  # without the background
        folder = VocFolder(root, INNER, classes, difficult)
        train, evaluation, notes = detection_splits(folder, ["train"], ["val"], to, fit)
    else:
        train, evaluation, notes = _segmentation(root, to, fit, augmented, test)
    source = CATALOGUE["pascal-voc"].source or ""
    if not augmented:
        source = source.partition(";")[0]  # without SBD
    return published("pascal-voc", (train, evaluation), classes, notes=notes, source=source)


def _segmentation(
    root: Path, size: tuple[int, int], fit: Fit, augmented: bool, test: str
) -> tuple[Examples, Examples, tuple[str, ...]]:
    notes: list[str] = []
    if test == "sbd":
        train_ids, test_ids = _sbd_ids(root, "train"), _sbd_ids(root, "val")
        no_leak(train_ids, test_ids, root / _SBD)
        return _masked(root, [], train_ids, size, fit), _masked(root, [], test_ids, size, fit), ()
    folder = VocFolder(root, INNER, ())
    train_ids, test_ids = folder.ids(["train"], "Segmentation"), folder.ids(["val"], "Segmentation")
    no_leak(train_ids, test_ids, folder.path / "ImageSets" / "Segmentation")
    more: list[str] = []
    if augmented:
        given = [*_sbd_ids(root, "train"), *_sbd_ids(root, "val")]
        known, leaks = set(train_ids), set(test_ids)
        more = sorted(set(given) - known - leaks)
        notes.append(
            f"train, images of SBD left out because they are in VOC's val, the test data: "
            f"{len(leaks & set(given)):,} of {len(given):,}"
        )
    return _masked(root, train_ids, more, size, fit), _masked(root, test_ids, [], size, fit), tuple(notes)


def _masked(root: Path, voc: list[str], more: list[str], size: tuple[int, int], fit: Fit) -> Examples:
    """The images `voc` with the masks of VOC, and after them the images `more` with those of SBD."""
    names = [f"{INNER}/JPEGImages/{each}.jpg" for each in voc] + [f"{_SBD}/img/{each}.jpg" for each in more]
    masks = [f"{INNER}/SegmentationClass/{each}.png" for each in voc] + [
        f"{_SBD}/cls/{each}.mat" for each in more
    ]
    for files in (names, masks):
        check_present(root, files, str(root))
    columns = {"image": np.array([*voc, *more])}
    return masked(
        root, names, masks, size, fit, columns, opener=f"{__name__}:{open_mask.__name__}" if more else None
    )


def _sbd_ids(root: Path, split: str) -> list[str]:
    """The images of SBD's `train` or `val` split."""
    return read_ids(root / _SBD / f"{split}.txt")


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
