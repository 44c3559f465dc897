"""Writes a folder to try things on: 1,797 small scans (scikit-learn's digits) and a table of who took them.

    python make_scans.py scans
    python make_scans.py mislabelled Bonn

Six hospitals of very different sizes; two of them see hardly any but the digits 0 to 4. With a hospital, 40 % of
its labels are wrong: mislabelled/wrong.txt lists these images.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HOSPITALS = {"Aachen": 0.35, "Bonn": 0.25, "Celle": 0.15, "Dessau": 0.12, "Emden": 0.08, "Fulda": 0.05}
SPECIAL = ("Bonn", "Emden")  # they see the digits 0 to 4 nine times as often


def main(folder: Path, mislabelled: str = "") -> None:
    """Draws the hospital of each scan, and writes images and table."""
    digits = load_digits()
    draw, mistakes = np.random.RandomState(0), np.random.RandomState(1)
    wrong = []
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
            if hospital == mislabelled and mistakes.random_sample() < 0.4:
                label = (label + mistakes.randint(1, 10)) % 10
                wrong.append(path)
            table.writerow([path, f"digit {label}", hospital])
    if mislabelled:
        (folder / "wrong.txt").write_text("".join(f"{path}\n" for path in wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
