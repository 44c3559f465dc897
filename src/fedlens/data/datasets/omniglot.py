"""Omniglot: characters of many alphabets, each drawn by twenty people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from fedlens.base.threads import map_threads
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published
from fedlens.data.datasets.folders import folders_in, images_in
from fedlens.data.decoding import ImageForm, fitted

WHOLE = 105  # pixels a side, as published
EVERY = 5  # one in five images, or drawers, is for testing
_FILE = re.compile(r"\d{4}_(\d{2})\.png")


@dataclass(frozen=True)
class Drawing:
    """One image: its file, its alphabet, its character's position in that, and who drew it, from 1 on."""

    path: Path
    alphabet: str
    character: int
    label: int
    drawer: int


def omniglot(
    root: Path,
    download: bool,
    seed: int,
    *,
    part: Annotated[
        Literal["background", "evaluation", "all"],
        Field(description="background (30 alphabets), evaluation (20 others), or all of them"),
    ] = "background",
    test: Annotated[
        Literal["images", "drawers"],
        Field(
            description="what the fifth held out for testing consists of: images of every drawer, or whole drawers"
        ),
    ] = "images",
    size: Annotated[
        int, Field(ge=8, le=WHOLE, description="pixels per side; 105 is the published size")
    ] = 28,
) -> Dataset:
    """Omniglot from `root/omniglot-py/images_{background,evaluation}`; `seed` plays no part.

    A class is a character of an alphabet; `Dataset.coarse` is the alphabet. The published parts are made for
    one-shot learning and share no class, so none can test a classifier of the other. Here a fifth of each
    character's 20 images is for testing, by one of two fixed rules, with c the character's position in its
    alphabet and d the drawer's number, both from 1 on:

    - `images`: those with (c + d) mod 5 = 0. Every drawer is in both splits, with a fifth of the characters
      in the test split.
    - `drawers`: those with d mod 5 = 0. The test drawers (5, 10, 15, 20 of each alphabet) are in no training
      image.

    Images are grey, scaled from 105x105 to `size` bilinearly, and **inverted**: published ink is 0 on 255, here
    it is 255 on 0, as in MNIST and EMNIST. Mean and deviation are those of the training images.

    Columns: `client`, "<alphabet>/drawer<dd>", `alphabet`, and `drawer`, int64. Each alphabet was drawn by 20
    people, and nothing published says that drawer 5 of one alphabet is drawer 5 of another, so they count as
    different people.

    The whole background part has 964 characters of 30 alphabets in 19,280 images, evaluation 659 of 20 in
    13,180; the two small background sets of 5 alphabets each are read from the same place.

    Source: Lake, Salakhutdinov, Tenenbaum 2015, Human-level concept learning through probabilistic program
    induction, Science 350.

    Raises `DataError` if a part is missing, a file is not named `<dddd>_<dd>.png`, is damaged or not
    105x105, or two images are of one character and drawer.

    >>> _FILE.fullmatch("0108_05.png")[1]
    '05'
    """
    parts = ["background", "evaluation"] if part == "all" else [part]
    patterns = tuple(f"omniglot-py/images_{name}" for name in parts)
    drawings, classes, coarse = _list(locate("omniglot", root, download, [patterns]))
    images = _decode(drawings, size)
    c = np.array([drawing.character for drawing in drawings])
    d = np.array([drawing.drawer for drawing in drawings])
    held_out = (d + (c if test == "images" else 0)) % EVERY == 0
    whole = Examples(
        images,
        np.array([drawing.label for drawing in drawings], np.int64),
        {
            "client": np.array([f"{one.alphabet}/drawer{one.drawer:02d}" for one in drawings]),
            "alphabet": np.array([one.alphabet for one in drawings]),
            "drawer": d.astype(np.int64),
        },
    )
    train, test_examples = whole.take(np.flatnonzero(~held_out)), whole.take(np.flatnonzero(held_out))
    dataset = published("omniglot", (train, test_examples), classes, coarse=coarse)
    return replace(dataset, read_as=ImageForm(1, size, size, "stretch", upright=False, inverted=True))


def _list(folders: Sequence[Path]) -> tuple[list[Drawing], tuple[str, ...], NDArray[np.int64]]:
    """(drawings, class names, group of each class), by alphabet, character and drawer."""
    drawings: list[Drawing] = []
    classes: list[str] = []
    coarse: list[int] = []
    alphabets = sorted((name, folder) for folder in folders for name in folders_in(folder))
    for group, (alphabet, folder) in enumerate(alphabets):
        for position, character in enumerate(folders_in(folder / alphabet), start=1):
            place = folder / alphabet / character
            drawers: set[int] = set()
            for name in images_in(place):
                found = _FILE.fullmatch(name)
                drawer = int(found[1]) if found else 0
                if not drawer or drawer in drawers:
                    what = (
                        "the drawer has another image of this character" if drawer else "no drawer is named"
                    )
                    raise damaged(f"{what}: a file is called <dddd>_<drawer>.png", place / name)
                drawers.add(drawer)
                drawings.append(Drawing(place / name, alphabet, position, len(classes), drawer))
            if not drawers:
                hint = f"remove {folder} and get it again, for example with --download"
                raise damaged("the folder of a character has no images", place, hint=hint)
            classes.append(f"{alphabet}/{character}")
            coarse.append(group)
    if not drawings:
        raise damaged("there are no alphabets in the folder", folders[0])
    return drawings, tuple(classes), np.array(coarse, np.int64)


def _decode(drawings: list[Drawing], size: int) -> NDArray[np.uint8]:
    """uint8 [n, 1, size, size], ink bright."""
    out = np.empty((len(drawings), 1, size, size), np.uint8)

    def one(at: int) -> None:
        path = drawings[at].path
        try:
            with Image.open(path) as image:
                grey = image.convert("L")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise damaged(f"the image cannot be decoded: {error}", path) from error
        if grey.size != (WHOLE, WHOLE):
            found = f"{grey.width} x {grey.height}"
            raise damaged(f"the image is {found}, and {WHOLE} x {WHOLE} is expected", path)
        out[at, 0] = 255 - np.asarray(fitted(grey, size, size, "stretch"))

    map_threads(one, range(len(drawings)))
    return out
