"""Writes the images of one of three sites: a part of the training images of scikit-learn's digits, and a table.

python make_digits.py scans site-a
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SHARES = {"site-a": 0.5, "site-b": 0.3, "site-c": 0.2}


def main(folder: Path, site: str) -> None:
    """Draws the site of each image, and writes those of `site`."""
    digits = load_digits()
    test = np.argsort(digits.target, kind="stable")[::5]  # of the dataset "digits", which the server has
    owners = np.random.RandomState(0).choice(list(SHARES), len(digits.target), p=list(SHARES.values()))
    folder.mkdir()
    with (folder / "scans.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label"])
        for number in np.setdiff1d(np.flatnonzero(owners == site), test):
            path = f"{number:04}.png"
            Image.fromarray((digits.images[number] * 255 / 16).astype(np.uint8)).save(folder / path)
            table.writerow([path, digits.target[number]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
