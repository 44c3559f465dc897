"""Writes small tables and images of two parties: grey images of 8 x 8 pixels, and coloured ones with labels."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from tests.unit.data.pictures import pixels, write

Rows = list[list[str]]


def rows_of_parties(examples: int = 12) -> tuple[Rows, Rows]:
    """(first line and rows of the party without labels, of the one with); image i has the id 00i.

    Each party lacks one example: the first the training image 5, the second the training image 7. Image 4 is a test
    image that the first party lacks.
    """
    order = np.random.default_rng(0).permutation(examples).tolist()
    grey = [["id", "path"], *([f"{i:03}", f"grey/{i}.png"] for i in order if i not in (4, 5))]
    split = {i: "test" if i % 4 == 0 else "train" for i in order}
    colour = [["path", "split", "id", "label"]]
    for i in sorted(order):
        if i != 7:
            colour.append([f"colour/{i}.png", split[i], f"{i:03}", ("cat", "dog")[i % 2]])
    return grey, colour


def write_parties(folder: Path, grey: Rows | None = None, colour: Rows | None = None) -> tuple[str, str]:
    """Writes the images and the tables `grey.csv` and `colour.csv`, and returns the paths of the tables."""
    for i in range(12):
        write(folder / f"grey/{i}.png", pixels(i, 8, 8, 1))
        write(folder / f"colour/{i}.png", pixels(i, 6, 10))
    paths = []
    for name, given, usual in zip(("grey", "colour"), (grey, colour), rows_of_parties(), strict=True):
        path = folder / f"{name}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(usual if given is None else given)
        paths.append(str(path))
    return paths[0], paths[1]
