"""Writes a folder to try things on: 1,797 small scans (scikit-learn's digits) and a table of who took them.

    python make_scans.py scans

Six hospitals of very different sizes; two of them see hardly any but the digits 0 to 4.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HOSPITALS = {"Aachen": 0.35, "Bonn": 0.25, "Celle": 0.15, "Dessau": 0.12, "Emden": 0.08, "Fulda": 0.05}
SPECIAL = ("Bonn", "Emden")  # they see the digits 0 to 4 nine times as often


def main(folder: Path) -> None:
    """Draws the hospital of each scan, and writes images and table."""
    digits = load_digits()
    draw = np.random.RandomState(0)
    (folder / "images").mkdir(parents=True)
    with (folder / "scans.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "hospital"])
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            weights = {
                name: share * (1.8 if label < 5 else 0.2) if name in SPECIAL else share
                for name, share in HOSPITALS.items()
            }
            shares = np.array(list(weights.values())) / sum(weights.values())
            hospital = draw.choice(list(HOSPITALS), p=shares)
            path = f"images/{number:04}.png"
            Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / path)
            table.writerow([path, f"digit {label}", hospital])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
